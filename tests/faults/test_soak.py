"""The soaks in benchmarks/, short: they find what they should find, and nothing is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forked import WITH_FORKS

pytestmark = pytest.mark.slow  # starts processes

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_short_soak_ends_like_the_undisturbed_run():
    command = [sys.executable, WITH_FORKS, "-m", "benchmarks.engine.soak", "--steps", "240", "--kills", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert all(result["equal to the undisturbed run"].values())
    assert result["faults"]["kills"] == 1
    assert result["faults"]["breaks"] >= 5
    assert "started again: rank" in done.stderr
    for moment in result["largest of all ranks"]:  # growth shows only over thousands of steps
        assert moment["threads"] < 100
        assert moment["descriptors"] < 100


@pytest.mark.slow
@pytest.mark.nightly
def test_three_sites_leave_and_return_at_random_and_end_like_the_undisturbed_run():
    command = [sys.executable, WITH_FORKS, "-m", "benchmarks.engine.leave_and_return", "--minutes", "0.4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False, cwd=ROOT)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert all(result["equal to the undisturbed run"].values()), (result, done.stderr)
    assert result["processes left"] == 0
    assert sum(result["events"].values()) >= 3
    assert not result["own clock and disk"] or result["events"]["disk"] == 1
