"""Ranks that are killed, stopped or slow, in processes of their own: the result is that of an undisturbed run.

Under torchrun's agents: tests/faults/test_two_agents.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chosen import chosen
from farpipe.core.errors import DivergedError, InputError, RunError, RunInterruptedError, RunStoppedError
from farpipe.core.units import counted
from farpipe.engine.launch.run import run
from farpipe.engine.lock import only_run
from farpipe.engine.processes.leaving import SAME_REQUEST_S
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.run_spec import RunSpec
from forked import WITH_FORKS
from rank_processes import FAULTY_RANK, processes_of
from trainings import checkpoints, equal_states, losses, make_run, metrics, state
from waiting import wait_until

pytestmark = pytest.mark.slow

NUM_STEPS = 30
SECONDS = 50
"""From a rank's end to that of all others: one or two, and room for a busy machine; other limits are 60 s and more."""
PHASES = ("connect", "forward", "backward", "sync", "optimizer", "checkpoint")


def make(text_file, num_steps=NUM_STEPS, **training):
    fields = {"transport": TransportSettings(timeout_s=60, connect_timeout_s=60)}
    options = {"checkpoint_every_steps": 1, "warmup_steps": 3, "decay": "cosine"} | training
    return make_run(text_file, num_steps=num_steps, run_fields=fields, **options)


@pytest.fixture(scope="module")
def undisturbed(text_file, tmp_path_factory):
    """Losses and final state of a run that nothing happens to."""
    spec, run_dir = make(text_file), tmp_path_factory.mktemp("undisturbed") / "run"
    run(spec, run_dir)
    return losses(run_dir), state(run_dir, spec)


@pytest.mark.parametrize("victim", chosen([0, 1], 0))
def test_kill_9_of_a_rank_in_every_phase_costs_no_step_and_changes_nothing(
    victim, undisturbed, text_file, tmp_path, monkeypatch
):
    """One run, broken once in each phase and started again each time.

    Where the ranks are connected the survivor is left to end by itself, as at another site.
    """
    monkeypatch.setenv("FARPIPE_TEST_FAULT", json.dumps([[victim, phase] for phase in PHASES]))
    spec, run_dir, reasons, lasted_s = make(text_file), tmp_path / "run", [], []

    def on_restart(reason):
        reasons.append(reason)
        lasted_s.append(time.monotonic() - float((run_dir / "killed_s").read_text()))
        monkeypatch.setattr("farpipe.engine.launch.launcher.SETTLE_S", 120)

    summary = run(spec, run_dir, max_restarts=len(PHASES), on_restart=on_restart, rank_program=FAULTY_RANK)
    assert len(reasons) == len(PHASES)
    assert all(f"rank {victim} was killed by SIGKILL" in reason for reason in reasons), reasons
    assert max(lasted_s) < SECONDS, dict(zip(PHASES, lasted_s, strict=True))
    for restart, phase in list(enumerate(PHASES))[1:]:
        log = run_dir / "logs" / f"restart-{restart}" / f"rank-{1 - victim}.log"
        assert f"rank {victim} is lost" in log.read_text(), phase
    assert losses(run_dir) == undisturbed[0]
    assert equal_states(state(run_dir, spec), undisturbed[1])
    attempts = [line["attempt"] for line in metrics(run_dir)]
    assert attempts == sorted(attempts)
    assert summary.num_steps == NUM_STEPS
    assert summary.num_attempts == len(set(attempts)) >= 5, "all but the first and those that broke while connecting"


def test_a_run_that_breaks_too_often_ends_with_the_reason(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("FARPIPE_TEST_FAULT", json.dumps([[1, "forward"]] * 2))
    reasons = []
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        run(make(text_file), tmp_path, max_restarts=1, on_restart=reasons.append, rank_program=FAULTY_RANK)
    assert len(reasons) == 1
    assert not (tmp_path / "summary.json").exists()
    assert checkpoints(tmp_path), "what was reached is kept"


def test_a_training_that_diverges_is_not_started_again(text_file, tmp_path):
    reasons = []
    spec = make(text_file, learning_rate=1e30, clip_norm=None, warmup_steps=0, decay="none")
    with pytest.raises(DivergedError, match="is not finite"):
        run(spec, tmp_path, max_restarts=3, on_restart=reasons.append)
    assert reasons == []


def test_a_slow_rank_slows_the_run_and_nothing_else(undisturbed, text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("FARPIPE_TEST_FAULT", json.dumps([[1, "slow"]]))
    spec = make(text_file)
    run(spec, tmp_path, rank_program=FAULTY_RANK)
    assert losses(tmp_path) == undisturbed[0]
    assert equal_states(state(tmp_path, spec), undisturbed[1])


RUN = """
import signal, sys
from pathlib import Path
from farpipe.core.errors import FarpipeError
from farpipe.engine.launch.run import run
from farpipe.engine.run_spec import RunSpec
try:
    run(RunSpec.load(sys.argv[1]), sys.argv[2], **eval(sys.argv[3]))
except FarpipeError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
"""


def started(spec, run_dir, **options):
    """A launcher of its own, once a step is done."""
    path = run_dir.parent / "spec.json"
    spec.save(path)
    command = [sys.executable, WITH_FORKS, "-c", RUN, str(path), str(run_dir), repr(options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not ((run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


def test_sigterm_writes_a_checkpoint_and_leaves_and_the_run_goes_on(text_file, tmp_path):
    whole = make(text_file, num_steps=2000, checkpoint_every_steps=0, decay="none")
    process = started(whole, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=60)
    assert process.returncode == RunStoppedError.exit_code == 75
    (num_done,) = checkpoints(tmp_path / "run")
    after, newest = counted(num_done, "step"), tmp_path / "run" / "checkpoints" / f"step-{num_done}"
    assert f"stopped by SIGTERM or SIGHUP after {after}; {newest} is written" in words
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(num_done))
    assert 0 < num_done < 2000
    rest = whole.model_copy(update={"num_steps": num_done + 2})
    run(rest, tmp_path / "run", resume=True)
    reference = make(text_file, num_steps=num_done + 2, checkpoint_every_steps=0, decay="none")
    run(reference, tmp_path / "reference")
    assert losses(tmp_path / "run") == losses(tmp_path / "reference")
    assert equal_states(state(tmp_path / "run", rest), state(tmp_path / "reference", reference))


def test_a_second_sigterm_ends_everything_at_once(text_file, tmp_path):
    spec = make(text_file, num_steps=20_000, checkpoint_every_steps=0)
    process = started(spec, tmp_path / "run")
    ranks = processes_of(tmp_path / "run")
    os.kill(ranks[1], signal.SIGSTOP)  # so that the ranks can't leave
    process.send_signal(signal.SIGTERM)
    time.sleep(SAME_REQUEST_S + 1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not (tmp_path / "run" / "summary.json").exists()
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_signal_to_all_processes_at_once_loses_no_step(number, text_file, tmp_path):
    """As systemd and Slurm send it: to the launcher, the guards and the ranks, which then get it twice."""
    run_dir = tmp_path / "run"
    process = started(make(text_file, num_steps=20_000, checkpoint_every_steps=0), run_dir)
    for pid in [process.pid, *descendants(process.pid)]:
        os.kill(pid, number)
    _, words = process.communicate(timeout=60)
    assert process.returncode == RunStoppedError.exit_code, words
    (num_done,) = checkpoints(run_dir)
    assert f"step-{num_done} is written" in words
    assert len(metrics(run_dir)) == num_done


def descendants(pid):
    """The processes that `pid` has started, and those that these have."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [found for child in children for found in descendants(child)]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_sigterm_with_a_lost_rank_starts_nothing_again(has_checkpoint, text_file, tmp_path):
    spec = make(text_file, num_steps=20_000, checkpoint_every_steps=1 if has_checkpoint else 0)
    process = started(spec, tmp_path / "run", max_restarts=3)
    ranks = processes_of(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    os.kill(ranks[1], signal.SIGKILL)
    _, words = process.communicate(timeout=60)
    kind = RunStoppedError if checkpoints(tmp_path / "run") else RunInterruptedError
    assert process.returncode == kind.exit_code, words
    assert not (tmp_path / "run" / "logs" / "restart-1").exists()


def test_sigterm_while_ranks_start_again_ends_the_run(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("FARPIPE_TEST_FAULT", json.dumps([[1, "checkpoint"]]))
    spec, run_dir = make(text_file, num_steps=20_000), tmp_path / "run"
    process = started(spec, run_dir, max_restarts=3, rank_program=FAULTY_RANK)
    wait_until((run_dir / "logs" / "restart-1" / "rank-1.log").exists, "ranks had started again", 60)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=60)
    assert process.returncode in (RunStoppedError.exit_code, RunInterruptedError.exit_code), words
    assert not (run_dir / "logs" / "restart-2").exists()
    assert len(metrics(run_dir)) < 20_000


def test_sigterm_after_the_last_step_ends_the_run_well(text_file, tmp_path):
    spec, run_dir = make(text_file), tmp_path / "run"
    process = started(spec, run_dir)
    wait_until((run_dir / "summary.json").exists, "all steps were done", 60)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 0, words


def test_the_second_of_two_starts_is_refused_before_it_changes_a_file(text_file, tmp_path):
    spec, run_dir = make(text_file, num_steps=20_000, checkpoint_every_steps=0), tmp_path / "run"
    other = make(text_file, num_steps=2, learning_rate=0.5)
    with only_run(run_dir, make=True), pytest.raises(InputError, match="another run is at work in it"):
        run(other, run_dir)
    assert not (run_dir / "run.json").exists()
    process = started(spec, run_dir)
    with pytest.raises(InputError, match="another run is at work in it"):
        run(other, run_dir, resume=True)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert RunSpec.load(run_dir / "run.json") == spec


def test_ranks_refuse_a_run_that_was_changed_since_the_launcher_started_them(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("farpipe.engine.launch.run.digest_of", lambda path: "0" * 64)
    with pytest.raises(InputError, match=r"run\.json: was changed while the run started"):
        run(make(text_file), tmp_path)


def test_a_run_that_goes_on_shows_its_own_lines_and_warnings(text_file, tmp_path):
    """Not those of the attempt before; a checkpoint that is skipped is among the warnings, whatever is done again."""
    run(make(text_file, num_steps=6), tmp_path)
    damaged = sorted((tmp_path / "checkpoints" / "step-6").glob("rank-1*.safetensors"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    lines = []
    run(make(text_file, num_steps=8), tmp_path, resume=True, on_step=lines.append)
    assert [line["step"] for line in lines] == [5, 6, 7]
    assert {line["attempt"] for line in lines} == {1}
    assert any("skipped a checkpoint" in warning for line in lines for warning in line.get("warnings", ()))
