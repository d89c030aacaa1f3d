"""Ranks that are killed, stopped or slow, in processes of their own: the result is that of an undisturbed run.

Under torchrun's agents: tests/faults/test_two_agents.py.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farpipe.errors import DivergedError, RunError, RunStoppedError
from farpipe.run.run import run
from farpipe.runtime.run_spec import TransportSettings
from trainings import checkpoints, equal_states, losses, make_run, metrics, state

pytestmark = pytest.mark.slow

FAULTY_RANK = (str(Path(__file__).parents[1] / "runtime" / "faulty_rank.py"),)
NUM_STEPS = 30
SECONDS = 15
"""From a rank's end to that of all others: one or two, and room for a busy machine; other limits are 20 s and more."""
PHASES = ("connect", "forward", "backward", "sync", "optimizer", "checkpoint")


def make(text_file, num_steps=NUM_STEPS, **training):
    fields = {"transport": TransportSettings(timeout_s=20, connect_timeout_s=30)}
    options = {"checkpoint_every_steps": 1, "warmup_steps": 3, "decay": "cosine"} | training
    return make_run(text_file, num_steps=num_steps, run_fields=fields, **options)


@pytest.fixture(scope="module")
def undisturbed(text_file, tmp_path_factory):
    """Losses and final state of a run that nothing happens to."""
    spec, run_dir = make(text_file), tmp_path_factory.mktemp("undisturbed") / "run"
    run(spec, run_dir)
    return losses(run_dir), state(run_dir, spec)


@pytest.mark.parametrize("victim", [0, 1])
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
        monkeypatch.setattr("farpipe.run.local_launcher.SETTLE_S", 60)

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
from farpipe.errors import FarpipeError
from farpipe.run.run import run
from farpipe.runtime.run_spec import RunSpec
try:
    run(RunSpec.load(sys.argv[1]), sys.argv[2])
except FarpipeError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
"""


def started(spec, run_dir):
    """A launcher of its own, once a step is done."""
    path = run_dir.parent / "spec.json"
    spec.save(path)
    command = [sys.executable, "-c", RUN, str(path), str(run_dir)]
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
    assert f"stopped by SIGTERM after {num_done} steps; {tmp_path}/run/checkpoints/step-{num_done} is written" in words
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(num_done))
    assert 0 < num_done < 2000
    rest = whole.model_copy(update={"num_steps": num_done + 2})
    run(rest, tmp_path / "run", resume=True)
    reference = make(text_file, num_steps=num_done + 2, checkpoint_every_steps=0, decay="none")
    run(reference, tmp_path / "reference")
    assert losses(tmp_path / "run") == losses(tmp_path / "reference")
    assert equal_states(state(tmp_path / "run", rest), state(tmp_path / "reference", reference))


def test_a_second_sigterm_ends_everything_at_once(text_file, tmp_path):
    spec = make(text_file, num_steps=2000, checkpoint_every_steps=0)
    process = started(spec, tmp_path / "run")
    process.send_signal(signal.SIGSTOP)  # so that both arrive before the ranks can leave
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode in (130, RunStoppedError.exit_code)
    assert not (tmp_path / "run" / "summary.json").exists()
