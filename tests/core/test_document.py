"""Promises of all types that are saved and loaded; their own tests hold the round trips."""

import json

import pytest

from farpipe.core.document import Document
from farpipe.core.errors import InputError, RunError
from farpipe.core.simulate import Timeline
from farpipe.core.step import Problem, Rank, Schedule, Stage
from farpipe.engine.checkpoint.manifest import Manifest
from farpipe.engine.figures.metrics import Summary
from farpipe.engine.run_spec import RunSpec
from farpipe.planning import Plan
from farpipe.planning.cost import Profile
from farpipe.planning.cost.chunks import ChunkCosts

TYPES = [ChunkCosts, Manifest, Plan, Problem, Profile, RunSpec, Schedule, Summary, Timeline]
STAGE = Stage(rank=0, forward_s=1, input_grad_s=1, weight_grad_s=1)


def file_of(kind, folder, text):
    path = folder / ("manifest.json" if kind is Manifest else "file.json")
    path.write_text(text)
    return path, folder if kind is Manifest else path


def test_all_of_them_are_documents_of_their_own_format():
    assert all(issubclass(kind, Document) for kind in TYPES)
    assert len({kind.FORMAT for kind in TYPES}) == len(TYPES)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_files_of_another_kind_are_refused_with_file_and_place(kind, tmp_path):
    path, place = file_of(kind, tmp_path, json.dumps({"format": "farpipe/hat/1"}))
    with pytest.raises(InputError) as caught:
        kind.load(place)
    assert str(caught.value) == f"{path}: format: expected {kind.FORMAT!r}, found 'farpipe/hat/1'"
    with pytest.raises(InputError, match=f"^{kind.FORMAT.split('/')[1]}: format: expected"):
        kind.from_data({"format": "farpipe/hat/1"})


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "a", "format": "b"}', '{"x": NaN}'])
def test_what_is_no_document_is_refused_with_its_file(kind, text, tmp_path):
    path, place = file_of(kind, tmp_path, text)
    with pytest.raises(InputError) as caught:
        kind.load(place)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "kind", sorted(set(TYPES) - {ChunkCosts, RunSpec, Timeline}, key=str), ids=lambda kind: kind.__name__
)
def test_unknown_keys_are_refused_with_their_name(kind, tmp_path):
    path, place = file_of(kind, tmp_path, json.dumps({"format": kind.FORMAT, "hat": 1}))
    with pytest.raises(InputError) as caught:
        kind.load(place)
    assert str(caught.value).startswith(f"{path}: ")
    assert "hat" in str(caught.value)


def test_a_document_that_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    problem, path = Problem(num_microbatches=1, ranks=(Rank(),), stages=(STAGE,)), tmp_path / "p.json"
    problem.save(path)
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(RunError, match=r"p\.json: can't be written"):
        problem.model_copy(update={"num_microbatches": 2}).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]
    assert Problem.load(path) == problem
