"""Runs what ``python WORDS...`` runs, and what that starts as forks: ``python with_forks.py WORDS...``."""

import os
import sys

from farpipe.engine.processes import Guarded
from forked import PLACE, Forks, execute, first_path

if __name__ == "__main__":
    Guarded.start = classmethod(Forks(os.environ[PLACE]).start)
    sys.path[0] = first_path(sys.argv[1:])
    execute(sys.argv[1:])
