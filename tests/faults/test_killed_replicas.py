"""Replicas with ZeRO-1 that are killed: all start again, and the training is that of a run without faults.

Every rank in every phase, with one replica, is in tests/engine/launch/test_restart.py.
"""

import json
import time

import pytest

from farpipe.engine.launch.run import run
from rank_processes import FAULTY_RANK
from trainings import equal_states, losses, state

pytestmark = pytest.mark.slow

FAULTS = [[3, "reduce"], [2, "checkpoint"], [0, "sync"], [1, "backward"]]
"""Every rank once: in the middle of a ring, of a file, of the exchange that ends a step, of the pipeline."""
SECONDS = 50
"""From a rank's end to that of all others, which takes one or two; the other limits are 60 s and more."""


def test_kill_9_of_replicas_while_they_sum_write_and_compute_changes_nothing(make, undisturbed, tmp_path, monkeypatch):
    """The survivors are left to end by themselves, as at other sites."""
    monkeypatch.setenv("FARPIPE_TEST_FAULT", json.dumps(FAULTS))
    monkeypatch.setattr("farpipe.engine.launch.launcher.SETTLE_S", 120)
    spec, run_dir, reasons, lasted_s = make(num_replicas=2), tmp_path / "run", [], []

    def on_restart(reason):
        reasons.append(reason)
        lasted_s.append(time.monotonic() - float((run_dir / "killed_s").read_text()))

    summary = run(spec, run_dir, max_restarts=4, on_restart=on_restart, rank_program=FAULTY_RANK)
    assert len(reasons) == 4
    for (victim, _), reason in zip(FAULTS, reasons, strict=True):
        assert f"rank {victim} was killed by SIGKILL" in reason
    assert max(lasted_s) < SECONDS, lasted_s
    for restart, (victim, _) in enumerate(FAULTS):
        logs = run_dir / "logs" / (f"restart-{restart}" if restart else "")
        for survivor in {0, 1, 2, 3} - {victim}:
            assert f"rank {victim} is lost" in (logs / f"rank-{survivor}.log").read_text()
    expected_losses, expected_state = undisturbed(2)
    assert losses(run_dir) == expected_losses
    assert equal_states(state(run_dir, spec), expected_state)
    assert summary.num_attempts == 5
