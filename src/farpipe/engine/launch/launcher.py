"""All ranks of a run as processes of this machine: started, watched, ended; see `launch`.

The ranks get the environment that torchrun gives (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so that
their code is the same under both.
"""

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

from farpipe.core.errors import (
    DivergedError,
    FailedRank,
    FarpipeError,
    InfeasibleError,
    InputError,
    RunError,
    RunInterruptedError,
    RunStoppedError,
)
from farpipe.engine.launch.reports import REPORT_VARIABLE, new_report, read_report
from farpipe.engine.launch.world import World
from farpipe.engine.links import Namespace
from farpipe.engine.processes import END_S, KILL_S, Guarded, LeaveRequest, ParentPipe, interrupting, wait_for_any

SETTLE_S: Final = 1.5
"""Seconds after the first failure in which other ranks notice it and report their reasons."""
TERMINATE_S: Final = 1.5
"""Time to end after SIGTERM, before SIGKILL."""
OVERDUE_S: Final = END_S + 5.0
"""Time after a rank's work in which it ends by itself, or by its own limit; then it is killed."""
RANK_PROGRAM: Final = ("-m", "farpipe.engine.launch.rank_main")
"""What ranks run, as arguments of Python."""
TICK_S: Final = 0.2
"""Seconds between two looks at the ranks."""
MAX_LOG_BYTES: Final = 64 << 20
"""Length of a rank's log beyond which its middle is taken out."""
_KEPT_BYTES: Final = 1 << 20
"""Bytes that then stay of its beginning and of its end."""
TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 16384
_HOST: Final = "127.0.0.1"
_KINDS: Final = (InputError, InfeasibleError, DivergedError, RunStoppedError, RunInterruptedError)
_ERRORS: Final[dict[int, type[FarpipeError]]] = {kind.exit_code: kind for kind in _KINDS}
"""Error that the launcher raises, by the exit code of a rank; RunError for all others."""
_HINTS: Final[dict[int, str]] = {
    signal.SIGKILL: "; when memory runs out the system does that",
    signal.SIGABRT: "; NCCL does that where a collective of the ranks of a stage broke or took too long",
    signal.SIGBUS: "; a file that it had mapped, such as the tokens of data.source, has become shorter",
}
"""Usual causes of a signal that ends a rank, by its number."""


class RankSettings(TypedDict, total=False):
    """Settings of the ranks' processes, with the same names as keywords of `launch`."""

    log_dir: Path | None
    """Folder for ``rank-N.log``, what the ranks print; None: memory, for error messages."""
    env: Mapping[str, str]
    """Variables added to the environment."""
    master_port: int
    """Port of the rendezvous; 0: any that is free."""
    namespaces: Sequence[Namespace] | None
    """Namespace of each rank; None: this machine's loopback."""
    fds_of_rank_0: Sequence[int]
    """Descriptors that rank 0 inherits."""
    world: World | None
    """The whole run, where only some of its ranks run here."""


@dataclass
class _Rank:
    """One rank."""

    rank: int
    process: Guarded
    log: Path
    report: int
    """Descriptor; see reports.py."""
    log_in_memory: int | None
    """Descriptor, where the logs of the run go to no folder."""
    told_to_end: bool = False
    """True if the launcher ended it, because of another."""
    asked_to_leave: bool = False
    """True if SIGTERM was passed on to it."""
    end_code: int | None = None
    """Exit code that it was to end with, where it had to be killed although its work was done."""
    end_s: float = 0.0

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs; negative: the signal that ended it."""
        return self.process.exit_code if self.end_code is None or self.process.exit_code is None else self.end_code

    def kill_if_overdue(self) -> None:
        """Kill it where its work is done and even its own limit has not ended it."""
        report = read_report(self.report)
        if "done_s" in report and time.monotonic() > report["done_s"] + OVERDUE_S:
            self.end_code = report["end_code"]
            self.process.signal(signal.SIGKILL)

    def reap(self) -> None:
        """Take note that it has ended."""
        self.process.reap()
        self.end_s = time.monotonic()


class RankProcesses:
    """The processes of all ranks, ``argv_for_rank(rank)`` each; `launch` starts, polls and stops them."""

    def __init__(
        self, argv_for_rank: Callable[[int], Sequence[str]], num_processes: int, settings: RankSettings
    ) -> None:
        self._argv_for_rank, self._num_processes = argv_for_rank, num_processes
        self._log_dir, self._env = settings.get("log_dir"), settings.get("env", {})
        self._master_port, self._namespaces = settings.get("master_port", 0), settings.get("namespaces")
        self._fds_of_rank_0, self._world = settings.get("fds_of_rank_0", ()), settings.get("world")
        self._ranks: list[_Rank] = []
        self._parent_pipe: ParentPipe | None = None

    def start(self) -> None:
        """Start the ranks. InputError when the port is taken, RunError when it can't be done; then none is left."""
        if self._log_dir is not None:
            try:
                self._log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunError(f"{self._log_dir}: can't be made: {error.strerror}") from None
        self._parent_pipe = ParentPipe()
        try:
            if self._world is not None:
                self._start_all(self._world)
                return
            with _listen(self._master_port, self._namespaces[0] if self._namespaces else None) as listener:
                ranks = range(self._num_processes)
                host, port = listener.getsockname()
                self._start_all(World(ranks, len(ranks), (host, port), secrets.token_hex(32), listener))
        except BaseException:
            self.stop()
            raise

    def _start_all(self, world: World) -> None:
        environment = world.environment(os.environ | self._env)
        for place, rank in enumerate(world.ranks):
            self._start(rank, environment | {"RANK": str(rank), "LOCAL_RANK": str(place)}, world.listener)

    def _start(self, rank: int, environment: Mapping[str, str], listener: socket.socket | None) -> None:
        """Start a rank; only rank 0 gets the listening socket."""
        assert self._parent_pipe is not None
        argv = self._argv_for_rank(rank)
        argv = self._namespaces[rank].command(argv) if self._namespaces else argv
        report, log_in_memory = new_report(), None if self._log_dir else new_report()
        log = self._log_dir / f"rank-{rank}.log" if self._log_dir else Path(f"/proc/self/fd/{log_in_memory}")
        inherited = [listener.fileno(), *self._fds_of_rank_0] if listener is not None and rank == 0 else []
        try:
            log.write_bytes(b"")
            with log.open("ab") as output:  # at its end, wherever that is after `shorten`
                process = Guarded.start(
                    argv,
                    self._parent_pipe,
                    env={**environment, REPORT_VARIABLE: str(report)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[report, *inherited],
                )
        except OSError as error:
            _close(report, log_in_memory)
            raise RunError(f"rank {rank}: can't be started: {error}") from None
        self._ranks.append(_Rank(rank, process, log, report, log_in_memory))

    def poll(self, limit_s: float = 0.0) -> bool:
        """Wait at most `limit_s` for news; True when all ranks have ended well.

        When one has failed, the others are ended; the error is that of the rank that failed first, not of its victims.
        """
        if not self._failed():
            self._wait(limit_s)
            for rank in self._running():
                rank.kill_if_overdue()
                _shorten(rank.log)
        if self._failed():
            self._end(SETTLE_S)
            raise self._error()
        return not self._running()

    def ask_to_leave(self) -> None:
        """Pass SIGTERM on, once to each rank; the ranks may take their time."""
        for rank in self._running():
            if not rank.asked_to_leave:
                rank.asked_to_leave = True
                rank.process.signal(signal.SIGTERM)

    def stop(self, leave_s: float = 0.0) -> None:
        """SIGTERM, and after `leave_s` SIGKILL; when it returns nothing is left. A second call does nothing."""
        if self._parent_pipe is None:
            return
        try:
            self._end(leave_s)
        finally:
            self._parent_pipe.close()
            self._parent_pipe = None
            for rank in self._ranks:
                _close(rank.report, rank.log_in_memory)

    def _end(self, settle_s: float) -> None:
        """End all ranks that run: leave them `settle_s` to end by themselves, then SIGTERM, then SIGKILL."""
        assert self._parent_pipe is not None
        try:
            self._wait_for_all(settle_s)
            for rank in self._running():
                rank.told_to_end = True
                rank.process.signal(signal.SIGTERM)
            self._wait_for_all(TERMINATE_S)
        finally:  # a second Ctrl-C comes here directly
            self._parent_pipe.cut()
            self._wait_for_all(KILL_S)
            for rank in self._running():
                rank.reap()

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.exit_code is None]

    def _failed(self) -> list[_Rank]:
        """The ranks that have ended badly, the first first."""
        return sorted((rank for rank in self._ranks if rank.exit_code), key=lambda rank: rank.end_s)

    def _wait(self, limit_s: float) -> None:
        """Wait until a rank ends, but not longer than `limit_s`."""
        running = {id(rank.process): rank for rank in self._running()}
        for process in wait_for_any([rank.process for rank in running.values()], limit_s) if running else ():
            running[id(process)].reap()

    def _wait_for_all(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while self._running() and (left_s := deadline_s - time.monotonic()) > 0:
            self._wait(left_s)

    def _error(self) -> FarpipeError:
        """The first error, preferably not that a rank was asked to end or that it lost another one."""
        reports = [(rank, read_report(rank.report)) for rank in self._failed()]

        def rating(item: tuple[_Rank, dict[str, Any]]) -> tuple[bool, bool]:
            rank, report = item
            is_effect = bool(report.get("because_of_peer")) or _is_ended_by_nccl(rank)
            return rank.told_to_end and "text" not in report, is_effect

        rank, report = min(reports, key=rating)
        kind = _ERRORS.get(report.get("exit_code", rank.exit_code) or 0, RunError)
        if kind is RunStoppedError and report:  # nothing has failed
            return kind(report.get("text"))
        log = f" (log: {rank.log})" if rank.log_in_memory is None else ""
        error = kind(f"rank {rank.rank} {_describe(rank, report)}{log}")
        error.failed_rank = FailedRank(rank.rank, rank.exit_code or 0, bool(report.get("because_of_peer")))
        return error

    def notices(self) -> list[str]:
        """Sentences about ranks that have not ended by themselves although their work was done."""
        late = "its work was done, but the process did not end by itself, and was killed"
        found = [late if rank.end_code is not None else read_report(rank.report).get("notice") for rank in self._ranks]
        return [f"rank {number}: {text}" for number, text in enumerate(found) if text]

    def results(self) -> list[Any]:
        """Results that the ranks have left with `leave_result`; None for nothing. To be asked for before `stop`."""
        return [read_report(rank.report).get("result") for rank in self._ranks]


def _close(*descriptors: int | None) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _listen(port: int, namespace: Namespace | None) -> socket.socket:
    """The socket that rank 0 will serve the rendezvous on; made here, so that the port stays ours."""
    try:
        return namespace.listen(port) if namespace else socket.create_server((_HOST, port))
    except OSError as error:
        raise InputError(
            f"port {port} can't be listened on: {error.strerror}; stop what uses it, choose another, or 0 for any"
        ) from None


def _describe(rank: _Rank, report: Mapping[str, Any]) -> str:
    """Describe the end of a rank: in its own words if they are meant for the user, else with the end of its log."""
    code = rank.exit_code or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if report.get("for_user"):
        return f"failed: {report.get('text')}"
    tail = "".join(f"\n  | {line}" for line in _last_lines(rank.log))
    if tail:
        return f"{how}; the last it printed:{tail}\n"
    return f"{how} and printed nothing{_HINTS.get(-code, '')}"


def _is_ended_by_nccl(rank: _Rank) -> bool:
    """True for a rank that NCCL's watchdog has aborted: a collective broke, or took too long, where a peer was lost.

    That is no exception of torch's, so the rank could not report it. By reading only: no GPU has run this.
    """
    return rank.exit_code == -signal.SIGABRT and any("NCCL" in line for line in _last_lines(rank.log))


def _shorten(log: Path) -> None:
    """Take out the middle of a log that has become longer than MAX_LOG_BYTES, as by prints in a user's module."""
    with suppress(OSError):
        if log.stat().st_size <= MAX_LOG_BYTES:
            return
        with log.open("r+b") as file:
            first, size = file.read(_KEPT_BYTES), file.seek(0, os.SEEK_END)
            file.seek(size - _KEPT_BYTES)
            last = file.read()
            file.truncate(0)
            file.seek(0)
            dropped = size - len(first) - len(last)
            file.write(
                first + f"\n[farpipe dropped {dropped:,} bytes here: logs end at {MAX_LOG_BYTES:,}]\n".encode() + last
            )


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []


def launch(
    argv_for_rank: Callable[[int], Sequence[str]],
    num_processes: int,
    *,
    on_tick: Callable[[], None] = lambda: None,
    on_notice: Callable[[str], None] = lambda text: None,
    request: LeaveRequest | None = None,
    leave_s: float = 0.0,
    **settings: Unpack[RankSettings],
) -> list[Any]:
    """Run `num_processes` processes, `argv_for_rank(rank)` each, until all have ended well; the results they leave.

    `on_tick` is called every TICK_S meanwhile, for progress, `on_notice` for ranks that had to be ended after their
    work. Every rank gets its share of the cores as OMP_NUM_THREADS
    unless that is set.

    When a rank fails, the others are given a moment, then SIGTERM, then SIGKILL; the error is that of the rank that
    failed first, not of those that failed because of it: InputError or InfeasibleError if it was one or the exit code
    says so, otherwise RunError. It has the rank's own words (see reports.py) or the end of its log. Ctrl-C and, in the
    main thread, SIGTERM and SIGHUP end all ranks and come out as KeyboardInterrupt. A `request` to leave, for which the
    caller listens, is passed on to the ranks instead, which have `leave_s` to end by themselves.
    """
    ranks = RankProcesses(argv_for_rank, num_processes, settings)
    with interrupting() if request is None else nullcontext():
        try:
            ranks.start()
            while not ranks.poll(TICK_S):
                _pass_on(request, ranks, leave_s)
                on_tick()
            for text in ranks.notices():
                on_notice(text)
            return ranks.results()
        finally:
            ranks.stop()


def _pass_on(request: LeaveRequest | None, ranks: RankProcesses, leave_s: float) -> None:
    """Pass a request to leave on to the ranks; RunError when they have not followed it within `leave_s`."""
    if request is None or request.time_s is None:
        return
    ranks.ask_to_leave()
    if time.monotonic() > request.time_s + leave_s:
        raise RunError(f"the ranks did not leave within {leave_s:g} s of SIGTERM")
