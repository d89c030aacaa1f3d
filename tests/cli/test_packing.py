"""`data.packing` as a user meets it: a plan of the first batch, and what it can't go together with."""

import json

import pytest

JOB = """
[model]
num_layers = 4
hidden = 64
num_heads = 4
ffn_hidden = 128
vocab_size = 256

[training]
sequence_length = 4096
global_batch = 4
precision = "fp32"

[data]
source = "text"
packing = "elastic"

[layout]
pipeline = 2

[[cluster.sites]]
name = "zurich"
device = "cpu"
num_devices = 2
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "text").mkdir()
    for index, length in enumerate((9000, 300, 20, 4, 1)):
        (tmp_path / "text" / f"{index}.txt").write_text("a" * length)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def test_a_plan_tells_of_the_first_batch(farpipe, job, tmp_path):
    shown = farpipe("plan", job, "-o", "plan.json")
    assert shown.returncode == 0, shown.stderr
    assert "Every step is planned for itself: 4 documents of up to 4096 tokens" in " ".join(shown.stdout.split())
    assert json.loads((tmp_path / "plan.json").read_text())["schedule"]["method"] == "chunk-1f1b"


def test_a_text_whose_longest_document_fits_in_no_number_of_slices(farpipe, job, tmp_path):
    (tmp_path / "giant").mkdir()
    header = {"format": "farpipe/tokens/1", "dtype": "uint8", "num_tokens": 9 * 10**9, "vocab_size": 256}
    (tmp_path / "giant" / "a.json").write_text(json.dumps(header))
    with (tmp_path / "giant" / "a.bin").open("wb") as file:
        file.truncate(header["num_tokens"])
    job.write_text(JOB.replace('"text"', '"giant"').replace("4096", str(3 * 10**9)).replace("= 4\np", "= 1\np"))
    done = farpipe("plan", job)
    assert done.returncode == 4, done.stderr
    assert "a sequence of 3000000000 tokens does not fit in any number of slices: rank" in done.stderr
    assert "tokens fit" in done.stderr


@pytest.mark.parametrize(
    ("change", "arguments", "code", "message"),
    [
        (("precision", "microbatch_size = 2\nprecision"), (), 3, "microbatch_size: not with data.packing"),
        (("global_batch = 4", "global_batch = 4\nevaluate_every_steps = 2"), (), 3, "no text is held out for it"),
        (('"elastic"', '"elastc"'), (), 3, "'elastic', 'fixed' or 'none'"),
        (("global_batch = 4", "global_batch = 400"), (), 3, "one step takes 400 (training.global_batch)"),
        (("pipeline = 2", "pipeline = 2"), ("--method", "gpipe"), 2, "--method is not for data.packing"),
        (("pipeline = 2", "pipeline = 2"), ("--replan",), 2, "--replan is not for data.packing"),
        (
            ("hidden = 64", 'hidden = 64\npositions = "learned"\nmax_sequence_length = 512'),
            (),
            3,
            "512 learned positions",
        ),
    ],
)
def test_what_packing_does_not_go_together_with(farpipe, job, change, arguments, code, message):
    job.write_text(JOB.replace(*change, 1))
    done = farpipe("train", job, "--prepare", "--run-dir", "run", *arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr


def test_a_plan_is_no_job(farpipe, job):
    assert farpipe("plan", job, "-o", "plan.json").returncode == 0
    done = farpipe("train", "plan.json", "--run-dir", "run", "--prepare")
    assert done.returncode == 2, done.stderr
    assert "every step is planned for itself; give the job" in done.stderr
