"""A whole pipeline at each of three sites, in real processes over three emulated links: planned, trained, compared."""

import json
import subprocess
import sys

import pytest
import torch

from engine.test_replicas import train_in_one_process
from farpipe.engine.run_spec import RunSpec
from farpipe.planning import Plan
from job_files import SMALL_MODEL, link_text, site_text

pytestmark = pytest.mark.slow

NUM_STEPS = 4
MATRIX_BYTES = 256 * 32 * 4
RING = ("a>b", "b>c", "c>a")
SITES = "".join(site_text(name, "{pipeline}") for name in "abc")
LINKS = "\n".join(
    [
        link_text("a", "b", "5 ms", "200 Mbit/s"),
        link_text("b", "c", "10 ms", "100 Mbit/s"),
        link_text("a", "c", "2 ms", "400 Mbit/s"),
    ]
)
JOB = f"""\
{SMALL_MODEL}tied_embeddings = {{tied}}

[training]
sequence_length = 6
global_batch = 12
microbatch_size = 1
precision = "fp32"
learning_rate = 0.01
clip_norm = 0.5
seed = 7
zero1 = {{zero1}}

[data]
source = "{{text}}"

{SITES}{LINKS}
[layout]
sites = ["a", "b", "c"]
pipeline = {{pipeline}}
data = 3
replicas = "across"
"""


@pytest.mark.parametrize(
    ("pipeline", "options"),
    [(1, {"tied": "false", "zero1": "false"}), (2, {"tied": "true", "zero1": "true"})],
    ids=["one rank each", "two ranks each, zero1, tied"],
)
def test_replicas_at_three_sites_learn_as_one_model(pipeline, options, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "job.toml").write_text(JOB.format(pipeline=pipeline, text=text, **options))
    command = [
        sys.executable,
        "-m",
        "farpipe",
        "train",
        str(tmp_path / "job.toml"),
        "--steps",
        str(NUM_STEPS),
        "--json",
    ]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run"), "--json"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = RunSpec.load(tmp_path / "run" / "run.json")
    assert run.plan.replicas == (("a",) * pipeline, ("b",) * pipeline, ("c",) * pipeline)
    assert run.emulate_links
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses, norms, _ = train_in_one_process(run, torch.float32, NUM_STEPS)
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-4)
    assert losses[-1] < losses[0]
    for line in lines:
        assert_bytes_are_those_of_a_ring(line["link_bytes"], Plan.load(tmp_path / "run" / "plan.json"), pipeline)


def assert_bytes_are_those_of_a_ring(found, plan, num_ends):
    """The Problem names one link of the ring; every link of it has carried as much, and the others nothing.

    With ZeRO-1 both ends sum the whole of the tied matrix's gradient, of which the Problem counts a share as of others.
    """
    crossing = {name: size for name, size in found.items() if ":" not in name}
    assert {name for name, size in crossing.items() if size} == set(RING)
    assert len({crossing[name] for name in RING}) == 1
    planned = max(size for name, size in plan.prediction.link_bytes.items() if ":" not in name)
    further = num_ends * 2 / 3 * MATRIX_BYTES if plan.job.training.zero1 else 0
    assert crossing["a>b"] == pytest.approx(planned + further, rel=0.02), "but for what pads shares"
