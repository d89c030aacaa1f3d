"""Replicas that share weights, killed and stopped while they wait for each other inside a collective of torch.

Every process, twins too, inside and outside: benchmarks/engine/twin_faults.py. Twins: test_twins_run.py.
"""

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.engine.soak import result_of
from benchmarks.engine.twin_faults import Fault, break_all, spec_of
from benchmarks.shared.twins import write_model
from chosen import chosen
from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import TransportSettings
from proxies import Proxy
from trainings import metrics
from waiting import wait_until

pytestmark = pytest.mark.slow  # starts processes

FAULTS = (Fault(3, "KILL", "collective"), Fault(0, "STOP", "collective"))
RANK = Path(__file__).parents[2] / "faults" / "rank.py"
SECONDS = 60.0
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


@pytest.mark.parametrize("shares", chosen(["FSDP 2", "tensor 2"], 0))
def test_an_outage_of_one_of_two_twins_is_survived_by_both(shares, tmp_path, monkeypatch):
    """One waits for its link, which is silent, and the other for it, inside a collective."""
    write_model(tmp_path / "model")
    spec = spec_of(tmp_path, shares, 8)
    spec = spec.model_copy(update={"transport": TransportSettings(timeout_s=3, outage_s=30)})
    proxy = Proxy()
    monkeypatch.setenv("FARPIPE_TEST_PROXY", str(proxy.answer_routes()))
    monkeypatch.setenv("FARPIPE_TEST_BEHIND", "[1, 3]")
    monkeypatch.setenv("FARPIPE_TEST_PAUSE_S", "0.2")

    def on_step(line):
        if line["step"] == 3:
            proxy.swallows = True
            threading.Timer(8, setattr, (proxy, "swallows", False)).start()

    summary = run(spec, tmp_path / "run", on_step=on_step, rank_program=(str(RANK),))
    proxy.close()
    assert summary.num_attempts == 1
    assert max(line["step_s"] for line in metrics(tmp_path / "run")) > 6, "the outage was not felt"
    run(spec, tmp_path / "undisturbed")
    assert result_of(tmp_path / "run") == result_of(tmp_path / "undisturbed")
