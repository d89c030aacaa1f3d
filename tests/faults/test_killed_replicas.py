"""Replicas with ZeRO-1 that are killed: all start again, and the training is that of a run without faults.

Every rank in every phase, with one replica, is in tests/runtime/test_restart.py.
"""

import json
from pathlib import Path

import pytest

from farpipe.runtime.run import run
from trainings import equal_states, losses, state

pytestmark = pytest.mark.slow

FAULTY_RANK = Path(__file__).parent.parent / "runtime" / "faulty_rank.py"


def test_kill_9_of_replicas_while_they_sum_and_while_they_write_changes_nothing(
    make, undisturbed, tmp_path, monkeypatch
):
    faults = [[3, "sync"], [2, "checkpoint"]]
    monkeypatch.setenv("FARPIPE_TEST_FAULT", json.dumps(faults))
    spec, run_dir, reasons = make(num_replicas=2), tmp_path / "run", []
    summary = run(spec, run_dir, max_restarts=2, on_restart=reasons.append, rank_program=(str(FAULTY_RANK),))
    assert ["rank 3 was killed" in reasons[0], "rank 2 was killed" in reasons[1]] == [True, True], reasons
    expected_losses, expected_state = undisturbed(2)
    assert losses(run_dir) == expected_losses
    assert equal_states(state(run_dir, spec), expected_state)
    assert summary.num_attempts == 3
