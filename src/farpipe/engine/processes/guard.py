"""Stands between the launcher and one rank, so that nothing of the rank outlives either of them.

A script of its own, for a bare interpreter: ``python -I -S guard.py PARENT COMMAND...``. It runs COMMAND and ends as
COMMAND ends. PARENT is the reading end of a pipe whose other end only the launcher holds: when that closes, however
the launcher came to its end, COMMAND is killed. In either case everything that COMMAND has started and left behind is
killed as well, whatever session it is in: the guard is its subreaper (see prctl(2)), so orphans become its children.
Should the guard itself be killed, the kernel kills COMMAND.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIMIT_S = 3.0
PAUSE_S = 0.005


def prctl(option: int, value: int) -> None:
    """Set a property of this process; see prctl(2)."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def start(command: list[str], guard: int) -> int:
    """Run `command` in a child that dies with this process; its process id.

    From here on this process ignores what is meant for the child, which is in the same process group.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    child = os.fork()
    if child:
        return child
    try:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, signal.SIG_IGN if handler is signal.SIG_IGN else signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a new program would inherit that
        if os.getppid() == guard:
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: can't be run: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def wait(child: int, parent_pipe: int) -> None:
    """Wait until the child has ended or the launcher has let go."""
    poll = select.poll()
    poll.register(parent_pipe, select.POLLIN)
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.poll()


def children() -> list[int]:
    """The processes whose parent is this one, those that have ended included."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # the command's name, in parentheses, may contain anything; state and parent follow it
            state_and_parent = (process / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if int(state_and_parent[1]) == os.getpid():
                found.append(int(process.name))
    return found


def kill_all(child: int) -> int:
    """Kill what is left of the child and all that came of it; the child's wait status."""
    status = 1 << 8  # should the child withstand SIGKILL
    deadline = time.monotonic() + LIMIT_S
    while (left := children()) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
            ended, ended_status = os.waitpid(process, os.WNOHANG)
            status = ended_status if ended == child else status
        time.sleep(PAUSE_S)
    return status


def main() -> int:
    """Run the command line, see above; the exit code of the command."""
    parent_pipe, command = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(parent_pipe, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = start(command, os.getpid())
    os.closerange(3, parent_pipe)
    os.closerange(parent_pipe + 1, os.sysconf("SC_OPEN_MAX"))
    wait(child, parent_pipe)
    exit_code = os.waitstatus_to_exitcode(kill_all(child))
    if exit_code < 0:  # end likewise, without another core dump
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if exit_code != -signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
