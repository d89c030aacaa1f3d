"""Ends an agent of torchrun that has had no rank for too long: it hangs, or waits for another that is gone.

A script of its own, for a bare interpreter: ``python -I -S agent_watch.py AGENT_PID IDLE_LIMIT_S``. It ends with the
agent. Of several for one agent, all but the first end at once.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

PAUSE_S = 1.0
TERMINATE_S = 5.0
"""Time to end after SIGTERM, before SIGKILL."""


def has_child(agent: int) -> bool:
    """True if a process whose parent is the agent runs, this one left out."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # the command's name, in parentheses, may contain anything; state and parent follow it
            state, parent = (process / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if int(parent) == agent and state != b"Z" and int(process.name) != os.getpid():
                return True
    return False


def wait(agent: int, seconds: float) -> bool:
    """Wait so long for the agent's end; whether it has ended. `agent` is a pidfd."""
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def main() -> None:
    """Watch the agent, see above."""
    agent, limit_s = int(sys.argv[1]), float(sys.argv[2])
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(agent)
        first = socket.socket(socket.AF_UNIX)
        try:
            first.bind(f"\0farpipe-agent-{agent}")  # the kernel frees the name with this process
        except OSError:
            return
        busy_s = time.monotonic()
        while not wait(pidfd, PAUSE_S):
            if has_child(agent):
                busy_s = time.monotonic()
            elif time.monotonic() > busy_s + limit_s:
                print(f"farpipe: torchrun has had no rank for {limit_s:g} s, and is ended", file=sys.stderr, flush=True)
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
                if not wait(pidfd, TERMINATE_S):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return


if __name__ == "__main__":
    main()
