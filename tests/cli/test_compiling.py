"""The line that says that kernels are compiled."""

import os
import subprocess
import sys

import pytest

COMPILES = (
    "from numba import njit\nwith compilation_announced():\n    for _ in range(2):\n        njit(lambda x: x)(1)\n"
)
"""Two kernels."""
IMPORTS = "from farpipe.cli.compiling import compilation_announced\n"


def told(code):
    """What a process of its own says."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORTS + code], capture_output=True, text=True, check=True, timeout=120, env=os.environ
    )
    return run.stderr


@pytest.mark.slow
def test_compiling_is_told_once():
    assert told(COMPILES).count("compiling kernels") == 1


@pytest.mark.slow
def test_nothing_is_told_where_nothing_is_compiled():
    assert "compiling" not in told("with compilation_announced():\n    print(1)\n")
