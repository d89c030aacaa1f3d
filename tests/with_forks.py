"""A module run as ``python -m`` does, which starts programs as forks: ``python with_forks.py MODULE ARGUMENT...``."""

import os
import runpy
import sys

from farpipe.processes import Guarded
from forked import PLACE, Forks

if __name__ == "__main__":
    forks = Forks(os.environ[PLACE])
    Guarded.start = classmethod(forks.start)
    del sys.argv[0]
    sys.path[0] = os.getcwd()  # noqa: PTH109 - as python -m has it
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
