"""Starts a process under a guard (see guard.py), waits for it and ends it; and watches a rank under torchrun.

A rank does not outlive torchrun's agent, nor the agent its ranks for long: an agent that is killed leaves its ranks
running, and one that has lost the agent of another site can wait in a system call of torch's store, in which it notices
no signal, for minutes.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

KILL_S: Final = 4.0
"""Time for guards to clean up; a little more than they allow themselves."""
_GUARD: Final = Path(__file__).with_name("guard.py")
IDLE_LIMIT_S: Final = 90.0
"""An agent without a rank for so long is ended: longer than the ranks wait for each other when they start again."""
_AGENT_WATCH: Final = Path(__file__).with_name("agent_watch.py")
_PR_SET_PDEATHSIG: Final = 1
"""Option of prctl(2)."""


class ParentPipe:
    """A pipe whose writing end only this process holds: guards kill their processes when it closes.

    It closes with `cut`, or with this process, also after ``kill -9``.
    """

    def __init__(self) -> None:
        self.fileno, our_end = os.pipe()
        self._our_end = [our_end]
        """The writing end, until somebody takes it to close it: threads may cut at once."""

    def cut(self) -> None:
        """Have everything killed that hangs on it."""
        with contextlib.suppress(IndexError):
            os.close(self._our_end.pop())

    def close(self) -> None:
        """Cut it and free its descriptors."""
        self.cut()
        os.close(self.fileno)


class Guarded:
    """A process that ends with this one and takes with it all that it has started."""

    def __init__(self, guard: subprocess.Popen[Any]) -> None:
        self._guard, self._reaping = guard, threading.Lock()
        self.pidfd = os.pidfd_open(guard.pid)
        self._close = weakref.finalize(self, os.close, self.pidfd)
        self.stdin: IO[Any] | None = guard.stdin
        self.stdout: IO[Any] | None = guard.stdout

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        parent_pipe: ParentPipe,
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        encoding: str | None = None,
        pass_fds: Iterable[int] = (),
    ) -> Self:
        """Run `argv`, in a process group of its own. OSError when no process can be started.

        A program that does not exist ends with 127 and says so on its stderr.
        """
        return cls(
            subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(parent_pipe.fileno), *argv],
                env=env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                encoding=encoding,
                pass_fds=[parent_pipe.fileno, *pass_fds],
                start_new_session=True,
            )
        )

    @property
    def pid(self) -> int:
        """Process id of the guard, which is what this process sees of it."""
        return self._guard.pid

    @property
    def exit_code(self) -> int | None:
        """None until it has been reaped; negative: the signal that ended it."""
        return self._guard.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the process and those of its group; the guard itself ignores SIGINT, SIGTERM and SIGHUP."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._guard.pid, number)

    def reap(self) -> None:
        """Take note that it has ended; what may be left of its process group ends as well."""
        with self._reaping:
            if self.exit_code is None:
                self.signal(signal.SIGKILL)  # the id can't belong to others yet: the guard is not reaped
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._guard.wait(KILL_S)

    def close(self) -> None:
        """Free the descriptor, once no thread waits for the process any more; it would also go with the object."""
        self._close()

    def wait(self, limit_s: float) -> bool:
        """Wait for its end, at most `limit_s`; whether it has ended, and been reaped."""
        if self.exit_code is None and wait_for_any([self], limit_s):
            self.reap()
        return self.exit_code is not None

    def stop(self, parent_pipe: ParentPipe, leave_s: float) -> None:
        """SIGTERM, after `leave_s` SIGKILL to it and everything that it has started."""
        try:
            if self.exit_code is None:
                self.signal(signal.SIGTERM)
            self.wait(leave_s)
        finally:
            parent_pipe.cut()
            self.wait(KILL_S)
            self.reap()


def wait_for_any(processes: Iterable[Guarded], limit_s: float) -> list[Guarded]:
    """List the `processes`, none of them reaped, that have ended; waits for the first, at most `limit_s`."""
    poll, by_pidfd = select.poll(), {process.pidfd: process for process in processes}
    for pidfd in by_pidfd:
        poll.register(pidfd, select.POLLIN)
    if not by_pidfd:
        time.sleep(limit_s)
    return [by_pidfd[pidfd] for pidfd, _ in poll.poll(max(0.0, limit_s) * 1000)]


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent`, which has started it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_agent(environment: Mapping[str, str] = os.environ, idle_limit_s: float = IDLE_LIMIT_S) -> None:
    """Have this process killed when torchrun's agent ends, and the agent ended when it idles for too long.

    In the main thread, at the start. Elsewhere it does nothing.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    agent = os.getppid()
    die_with_parent(agent)
    if environment.get("LOCAL_RANK", "0") == "0":
        subprocess.Popen(
            [sys.executable, "-I", "-S", str(_AGENT_WATCH), str(agent), str(idle_limit_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
