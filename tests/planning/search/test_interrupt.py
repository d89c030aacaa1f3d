"""Ctrl-C at a terminal while `farpipe schedule` is inside the exact solver."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from two_sites import two_sites


def wait_for(text, terminal, limit_s=60.0):
    """Read what the process writes to its terminal until `text` appears."""
    seen, end = "", time.monotonic() + limit_s
    while text not in seen:
        assert time.monotonic() < end, f"{text!r} did not appear in {limit_s} s, only {seen[-500:]!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.5, 2.0], ids=["while it is loaded", "while it searches"])
def test_ctrl_c_inside_the_exact_solver_prints_the_best_so_far(tmp_path, after_s):
    path = tmp_path / "problem.json"
    two_sites((76, 93, 41), (2, 0), in_flight=8, chunks=2).save(path)  # of two stages per rank nothing is proven soon
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "farpipe", "schedule", str(path), "--time-limit", "50", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    try:
        shown = wait_for(": exact, makespan", ours)
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        shown += wait_for("interrupted: this is the best schedule found so far", ours, 30.0)
        printed, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert process.returncode == 0
    assert "lower bound" in shown
    answer = json.loads(printed)
    assert answer["makespan_s"] >= answer["lower_bound_s"]
    assert len(answer["schedule"]["ranks"]) == 8
