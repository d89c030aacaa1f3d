from pathlib import Path

import pytest

from farpipe.cli.profile import _num_processes
from farpipe.core.spec import load_job

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("recipe", "device", "num_cores", "expected"),
    [("two_sites.toml", "cpu", 2, 2), ("two_sites.toml", "cpu", 64, 16), ("two_sites.toml", "cuda", 64, 1)],
)
def test_as_many_processes_measure_as_would_train_here(monkeypatch, recipe, device, num_cores, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_cores)))
    assert _num_processes(load_job(RECIPES / recipe), device) == expected
