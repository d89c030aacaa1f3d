"""`data.packing` as a user meets it: a plan of the first batch, and what it can't go together with."""

import json
import re

import pytest

from farpipe.core.spec import Model
from farpipe.planning.cost import model_shape
from farpipe.planning.cost.chunk_profile import ChunkProfile

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
    shown = farpipe("plan", job, "-o", "plan.json", "--full")
    assert shown.returncode == 0, shown.stderr
    assert "Each step gets its own plan: 4 documents of up to 4096 tokens" in " ".join(shown.stdout.split())
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["schedule"]["method"] == "chunk-1f1b"
    step_s = plan["prediction"]["step_s"]
    assert f"100 steps of ~{step_s * 1000:.3g} ms take {step_s * 100:.3g} s" in shown.stdout
    assert re.search(
        r"^pipeline 2 x data 1 x tensor 1, \d+ chunks in the first batch, schedule chunk-1f1b$",
        shown.stdout,
        re.MULTILINE,
    )
    assert "MFU" not in shown.stdout  # its FLOPs are those of each batch's documents


@pytest.mark.parametrize("form", ["megatron", "nemo", "torchtitan", "torchtitan-flags"])
def test_a_plan_of_chunks_is_no_settings_of_others(farpipe, job, form):
    assert farpipe("plan", job, "-o", "plan.json").returncode == 0
    refused = farpipe("export", "plan.json", "--format", form)
    assert refused.returncode == 3
    assert "has no settings for chunks of documents (data.packing)" in " ".join(refused.stderr.split())


def test_a_plan_of_chunks_has_a_page(farpipe, job, tmp_path):
    shown = farpipe("plan", job, "--html", "page.html")
    assert shown.returncode == 0, shown.stderr
    page = (tmp_path / "page.html").read_text()
    assert "Each step gets its own plan" in page
    assert "What the step is made of" not in page


def test_a_text_whose_longest_document_fits_in_no_number_of_slices(farpipe, job, tmp_path):
    (tmp_path / "giant").mkdir()
    header = {"format": "farpipe/tokens/1", "dtype": "uint8", "num_tokens": 9 * 10**6, "vocab_size": 256}
    (tmp_path / "giant" / "a.json").write_text(json.dumps(header))
    with (tmp_path / "giant" / "a.bin").open("wb") as file:
        file.truncate(header["num_tokens"])
    small = JOB.replace('"cpu"', '{ preset = "cpu", memory = "2 GiB" }')
    job.write_text(small.replace('"text"', '"giant"').replace("4096", str(3 * 10**6)).replace("= 4\np", "= 1\np"))
    done = farpipe("plan", job)
    assert done.returncode == 4, done.stderr
    assert "a sequence of 3000000 tokens does not fit in any number of slices: rank" in done.stderr
    assert "tokens fit" in done.stderr


@pytest.mark.parametrize(
    ("change", "arguments", "code", "message"),
    [
        (("precision", "microbatch_size = 2\nprecision"), (), 3, "microbatch_size: not with data.packing"),
        (("global_batch = 4", "global_batch = 4\nevaluate_every_steps = 2"), (), 3, "no text is held out for it"),
        (('"elastic"', '"elastc"'), (), 3, "'elastic', 'fixed' or 'none'"),
        (("global_batch = 4", "global_batch = 400"), (), 3, "one step takes 400 (training.global_batch)"),
        (
            ("pipeline = 2", "pipeline = 2"),
            ("--set", "run.replan=true"),
            3,
            "with data.packing every step is planned separately",
        ),
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
    done = farpipe("prepare", job, "--run-dir", "run", *arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr


def test_the_text_is_read_before_anything_is_planned(farpipe, job, monkeypatch):
    monkeypatch.setattr("farpipe.planning.planner.find.find", lambda *_: pytest.fail("planned first"))
    job.write_text(JOB.replace('source = "text"', 'source = "absent.txt"').replace('packing = "elastic"', ""))
    done = farpipe("prepare", job, "--run-dir", "run")
    assert (done.returncode, "there is no file or folder 'absent.txt'" in done.stderr) == (3, True), done.stderr


def test_what_every_machine_reads_is_named(farpipe, job):
    done = farpipe("prepare", job, "--run-dir", "run")
    assert done.stdout.rstrip().endswith("from where it starts: text"), done.stdout + done.stderr


def test_a_plan_is_no_job(farpipe, job):
    assert farpipe("plan", job, "-o", "plan.json").returncode == 0
    done = farpipe("prepare", "plan.json", "--run-dir", "run")
    assert done.returncode == 2, done.stderr
    assert "every step is planned separately; give the job" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--top", "2"), "only one layout is planned; pin [layout]"),
        (("--learned-from", "run"), "measure them with `farpipe profile`"),
        (("--strategies",), "compared for sequences of one length"),
    ],
)
def test_options_of_a_plan_that_mean_nothing_for_chunks_are_refused(farpipe, job, arguments, reason):
    done = farpipe("plan", job, *arguments)
    assert done.returncode == 2, done.stderr
    assert f"{arguments[0]} can't be used with data.packing" in done.stderr
    assert reason in " ".join(done.stderr.split())


def chunk_profile(device="cpu", **differs):
    """Times a hundred times those of the cost model or so."""
    law = {"pair_s": 1e-9, "token_s": 1e-4, "fixed_s": 1e-3}
    part = {"forward": law, "backward": law, "held_bytes": 8.0}
    fields = {"recomputed_bytes": 1.0, "boundary_bytes": 1.0, "action_forward_s": 0.0, "action_backward_s": 0.0}
    shape = model_shape(Model(num_layers=4, hidden=64, num_heads=4, ffn_hidden=128, vocab_size=256))
    known = {"device": device, "shape": shape, "precision": "fp32", "longest": 4096, "errors": {}}
    return ChunkProfile(**known | fields | {"embedding": part, "layer": part, "head": part} | differs)


def test_a_plan_of_chunks_takes_measured_times(farpipe, job, tmp_path):
    chunk_profile().save(tmp_path / "profile.json")
    steps = []
    for arguments in ((), ("--profile", "profile.json")):
        done = farpipe("plan", job, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        steps.append(json.loads(done.stdout)["step_s"])
    assert steps[1] > 2 * steps[0]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: chunk_profile("h100").save(path), "profile of 'h100': no site of the job has this device"),
        (lambda path: chunk_profile(precision="bf16").save(path), "precision: measured with 'bf16'"),
        (lambda path: path.write_text('{"format": "farpipe/profile/1"}'), "farpipe/chunk-profile/1"),
    ],
)
def test_a_profile_that_is_not_of_this_job_is_refused(farpipe, job, tmp_path, write, message):
    write(tmp_path / "profile.json")
    done = farpipe("plan", job, "--profile", "profile.json")
    assert done.returncode == 3, done.stderr
    assert message in done.stderr
