"""Health of a run; the first thing that goes wrong ends every wait."""

import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, NamedTuple, TypeVar

from farpipe.core.errors import RunError
from farpipe.engine.transport.wire import WireError

Result = TypeVar("Result")

LONGEST_WAIT_S: Final = 3600.0
"""Threads look around at least this often; Python's own limit is not much higher."""

EXPLANATION_S: Final = 0.5
"""A broken data connection may be the consequence of something that is about to be heard over control."""

OUTAGE_EXPLANATION_S: Final = 2.0
"""Further time if another peer is silent: whoever has left first may have been a little ahead in giving that one up."""


class PeerError(RunError):
    """The run broke because of another rank: it was lost, or it gave up and said why (exit 6)."""

    because_of_peer = True
    """Mark for the launcher, which shows the cause and not its effects."""


class Later(NamedTuple):
    """Result of a wait for something that is known to come at `machine_ns` (the machine's clock), not before."""

    machine_ns: int


class Health:
    """The first reason why a run broke, who has said goodbye, and the conditions on which threads wait meanwhile.

    `announce` reports the reason to the other ranks; it is called once, by whatever thread finds out.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._error: RunError | None = None
        self._conditions: list[threading.Condition] = []
        self._departed: set[int] = set()
        self._explained = self.condition()
        self._pauses: Counter[tuple[object, int]] = Counter()
        self._paused_s = 0.0
        self._paused_since_s: float | None = None

    @property
    def is_of_a_fork(self) -> bool:
        """True in a child of the process that this is of: it has the sockets, but none of the threads."""
        return os.getpid() != self._process

    def expect_own_process(self) -> None:
        """RunError in a child of the process that this is of; nothing is broken there by it."""
        if self.is_of_a_fork:
            raise RunError("a forked process has no connections of its own; make them after the fork")

    @property
    def error(self) -> RunError | None:
        """Error that broke the run; None while it is sound."""
        return self._error

    def condition(self, lock: "threading.Lock | None" = None) -> threading.Condition:
        """A new condition, on `lock` if given, whose waiters wake when the run breaks or a rank says goodbye."""
        condition = threading.Condition(lock)
        with self._lock:
            self._conditions.append(condition)
        return condition

    def fail(self, error: RunError, announce: str | None) -> None:
        """Break the run, unless it is broken already, wake everybody and report `announce` to the other ranks.

        Not to be called under a condition.
        """
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        self._wake_all()
        if announce is not None:
            self._announce(announce)

    def _wake_all(self) -> None:
        with self._lock:
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()

    def pause(self, who: tuple[object, int]) -> None:
        """`who` has lost a connection and tries to get it back: the limits of waits are extended until `resume`.

        `who`: ("outage", rank that reports it), or what holds a connection of this process and the rank behind it.
        """
        with self._lock:
            if not self._pauses:
                self._paused_since_s = time.monotonic()
            self._pauses[who] += 1

    def resume(self, who: tuple[object, int], *, for_good: bool = False) -> None:
        """`who` has one connection back that it had lost; `for_good`: no more will be heard of any that it had."""
        with self._lock:
            self._pauses[who] -= self._pauses[who] if for_good else 1
            self._pauses += Counter()  # only what is more than zero stays
            if not self._pauses and self._paused_since_s is not None:
                self._paused_s += time.monotonic() - self._paused_since_s
                self._paused_since_s = None

    def paused_s(self) -> float:
        """Total time for which messages were kept from arriving."""
        with self._lock:
            return self._paused_s + (0.0 if self._paused_since_s is None else time.monotonic() - self._paused_since_s)

    def depart(self, peer: int) -> None:
        """`peer` has said goodbye: that its connections close is no loss, and who waits for it may give up.

        Not to be called under a condition.
        """
        self._departed.add(peer)
        self._wake_all()

    def has_departed(self, peer: int) -> bool:
        """True if `peer` has said goodbye."""
        return peer in self._departed

    def lose(self, peer: int, how: str) -> None:
        """A connection with `peer` broke; unless it is explained within EXPLANATION_S, that breaks the run.

        The reason that `peer` has sent may be on the far side of a third process that is silent.
        """
        with self._explained:
            explained = self._explained.wait_for(lambda: self._error or peer in self._departed, EXPLANATION_S)
            if not explained and self._has_lost_another(peer):
                self._explained.wait_for(lambda: self._error or peer in self._departed, OUTAGE_EXPLANATION_S)
        if peer not in self._departed:
            self.fail(PeerError(f"rank {peer} is lost: {how}"), announce=f"rank {peer} is lost: {how}")

    def _has_lost_another(self, peer: int) -> bool:
        """True while a connection with another peer is interrupted, and was so before any with `peer`."""
        with self._lock:
            return next((rank for what, rank in self._pauses if what != "outage"), peer) != peer

    def await_departures(self, peers: Collection[int], limit_s: float) -> None:
        """Wait until all of `peers` have said goodbye, but not longer than `limit_s`."""
        with self._explained:
            self._explained.wait_for(lambda: self._error or self._departed.issuperset(peers), limit_s)

    @contextmanager
    def guard(self, peer: int, what: str) -> Iterator[None]:
        """Context of all that a thread does with `peer`: however it fails, the run hears of it."""
        try:
            yield
        except (OSError, WireError) as error:
            self.lose(peer, f"{what}: {error}")
        except Exception as error:
            self.fault(error, what)

    def fault(self, error: Exception, what: str) -> None:
        """Break the run because of an error that came out of `what`; one that is not meant for users is our bug."""
        if not isinstance(error, RunError):
            traceback.print_exception(error)
            error = RunError(f"a fault in farpipe while {what}: {error!r}")
        self.fail(error, announce=str(error))

    def check(self, context: object) -> None:
        """Raise the error that broke the run, if any, with the words of `context` before it."""
        if self._error is not None:
            raise type(self._error)(f"{context}: {self._error}")

    def wait(
        self,
        condition: threading.Condition,
        ready: Callable[[], Result | Later | None],
        deadline_s: float,
        context: object,
    ) -> Result | None:
        """Wait, under `condition`, until `ready()` gives a result; None when `deadline_s` (monotonic) has passed.

        Outages don't count. Raises the error that broke the run as soon as it does, with the words of `context`
        before it.
        """
        paused_s = self.paused_s()
        while True:
            self.check(context)
            result = ready()
            if result is not None and not isinstance(result, Later):
                return result
            now_ns = time.monotonic_ns()
            left_s = deadline_s - now_ns / 1e9
            if left_s <= 0:
                left_s += self.paused_s() - paused_s
            if left_s <= 0:
                return None
            due_s = (result.machine_ns - now_ns) / 1e9 if result else LONGEST_WAIT_S
            condition.wait(min(left_s, due_s, LONGEST_WAIT_S))


class Breaking:
    """A context for many uses: a RunError that passes through ends the run of all ranks.

    A class, for it is around every message, and a generator would take several times as long.
    """

    def __init__(self, health: Health) -> None:
        self._health = health

    def __enter__(self) -> None:
        self._health.expect_own_process()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, RunError):
            self._health.fail(error, announce=str(error))
