"""Runs with real processes and real sockets."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from attempts import assert_most_of_five_steps
from farpipe.core.errors import InfeasibleError, InputError, RunError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.spec import Data, Training
from farpipe.core.step import Hop, Link, Problem, Schedule, Sync, Transfer
from farpipe.engine.figures.metrics import Summary
from farpipe.engine.launch.launcher import launch
from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.run_spec import RunSpec
from forked import WITH_FORKS
from proxies import free_port
from rank_processes import processes_of, wait_for_end_of_ranks
from small_models import (
    LLAMA,
    TIED,
    even_partition,
    make_batch,
    placed_problem,
    reference_step,
    relative_error,
    whole_model,
)
from waiting import wait_until

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
TRAINING = Training(sequence_length=16, global_batch=8, microbatch_size=2, precision="fp32", learning_rate=1e-2)


def wan_problem(num_microbatches=4, seconds=0.005, num_bytes=50_000):
    """Two ranks at two sites: 5 ms one way, 80 Mbit/s."""
    problem = placed_problem((0, 1), num_microbatches)
    figures = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), seconds)
    stages = tuple(stage.model_copy(update=figures) for stage in problem.stages)
    links = {name: Link(latency_s=0.005, bandwidth_bytes_per_s=1e7) for name in ("a>b", "b>a")}
    hop = Hop(forward=Transfer(link="a>b", bytes=num_bytes), backward=Transfer(link="b>a", bytes=num_bytes))
    return Problem.model_validate(dict(problem) | {"stages": stages, "links": links, "hops": (hop,)})


def rehearsal(num_steps, **options):
    problem = wan_problem()
    body = {"problem": problem, "schedule": order("1f1b", problem), "sites": ("a", "b"), "device": "sleep"}
    return RunSpec.bare(num_steps=num_steps, **body, **options)


def training(num_steps, **options):
    problem = wan_problem()
    return RunSpec.bare(
        problem=problem,
        schedule=order("eager", problem),
        sites=("a", "b"),
        num_steps=num_steps,
        model=TIED.model_copy(update={"vocab_size": 256}),
        training=TRAINING,
        partition=even_partition(TIED, 2),
        **options,
    )


@pytest.mark.parametrize(
    ("ranks_of_stages", "method"), [((0, 1), "1f1b"), ((0, 1, 1, 0), "gpipe"), ((0, 1, 2, 0, 1, 2), "interleaved")]
)
def test_gradients_over_the_real_transport_are_those_of_the_whole_model(ranks_of_stages, method, tmp_path):
    schedule = order(method, placed_problem(ranks_of_stages, 3))
    schedule.save(tmp_path / "schedule.json")
    script = [sys.executable, str(TESTS / "engine" / "gradient_rank.py"), str(tmp_path / "schedule.json")]
    environment = {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    launch(lambda _: [*script, str(tmp_path)], len(schedule.ranks), log_dir=tmp_path / "logs", env=environment)
    whole, found = whole_model(LLAMA, torch.float64), {}
    loss = 0.0
    for rank in range(len(schedule.ranks)):
        with np.load(tmp_path / f"rank-{rank}.npz") as arrays:
            found |= {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "loss"}
            loss += float(arrays["loss"])
    assert loss == pytest.approx(reference_step(whole, make_batch(LLAMA, 3)), rel=1e-12)
    for name, parameter in whole.named_parameters():
        assert relative_error(found[name], parameter.grad) <= 1e-12, name


def test_a_model_learns_over_an_emulated_wan(tmp_path):
    seen = []
    summary = run(training(8), tmp_path / "run", on_step=seen.append)
    assert summary.last_loss < summary.first_loss - 0.3
    assert [line["step"] for line in seen] == list(range(8))
    timeline = Timeline.load(tmp_path / "run" / "timeline.json")
    activations = timeline.messages[timeline.messages["microbatch"] >= 0]
    assert set(activations["bytes"]) == {2 * 16 * 16 * 4}
    assert (activations["arrival_s"] - activations["end_s"]).min() > 0.0045
    assert timeline.link_bytes()["a>b"] == 4 * 2 * 16 * 16 * 4 + 256 * 16 * 4
    assert Summary.load(tmp_path / "run" / "summary.json") == summary


@pytest.mark.alone
def test_a_rehearsal_takes_as_long_as_predicted(tmp_path):
    spec = rehearsal(6)
    predicted = simulate(spec.plan.problem, spec.plan.schedule)
    step = assert_most_of_five_steps(
        lambda: run(spec, tmp_path),
        tmp_path,
        lambda step: step["makespan_s"] == pytest.approx(predicted.makespan_s, rel=0.25),
    )
    assert step["makespan_s"] > predicted.makespan_s * 0.999


def test_results_of_an_earlier_run_are_not_written_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(InputError, match=r"has the metrics\.jsonl of an earlier run; .* has no checkpoint"):
        run(rehearsal(2), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_more_weights_than_memory_are_refused_before_anything_starts(tmp_path):
    spec = rehearsal(2)
    heavy = tuple(
        rank.model_copy(update={"static_bytes": 1e15, "memory_bytes": None}) for rank in spec.plan.problem.ranks
    )
    spec = spec.with_plan(problem=spec.plan.problem.model_copy(update={"ranks": heavy}))
    spec = spec.model_copy(update={"device": "cpu"})
    with pytest.raises(
        InfeasibleError, match=r"all 2 ranks on this machine: weights.* and .* are free; train a smaller"
    ):
        run(spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_rehearsal_that_would_exchange_more_than_memory_is_refused(tmp_path):
    spec = rehearsal(2)
    sync = Sync(reduce=Transfer(link="a>b", bytes=1e15))
    problem = spec.plan.problem.model_copy(update={"sync": (sync, sync)})
    spec = spec.with_plan(problem=problem, replicas=(("a", "a"), ("b", "b")))
    with pytest.raises(
        InfeasibleError, match=r"all 4 ranks .*: the gradients that replicas exchange take .*; rehearse"
    ):
        run(spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_taken_port_is_said(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} can't be listened on"):
            run(rehearsal(2), tmp_path / "run", master_port=port)


def test_too_little_text_ends_all_ranks_with_the_reason(tmp_path):
    (tmp_path / "text").write_text("short")
    with pytest.raises(InputError, match=r"data\.source: the text has 5 tokens, but one step .* needs 129"):
        run(training(2, data=Data(source=str(tmp_path / "text"))), tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


def start_in_background(spec, run_dir, before=""):
    """A process of its own that calls `run`, once its second step is done."""
    run_dir.parent.mkdir(exist_ok=True)
    spec.save(run_dir.parent / "spec.json")
    code = (
        "import sys\nfrom farpipe.core.errors import FarpipeError\nfrom farpipe.engine.launch.run import run\n"
        f"from farpipe.engine.run_spec import RunSpec\n{before}\n"
        f"try:\n    run(RunSpec.load({str(run_dir.parent / 'spec.json')!r}), {str(run_dir)!r})\n"
        "except FarpipeError as error:\n    print(error, file=sys.stderr)\n    sys.exit(error.exit_code)\n"
        "except KeyboardInterrupt:\n    sys.exit(130)\n"
    )
    forks = [] if before else [WITH_FORKS]  # which don't have the limits that `before` sets
    command = [sys.executable, *forks, "-c", code]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_steps(run_dir, count, process):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").read_text().count("\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {count} steps: {process.communicate(timeout=5)}")


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_9_of_a_rank_ends_the_run_within_seconds_and_leaves_nothing_running(victim, tmp_path):
    run_dir = tmp_path / "run"
    process = start_in_background(rehearsal(10_000, transport=TransportSettings(timeout_s=90)), run_dir)
    wait_for_steps(run_dir, 2, process)
    os.kill(processes_of(run_dir)[victim], signal.SIGKILL)
    _, words = process.communicate(timeout=60)
    assert process.returncode == RunError.exit_code
    assert f"rank {victim} was killed by SIGKILL" in words
    wait_for_end_of_ranks(run_dir)
    survivor = (run_dir / "logs" / f"rank-{1 - victim}.log").read_text()
    assert f"rank {victim}" in survivor
    assert all(json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    assert not (run_dir / "summary.json").exists()


def test_ctrl_c_ends_all_ranks(tmp_path):
    run_dir = tmp_path / "run"
    process = start_in_background(rehearsal(10_000), run_dir)
    wait_for_steps(run_dir, 2, process)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    wait_for_end_of_ranks(run_dir)


def test_a_full_disk_is_said(tmp_path):
    run_dir = tmp_path / "run"
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))"
    process = start_in_background(rehearsal(10_000), run_dir, before=limit)
    _, words = process.communicate(timeout=60)
    assert process.returncode == RunError.exit_code
    assert "metrics.jsonl: can't be written" in words
    wait_for_end_of_ranks(run_dir)
    assert all(json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())


def test_the_same_ranks_run_under_torchrun(tmp_path):
    spec = training(3)
    spec.save(tmp_path / "run.json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "farpipe.engine.launch.rank_main", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert Summary.load(tmp_path / "summary.json").num_steps == 3
    assert Schedule.from_data(spec.plan.schedule.to_data()) == spec.plan.schedule


def hears_sigterm(process):
    """True once the process has a handler of its own for SIGTERM."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) & 1 << (signal.SIGTERM - 1))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_waits_for_the_others_leaves_at_once(tmp_path, rank):
    """Rank 1 waits in C++ for a meeting point, rank 0 in Python for the others."""
    training(3).save(tmp_path / "run.json")
    place = {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | place | {"MASTER_PORT": str(free_port()), "FARPIPE_RUN_TOKEN": "x" * 32}
    command = [sys.executable, "-m", "farpipe.engine.launch.rank_main", str(tmp_path)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: hears_sigterm(process), "the rank waits", limit_s=60)
        time.sleep(1.0)  # it is inside the wait by then; before, the request is found when it begins
        begin_s = time.monotonic()
        process.terminate()
        _, words = process.communicate(timeout=30)
    assert (process.returncode, "asked to leave before all ranks had met" in words) == (75, True), words
    assert time.monotonic() - begin_s < 10
