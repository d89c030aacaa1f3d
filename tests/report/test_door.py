import importlib
import subprocess
import sys

import pytest

import farpipe.report


def test_importing_the_room_loads_nothing_heavy():
    code = "import sys, farpipe.report; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "numba", "rich", "torch", "matplotlib", "pydantic"} & set(loaded)


@pytest.mark.parametrize("name", farpipe.report.__all__)
def test_every_name_is_handed_out_from_its_home(name):
    value = getattr(farpipe.report, name)
    home = importlib.import_module(f"farpipe.report.{farpipe.report._HOME[name]}")
    assert value is getattr(home, name)


def test_a_name_that_is_not_there_is_told():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = farpipe.report.nothing
