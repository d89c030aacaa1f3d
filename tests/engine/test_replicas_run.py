"""Replicas with real processes and real sockets."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from attempts import assert_most_of_five_steps
from farpipe.core.errors import RunError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.simulate.timeline import MESSAGE_KINDS, Timeline
from farpipe.core.spec import Training
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Sync, Transfer
from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.run_spec import RunSpec
from farpipe.planning import Plan
from forked import WITH_FORKS
from job_files import SMALL_MODEL, cluster_text
from rank_processes import processes_of, wait_for_end_of_ranks
from small_models import TIED, even_partition

pytestmark = pytest.mark.slow

WAN = {name: Link(latency_s=0.005, bandwidth_bytes_per_s=1e7) for name in ("a>b", "b>a")}


def make_problem(num_microbatches, sync, hop, seconds=0.01):
    figures = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), seconds)
    inside = {f"{site}:{rank}>{site}:{rank}": Link(latency_s=0, bandwidth_bytes_per_s=1e9) for rank, site in PLACES}
    return Problem(
        num_microbatches=num_microbatches,
        ranks=(Rank(), Rank()),
        stages=tuple(Stage(rank=rank, **figures) for rank in range(2)),
        links=WAN | inside,
        hops=(hop,),
        sync=sync,
    )


PLACES = [(0, "a"), (1, "b")]


def training(num_steps, **options):
    """Two sites with one rank each, two replicas, ZeRO-1."""
    hop = Hop(forward=Transfer(link="a>b", bytes=2 * 4096), backward=Transfer(link="b>a", bytes=2 * 4096))
    rings = [Transfer(link=f"{site}:{rank}>{site}:{rank}", bytes=5e4) for rank, site in PLACES]
    problem = make_problem(4, tuple(Sync(gather=ring, reduce=ring) for ring in rings), hop)
    return RunSpec.bare(
        problem=problem,
        schedule=order("zb-h1", problem),
        sites=("a", "b"),
        replicas=(("a", "b"),) * 2,
        num_steps=num_steps,
        model=TIED.model_copy(update={"vocab_size": 256}),
        training=Training(
            sequence_length=16, global_batch=16, microbatch_size=2, precision="fp32", learning_rate=1e-2, zero1=True
        ),
        partition=even_partition(TIED, 2),
        **options,
    )


def rehearsal(num_steps, **options):
    """A replica in each of two regions: only what they sum crosses."""
    reduce = Sync(reduce=Transfer(link="a>b", bytes=2e5))
    problem = make_problem(4, (reduce, reduce), Hop())
    body = {"problem": problem, "schedule": order("1f1b", problem), "device": "sleep"}
    return RunSpec.bare(num_steps=num_steps, sites=("a", "a"), replicas=(("a", "a"), ("b", "b")), **body, **options)


def test_two_replicas_learn_over_an_emulated_wan(tmp_path):
    spec = training(8)
    summary = run(spec, tmp_path / "run")
    assert summary.last_loss < summary.first_loss - 0.3
    assert summary.first_loss == pytest.approx(5.5, abs=0.2), "the mean over all replicas"
    timeline = Timeline.load(tmp_path / "run" / "timeline.json")
    collectives = timeline.messages[timeline.messages["microbatch"] < 0]
    found = [(MESSAGE_KINDS[m["kind"]], int(m["stage"]), timeline.links[m["link"]]) for m in collectives]
    assert sorted(found) == [
        ("gather", 0, "a:0>a:0"),
        ("gather", 1, "b:1>b:1"),
        ("reduce", 0, "a:0>a:0"),
        ("reduce", 1, "b:1>b:1"),
    ]
    assert timeline.link_bytes()["a>b"] == 2 * 4 * 2 * 16 * 16 * 4, "of both replicas"


@pytest.mark.alone
def test_a_rehearsal_with_replicas_takes_about_as_long_as_predicted(tmp_path):
    spec = rehearsal(6)
    predicted_s = simulate(spec.plan.problem, spec.plan.schedule).makespan_s
    assert_most_of_five_steps(
        lambda: run(spec, tmp_path),
        tmp_path,
        lambda step: step["makespan_s"] == pytest.approx(predicted_s, rel=0.2),
    )


@pytest.mark.parametrize("make", [training, rehearsal])
def test_kill_9_of_a_replica_ends_all_with_the_reason(make, tmp_path):
    run_dir = tmp_path / "run"
    spec = make(10_000, transport=TransportSettings(timeout_s=90))
    killed_s = []

    def kill():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            metrics = run_dir / "metrics.jsonl"
            if metrics.exists() and metrics.read_text().count("\n") >= 2:
                killed_s.append(time.monotonic())
                os.kill(processes_of(run_dir)[3], signal.SIGKILL)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RunError, match="rank 3 was killed by SIGKILL"):
        run(spec, run_dir)
    thread.join()
    assert time.monotonic() - killed_s[0] < 60
    wait_for_end_of_ranks(run_dir)
    for survivor in range(3):
        assert "rank 3" in (run_dir / "logs" / f"rank-{survivor}.log").read_text()
    assert all(json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    assert not (run_dir / "summary.json").exists()


JOB = f"""\
{SMALL_MODEL}
[training]
sequence_length = 16
global_batch = 8
microbatch_size = 1
precision = "fp32"
zero1 = true

{cluster_text("a", "b", num_devices=(2, 2), latency="5 ms")}
[layout]
sites = ["a", "b"]
pipeline = 2
data = 2
"""


def test_a_plan_with_replicas_is_trained_from_the_command_line(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    command = [
        sys.executable,
        WITH_FORKS,
        "-m",
        "farpipe",
        "train",
        str(tmp_path / "job.toml"),
        "--steps",
        "4",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["num_steps"] == 4
    assert len([*(tmp_path / "run" / "logs").glob("rank-*.log")]) == 4
    predicted = Plan.load(tmp_path / "run" / "plan.json").prediction.link_bytes
    measured = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["link_bytes"]
    assert measured["a>b"] == predicted["a>b"]
    for rank, site in PLACES:
        ring = f"{site}:{rank}>{site}:{rank}"
        assert measured[ring] == pytest.approx(predicted[ring], rel=0.02), "but for what pads shares"
