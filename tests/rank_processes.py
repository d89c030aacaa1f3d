"""The processes of a run on this machine."""

from contextlib import suppress
from pathlib import Path

from waiting import wait_until

FAULTY_RANK = (str(Path(__file__).parent / "engine" / "faulty_rank.py"),)
"""The program of a rank that breaks where the test says."""


def processes_of(run_dir):
    """Process ids of a run's ranks, by number: those that have one, and its directory in their command line."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ends just now; what ends has no environment first
            words = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
            ranks = [int(word[5:]) for word in environment if word.startswith(b"RANK=")]
            is_guard = any(word.endswith(b"guard.py") for word in words)
            if str(run_dir).encode() in words and not is_guard:
                found |= dict.fromkeys(ranks, int(process.name))
    return found


def wait_for_end_of_ranks(run_dir):
    """What was killed is still listed for a moment."""
    wait_until(lambda: not processes_of(run_dir), "no rank was left")


def child_of(process):
    """The process behind a guard."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(children.read_text, "the guard had started its process")
    return int(children.read_text().split()[0])
