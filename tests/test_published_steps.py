"""Public tables of measured steps become points."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cost_model.published_steps import load_published
from farpipe.core.errors import InputError
from farpipe.planning.planner.validation import validate_groups

HEAD = "source,gpu,model,layers,hidden,heads,kv_heads,ffn,vocab,seq,TP,PP,DP,microbatches,mbs,step_ms,max_memory_gib\n"
ROW = "S,B200,Llama-70B cut to 12 layers,12,8192,64,8,28672,128256,4096,4,1,2,4,1,409.80,39.07\n"
DATA = os.environ.get("FARPIPE_DATA")


def folder_with(tmp_path, text):
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "b200.csv").write_text(text)
    return tmp_path


def test_a_row_becomes_a_point_with_time_and_memory(tmp_path):
    (group,) = load_published(folder_with(tmp_path, HEAD + ROW))
    point = group.points[0]
    assert (group.name, group.tolerance, group.memory_tolerance) == ("b200", 0.08, 0.04)
    assert (point.device, point.tensor, point.zero, point.global_batch) == ("b200", 4, 1, 8)
    assert (point.step_s, point.memory_bytes) == (0.4098, 39.07 * 2**30)
    result = validate_groups([group]).groups[0].results[0]
    assert abs(result.error) < 0.08
    assert abs(result.memory_error) < 0.04


def test_memory_outside_its_tolerance_fails_the_gate(tmp_path):
    (group,) = load_published(folder_with(tmp_path, HEAD + ROW.replace("39.07", "50.00")))
    report = validate_groups([group])
    assert not report.passed
    assert "memory 2" in report.table()


@pytest.mark.parametrize(("text", "message"), [(HEAD, "none of the tables"), (HEAD + ROW.replace("4096", "0"), "b200")])
def test_an_empty_folder_and_a_damaged_row_are_input_errors(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_published(folder_with(tmp_path, text))


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="FARPIPE_DATA is not set: the published tables are not here")
def test_published_rows_are_within_the_tolerance_of_their_source():
    """A part of the large tables; benchmarks/cost_model/published_steps.py takes every row, for minutes."""
    groups = load_published(Path(DATA or ""))
    assert sum(len(group.points) for group in groups) > 800
    parts = {"vtrain-single-node": slice(0, None, 24), "vtrain-multi-node": slice(0, None, 3)}
    parts |= {"narayanan-sc21": slice(0, 4), "korthikanti-2022": slice(0, 4)}
    few = [replace(group, points=group.points[parts.get(group.name, slice(None))]) for group in groups]
    validate_groups(few).raise_if_failed()
