"""Start all ranks of a run on this machine, watch them, and see that none outlives the run.

The ranks get the environment that torchrun gives (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so that
their code is the same under both. Every rank has a guard (see guard.py), which ends it and everything that it has
started when the launcher is gone, even by kill -9.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from farpipe.emulate import Namespace
from farpipe.errors import (
    DivergedError,
    FarpipeError,
    InfeasibleError,
    InputError,
    RunError,
    RunInterruptedError,
    RunStoppedError,
)
from farpipe.strict import write_text

ERROR_FILE_VARIABLE: Final = "FARPIPE_ERROR_FILE"
SETTLE_S: Final = 1.5
"""After the first rank has failed: time for the others to notice and say why they end."""
TERMINATE_S: Final = 1.5
"""Time to end after SIGTERM, before SIGKILL."""
KILL_S: Final = 4.0
"""Time for the guards to clean up; a little more than they allow themselves."""
TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 16384
_HOST: Final = "127.0.0.1"
_GUARD: Final = Path(__file__).with_name("guard.py")
_KINDS: Final = (InputError, InfeasibleError, DivergedError, RunStoppedError, RunInterruptedError)
_ERRORS: Final[dict[int, type[FarpipeError]]] = {kind.exit_code: kind for kind in _KINDS}
"""By the exit code of a rank, what the launcher raises; RunError for all others."""


def launch(
    argv_for_rank: Callable[[int], Sequence[str]],
    num_processes: int,
    *,
    log_dir: Path,
    env: Mapping[str, str] | None = None,
    master_port: int = 0,
    namespaces: Sequence[Namespace] | None = None,
    on_tick: Callable[[], None] | None = None,
    tick_s: float = 0.2,
    leave_s: float | None = None,
) -> None:
    """Run `num_processes` processes, `argv_for_rank(rank)` each, and return when all have ended well.

    What they print goes to ``rank-N.log`` in `log_dir`. `env` is added to the environment. `master_port` 0: any that
    is free. `namespaces`: where each rank runs; None: on this machine's loopback. `on_tick` is called every `tick_s`
    seconds meanwhile, for progress. Every rank gets its share of the cores as OMP_NUM_THREADS unless that is set.

    When a rank fails, the others are given a moment, then SIGTERM, then SIGKILL; the error is that of the rank that
    failed first, not of those that failed because of it: InputError or InfeasibleError if it was one or the exit code
    says so, otherwise RunError. It has the rank's own words (see `reporting_errors`) or the end of its log. Ctrl-C and,
    in the main thread, SIGTERM end all ranks and come out as KeyboardInterrupt. With `leave_s` the first SIGTERM is
    passed on to the ranks, which then have so long to end by themselves.
    """
    with ExitStack() as stack:
        asked_s = stack.enter_context(_sigterm(interrupts=leave_s is None))
        listener = stack.enter_context(_listen(master_port, namespaces[0] if namespaces else None))
        crew = stack.enter_context(_Crew(log_dir))
        environment = _environment(num_processes, listener, os.environ | (env or {}))
        for rank in range(num_processes):
            argv = argv_for_rank(rank)
            crew.start(rank, namespaces[rank].command(argv) if namespaces else argv, environment, listener)
        listener.close()
        while crew.running() and not crew.failed():
            if asked_s and leave_s is not None:
                crew.ask_to_leave()
                if time.monotonic() > asked_s[0] + leave_s:
                    raise RunError(f"the ranks did not leave within {leave_s:g} s of SIGTERM")
            crew.wait(tick_s)
            if on_tick:
                on_tick()
        if crew.failed():
            crew.stop(SETTLE_S)
            raise crew.error()


def _listen(port: int, namespace: Namespace | None) -> socket.socket:
    """The socket that rank 0 will serve the rendezvous on; made here so that nobody else can get the port meanwhile."""
    try:
        return namespace.listen(port) if namespace else socket.create_server((_HOST, port))
    except OSError as error:
        raise InputError(
            f"port {port} can't be listened on: {error.strerror}; stop what uses it, choose another, or 0 for any"
        ) from None


def _environment(num_processes: int, listener: socket.socket, env: Mapping[str, str]) -> dict[str, str]:
    """What all ranks find in their environment."""
    cores = len(os.sched_getaffinity(0))
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // num_processes)), "PYTHONUNBUFFERED": "1"}
    host, port = listener.getsockname()
    return {
        **defaults,
        **{name: value for name, value in env.items() if not name.startswith("TORCHELASTIC_")},
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "FARPIPE_MASTER_LISTEN_FD": str(listener.fileno()),
        "FARPIPE_RUN_TOKEN": secrets.token_hex(32),
    }


@contextmanager
def _sigterm(*, interrupts: bool) -> Iterator[list[float]]:
    """What SIGTERM does in the main thread: the same as Ctrl-C, so that the ranks end in the same orderly way.

    Unless the first one `interrupts`, it only puts the time (monotonic, s) into what is given out.
    """
    asked_s: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupts or asked_s:
            raise KeyboardInterrupt
        asked_s.append(time.monotonic())

    try:
        before = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not the main thread
        yield asked_s
        return
    try:
        yield asked_s
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class _Rank:
    """One rank; its guard is what the launcher sees of it."""

    rank: int
    guard: subprocess.Popen[bytes]
    pidfd: int
    log: Path
    error_file: Path
    told_to_end: bool = False
    """Whether the launcher ended it, because of another."""
    asked_to_leave: bool = False
    """Whether SIGTERM was passed on to it."""
    end_s: float = 0.0

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self.guard.returncode

    def reap(self) -> None:
        """Take note that it has ended; what may be left of its process group ends as well."""
        with contextlib.suppress(ProcessLookupError):  # the id can't belong to others yet: the guard is not reaped
            os.killpg(self.guard.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.guard.wait(KILL_S)
        self.end_s = time.monotonic()
        os.close(self.pidfd)


class _Crew:
    """All ranks of a run. As a context: nothing of them is left at its end, whatever happens in it."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._ranks: list[_Rank] = []
        self._lifeline, self._our_end = -1, -1

    def __enter__(self) -> "_Crew":
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self._log_dir}: can't be made: {error.strerror}") from None
        # Not in log_dir: a full disk there is one of the things that ranks have to report.
        self._reports = tempfile.TemporaryDirectory(prefix="farpipe-", ignore_cleanup_errors=True)
        self._lifeline, self._our_end = os.pipe()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop(0.0)
        finally:
            os.close(self._lifeline)
            self._reports.cleanup()

    def start(self, rank: int, argv: Sequence[str], environment: Mapping[str, str], listener: socket.socket) -> None:
        """Start a rank; only rank 0 gets the listening socket."""
        log, error_file = self._log_dir / f"rank-{rank}.log", Path(self._reports.name) / f"rank-{rank}.json"
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE_VARIABLE: str(error_file.absolute())}
        try:
            with log.open("wb") as output:
                guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_GUARD), str(self._lifeline), *argv],
                    env={**environment, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[self._lifeline, *([listener.fileno()] if rank == 0 else [])],
                    start_new_session=True,
                )
            self._ranks.append(_Rank(rank, guard, os.pidfd_open(guard.pid), log, error_file))
        except OSError as error:
            raise RunError(f"rank {rank}: can't be started: {error}") from None

    def running(self) -> list[_Rank]:
        """The ranks that have not ended."""
        return [rank for rank in self._ranks if rank.exit_code is None]

    def failed(self) -> list[_Rank]:
        """The ranks that have ended badly, the first first."""
        return sorted((rank for rank in self._ranks if rank.exit_code), key=lambda rank: rank.end_s)

    def wait(self, limit_s: float) -> None:
        """Wait until a rank ends, but not longer than `limit_s`."""
        poll = select.poll()
        by_pidfd = {rank.pidfd: rank for rank in self.running()}
        for pidfd in by_pidfd:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(limit_s * 1000):
            by_pidfd[pidfd].reap()

    def ask_to_leave(self) -> None:
        """Pass SIGTERM on, once; the ranks may take their time."""
        for rank in self.running():
            if not rank.asked_to_leave:
                rank.asked_to_leave = True
                os.killpg(rank.guard.pid, signal.SIGTERM)

    def stop(self, settle_s: float) -> None:
        """End all ranks that run: leave them `settle_s` to end by themselves, then SIGTERM, then SIGKILL."""
        try:
            self._wait_for_all(settle_s)
            for rank in self.running():
                rank.told_to_end = True
                os.killpg(rank.guard.pid, signal.SIGTERM)
            self._wait_for_all(TERMINATE_S)
        finally:  # a second Ctrl-C comes here directly
            if self._our_end >= 0:
                os.close(self._our_end)
                self._our_end = -1
            self._wait_for_all(KILL_S)
            for rank in self.running():
                rank.reap()

    def _wait_for_all(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while self.running() and (left_s := deadline_s - time.monotonic()) > 0:
            self.wait(left_s)

    def error(self) -> FarpipeError:
        """What went wrong first: not that a rank was told to end, nor, if possible, that it missed another one."""
        reports = [(rank, _read_report(rank.error_file)) for rank in self.failed()]

        def rating(item: tuple[_Rank, dict[str, Any]]) -> tuple[bool, bool]:
            rank, report = item
            return rank.told_to_end, bool(report.get("because_of_peer"))

        rank, report = min(reports, key=rating)
        kind = _ERRORS.get(report.get("exit_code", rank.exit_code) or 0, RunError)
        if kind is RunStoppedError and report:  # nothing has failed
            return kind(report.get("text"))
        return kind(f"rank {rank.rank} {_describe(rank, report)} (log: {rank.log})")


def _describe(rank: _Rank, report: Mapping[str, Any]) -> str:
    """How a rank ended: in its own words if they are meant for the user, otherwise with the end of its log."""
    code = rank.exit_code or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if report.get("for_user"):
        return f"failed: {report.get('text')}"
    tail = "".join(f"\n  | {line}" for line in _last_lines(rank.log))
    if tail:
        return f"{how}; the last it printed:{tail}\n"
    hint = "; when memory runs out the system does that" if code == -signal.SIGKILL else ""
    return f"{how} and printed nothing{hint}"


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []


def _read_report(error_file: Path) -> dict[str, Any]:
    """What a rank wrote under `reporting_errors`; empty when it wrote nothing or could not."""
    with contextlib.suppress(OSError, ValueError):
        report = json.loads(error_file.read_bytes())
        return report if isinstance(report, dict) else {}
    return {}


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Around all that a rank does: an error that passes through is left for the launcher to show."""
    try:
        yield
    except Exception as error:
        _write_report(error)
        raise


def _write_report(error: Exception) -> None:
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path is None:  # not under farpipe's launcher
        return
    report = {
        "text": str(error),
        "exit_code": getattr(error, "exit_code", 1),
        "for_user": isinstance(error, FarpipeError),
        "because_of_peer": getattr(error, "because_of_peer", False),
    }
    with contextlib.suppress(FarpipeError):  # the disk may be what is full
        write_text(path, json.dumps(report))
