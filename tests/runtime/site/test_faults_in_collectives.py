"""Replicas that share weights, killed and stopped while they wait for each other inside a collective of torch.

Every process, twins too, inside and outside: benchmarks/engine/twin_faults.py. Twins: test_twins_run.py.
"""

from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.engine.twin_faults import Fault, break_all
from benchmarks.shared.twins import write_model
from waiting import wait_until

pytestmark = pytest.mark.slow  # starts processes

FAULTS = (Fault(3, "KILL", "collective"), Fault(0, "STOP", "collective"))
SECONDS = 30.0
"""From a fault to the end of the last survivor: an outage of 5 s, the grace of 3 s, and room for a busy machine."""


def test_faults_inside_a_collective_end_all_processes_and_change_nothing(tmp_path):
    write_model(tmp_path / "model")
    rows, is_equal = break_all(tmp_path, "FSDP 2", FAULTS)
    assert [row["is_named"] for row in rows] == [True, True], rows
    assert max(row["ended_s"] for row in rows) < SECONDS, rows
    assert is_equal, "the training is that of an undisturbed run"
    wait_until(lambda: not processes_with(tmp_path), "nothing is left running")


def processes_with(folder):
    """Command lines that have `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append((process / "cmdline").read_bytes())
    return [line for line in found if str(folder).encode() in line]
