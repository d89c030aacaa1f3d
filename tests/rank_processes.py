"""The processes of a run on this machine."""

import time
from pathlib import Path

import pytest


def processes_of(run_dir):
    """Process ids of a run's ranks, by number: those whose command line has its directory."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            b"farpipe.engine.launch.rank_main" in words
            and str(run_dir).encode() in words
            and b"guard.py" not in words[3]
        ):
            found[int(next(word[5:] for word in environment if word.startswith(b"RANK=")))] = int(process.name)
    return found


def child_of(process, limit_s=10.0):
    """The process behind a guard."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if words := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            return int(words[0])
        time.sleep(0.01)
    pytest.fail("it has started nothing")
