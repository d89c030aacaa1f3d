"""Corpora as files of `farpipe lengths` and as what a job trains on: one code reads both, with the same errors."""

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from farpipe.cli.corpus import read_corpus
from farpipe.core.errors import InputError
from job_files import EIGHT_LAYERS
from planning.workload.test_corpora import DOCUMENTS, TABLE, write_data_set, write_megatron

LENGTHS = [3, 300, 2]
JOB = f"""
{EIGHT_LAYERS}
[training]
sequence_length = 4096
global_batch = 2
[[cluster.sites]]
name = "zurich"
device = "a100-80gb"
num_devices = 2
[data]
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_tokens(folder, ends=(3, 303, 305), counted=None):
    np.save(folder / "a.npy", np.concatenate(DOCUMENTS).astype(np.int32))
    np.save(folder / "a.ends.npy", np.array(ends))
    if counted is not None:
        np.save(folder / "a.counted.npy", np.array(counted, np.uint8))


def found(path):
    corpus = read_corpus(path, None, None)
    return corpus.lengths.tolist(), corpus.num_counted


def test_tokens_have_the_lengths_of_their_documents(tmp_path):
    parquet.write_table(TABLE, tmp_path / "a.parquet")
    write_data_set(tmp_path / "folder")
    write_megatron(tmp_path / "b", [each for each in DOCUMENTS if each])
    write_tokens(tmp_path)
    assert found(tmp_path / "a.parquet") == found(tmp_path / "folder") == (LENGTHS, 2 + 1 + 2)
    for name in ("b.bin", "b.idx", "a.npy", "a.ends.npy"):
        assert found(tmp_path / name) == (LENGTHS, None)
    np.save(tmp_path / "a.counted.npy", np.arange(305) < 7)
    assert found(tmp_path / "a.npy") == found(tmp_path / "a.ends.npy") == (LENGTHS, 7)


def test_padding_is_no_part_of_a_document(tmp_path):
    masks = [[1, 1, 0], [0] * 100 + [1] * 200, [], [0, 0]]
    parquet.write_table(pyarrow.table({"input_ids": DOCUMENTS, "attention_mask": masks}), tmp_path / "a.parquet")
    assert found(tmp_path / "a.parquet") == ([2, 200], None)


def test_what_a_job_refuses_is_refused_as_a_file(tmp_path):
    labels = [each[:2] for each in DOCUMENTS]
    parquet.write_table(pyarrow.table({"input_ids": DOCUMENTS, "labels": labels}), tmp_path / "a.parquet")
    write_tokens(tmp_path, counted=[1, 0])
    for name, problem in (
        ("a.parquet", "3 tokens, but 2 in column 'labels'"),
        ("a.npy", r"a\.counted\.npy: expected a number for each of 305 tokens"),
    ):
        with pytest.raises(InputError, match=problem):
            read_corpus(tmp_path / name, None, None)
    (tmp_path / "a.counted.npy").unlink()
    write_tokens(tmp_path, ends=(3, 25))
    for name in ("a.npy", "a.ends.npy"):
        with pytest.raises(InputError, match=r"a\.ends\.npy: .* the last of them 305, found 2 that end at 25; write"):
            read_corpus(tmp_path / name, None, None)


@pytest.mark.parametrize("name", ["text.parquet", "megatron.bin", "megatron.idx"])
@pytest.mark.parametrize("is_file", [True, False])
def test_empty_corpora_are_refused(farpipe, tmp_path, name, is_file):
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "text.parquet")
    write_megatron(tmp_path / "megatron", [[]])
    (tmp_path / "job.toml").write_text(f'{JOB}source = "{tmp_path / name}"\n')
    run = farpipe("lengths", *([name] if is_file else ["--job", "job.toml"]))
    assert run.returncode == 3
    assert f"{name}: no document has tokens" in run.stderr


def test_tokens_that_are_trained_on_are_shown_and_none_at_all_is_warned_of(farpipe, tmp_path):
    parquet.write_table(TABLE, tmp_path / "a.parquet")
    run = farpipe("lengths", "a.parquet")
    assert "5 tokens (1.6 %) are trained on" in run.stdout
    assert not run.stderr
    labels = [[-100] * len(each) for each in DOCUMENTS]
    parquet.write_table(pyarrow.table({"input_ids": DOCUMENTS, "labels": labels}), tmp_path / "a.parquet")
    run = farpipe("lengths", "a.parquet", "--json")
    assert json.loads(run.stdout)["num_trained_tokens"] == 0
    assert "warning: nothing is trained on" in run.stderr


def test_prompts_of_the_job_count_in_a_file_too(farpipe, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"ask": "four", "text": "sixsix"}\n')
    (tmp_path / "job.toml").write_text(f'{JOB}prompt_key = "ask"\n')
    run = farpipe("lengths", "a.jsonl", "--job", "job.toml", "--json")
    assert json.loads(run.stdout)["num_trained_tokens"] == 6, run.stderr


def test_bytes_are_told_only_where_no_job_names_a_tokenizer(farpipe, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "four"}\n{"text": "four"}\n{"text": "four"}\n')
    (tmp_path / "job.toml").write_text(f'{JOB}source = "{tmp_path / "a.jsonl"}"\n')
    np.save(tmp_path / "b.npy", np.arange(256))
    np.save(tmp_path / "b.ends.npy", np.array([256]))
    assert "bytes are counted as tokens" in farpipe("lengths", "a.jsonl").stderr
    for arguments in (("b.npy",), ("a.jsonl", "--job", "job.toml"), ("--job", "job.toml")):
        run = farpipe("lengths", *arguments)
        assert run.returncode == 0, run.stderr
        assert "bytes are counted as tokens" not in run.stderr


def test_the_batch_is_the_jobs_unless_it_is_given(farpipe, tmp_path):
    (tmp_path / "lengths.txt").write_text("5\n" * 10)
    (tmp_path / "job.toml").write_text(JOB)
    assert "a batch of 2 on this cluster" in farpipe("lengths", "lengths.txt", "--job", "job.toml").stdout
    given = farpipe("lengths", "lengths.txt", "--job", "job.toml", "--sample", 3)
    assert "a batch of 3 on this cluster" in given.stdout
