"""One instance of the service: the one writer while it leads, a reader that names the leader while it does not.

When anything is unsure (the lease, the database, whose line the log's next one is), the instance forgets its state and
begins again from what the database says. Attempts go on meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from farpipe.core.spec import Cluster
from farpipe.fleet.events import AttemptEvent, Event, Price, PriceChanged, Tick
from farpipe.fleet.replacing import replace
from farpipe.fleet.state import FleetState
from farpipe.service.decisions import heard_of, heard_rows
from farpipe.service.launcher import Key, Launcher
from farpipe.service.problems import NotLeaderError
from farpipe.service.reconcile import Reconciler
from farpipe.service.store import LEASE_S, DeposedError, Store
from farpipe.service.views import Submission
from farpipe.service.writer import Ask, Clock, decide_on

MOST_AT_ONCE: Final = 256
"""Requests that become one decision."""
PASS_S: Final = 1.0
"""Interval at which a leader looks at what runs, and a follower at the log."""
REPORT_S: Final = 60.0
"""Interval at which an attempt's steps become an event if nothing else does."""
AWAY: Final = (SQLAlchemyError, DeposedError)
"""Reasons for which an instance begins again from the database."""
T = TypeVar("T")
log = logging.getLogger("farpipe.service")


class Instance:
    """An instance called `owner` that works on `store`, from `first` on, the state of a fleet without a log.

    `prices` are changes of electricity prices to come, by Unix time; `begin` is called whenever it begins to lead.
    """

    def __init__(
        self,
        store: Store,
        first: FleetState,
        cluster: Cluster,
        launcher: Launcher,
        root: Path,
        owner: str,
        prices: Sequence[PriceChanged] = (),
        begin: Callable[[Store], None] = lambda store: None,
    ) -> None:
        self.store, self.cluster, self.owner = store, cluster, owner
        self.launcher = launcher
        self.is_leading, self.leader, self.silence, self.num_events = False, "", "", 0
        self.documents = dict[str, str]()
        """The job.toml of every job that has not ended."""
        self._first, self.root, self._prices, self._begin = first, root, prices, begin
        self._state: FleetState | None = None
        self._trouble = "it is starting"
        self._is_migrated = False
        self._queue = asyncio.Queue[Ask]()
        self._lease_end = 0.0
        self._clock = Clock(0.0)
        self._threads = {name: ThreadPoolExecutor(1, name) for name in ("write", "look", "lease")}

    @property
    def state(self) -> FleetState:
        """The newest state that this instance knows; NotLeaderError: none."""
        if self._state is None or self._trouble:
            raise self._not_leading()
        return self._state

    @property
    def now_s(self) -> float:
        """Unix time, not before the state's."""
        return self._clock() if self.is_leading else max(time.time(), self.state.now_s)

    async def give(self, ask: Ask) -> FleetState:
        """The state with what was decided on `ask`, once that is on the disk; NotLeaderError: ask another.

        FarpipeError with the reason if it is refused.
        """
        if not self.is_leading:
            raise self._not_leading()
        await self._queue.put(ask)
        return await ask.done

    def _not_leading(self) -> NotLeaderError:
        where = f"{self.leader} leads" if self.leader else "none leads; try again"
        return NotLeaderError(f"this instance can't answer that: {self._trouble or where}", self.leader)

    async def run(self) -> None:
        """Lead, or follow, until cancelled; then the lease is given back."""
        try:
            while True:
                try:
                    await self._turn()
                except* AWAY as error:
                    self._forget(error.exceptions[0])
                await asyncio.sleep(PASS_S)
        finally:
            self._stand_down()
            await asyncio.gather(self._in("lease", self.store.resign, self.owner), return_exceptions=True)

    def _forget(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._state, self._trouble = None, f"{error}".splitlines()[0]
        log.warning("begins again: %s", self._trouble)

    async def _turn(self) -> None:
        """One look at the database as a follower, or a whole time of leading."""
        if not self._is_migrated:
            await self._in("write", self.store.migrate)
            self._is_migrated = True
        if await self._leads():
            await self._lead()
        self.leader = await self._in("write", self.store.leader)
        if self._state is None:
            self._state = await self._in("write", self.store.load, self._first)
        else:
            self._state = await self._in("write", self.store.follow, self._state)
        self._trouble = ""

    def _in(self, thread: str, call: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._threads[thread], call, *args)

    async def _leads(self) -> bool:
        asked_s = time.monotonic()
        is_mine = await self._in("lease", self.store.leads, self.owner)
        self._lease_end = asked_s + LEASE_S if is_mine else 0.0
        return is_mine

    async def _lead(self) -> None:
        """Lead until the lease is another's or the database is away, and then raise an ExceptionGroup."""
        self._state = await self._in("write", self.store.load, self._first)
        self._clock = Clock(self._state.now_s)
        reconciler = await self._in("write", self._new_reconciler)
        self.is_leading, self.leader, self._trouble = True, self.owner, ""
        log.info("leads from line %d of the log on", self.store.number)
        try:
            async with asyncio.TaskGroup() as tasks:
                for work in (self._renew(), self._write(), self._look(reconciler)):
                    tasks.create_task(work)
        finally:
            self._stand_down()

    def _stand_down(self) -> None:
        self.is_leading, self.leader = False, ""
        while not self._queue.empty():
            self._queue.get_nowait().answer(self._not_leading())

    def _new_reconciler(self) -> Reconciler:
        self._begin(self.store)
        asked = self.store.submissions()
        self.documents = {name: Submission.model_validate_json(text).job for name, text in asked.items()}
        heard = heard_of(self.store.heard())
        given = (self.launcher, self.root, self.cluster, self.documents)
        return Reconciler(*given, heard=heard, report_every_s=REPORT_S, may_act=self._has_lease)

    def _has_lease(self) -> bool:
        return time.monotonic() < self._lease_end

    async def _renew(self) -> None:
        while await self._leads():
            await asyncio.sleep(LEASE_S / 4)
        raise DeposedError("another instance has the lease")

    async def _write(self) -> None:
        """The one writer: all that waits becomes one transaction, and is answered afterwards."""
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty() and len(batch) < MOST_AT_ONCE:
                batch.append(self._queue.get_nowait())
            outcome: FleetState | Exception = NotLeaderError("not known whether it was written; ask again")
            try:
                outcome = await self._in("write", self._decide, batch)
            except AWAY as error:
                outcome = NotLeaderError(f"not known whether it was written; ask again: {error}".splitlines()[0])
                raise
            except Exception as error:  # a bug; whoever asked sees it, and others go on
                log.exception("a decision failed")
                outcome = error
            finally:
                for ask in batch:
                    ask.answer(outcome)

    def _decide(self, batch: Sequence[Ask]) -> FleetState:
        for ask in batch:
            if ask.job is not None:  # what starts it may look before the next statement
                self.documents.setdefault(ask.job["name"], Submission.model_validate_json(ask.job["submission"]).job)
        before = self.state
        after = self._state = decide_on(batch, before, self.store, self._clock())
        self.num_events += sum(not why for why in after.verdicts) if after is not before else 0
        for name in self.documents.keys() - after.jobs.keys():
            del self.documents[name]
        return after

    async def _look(self, reconciler: Reconciler) -> None:
        """Pass after pass: what is seen becomes events."""
        while True:
            if self._has_lease():
                events = await self._in("look", self._seen, reconciler, self.state)
                keys = {Key(event.name, event.attempt) for event in events if isinstance(event, AttemptEvent)}
                ask = Ask(_stamped(events), heard=heard_rows(reconciler.heard, keys))
                self._queue.put_nowait(ask)
                await asyncio.wait([ask.done])
                if ask.done.exception() is not None or self.silence:  # what was not written is reported again
                    reconciler.heard = heard_of(await self._in("write", self.store.heard))
            await asyncio.sleep(PASS_S)

    def _seen(self, reconciler: Reconciler, state: FleetState) -> list[Event]:
        now_s = self._clock()
        due = [change for change in self._prices if state.now_s < change.time_s <= now_s]
        prices: Mapping[str, Price] = {site: price for change in due for site, price in change.prices.items()}
        events: list[Event] = [PriceChanged(now_s, prices)] if prices else []
        try:
            events += reconciler.step(state, now_s)
            self.silence = ""
        except Exception as error:  # a launcher can't be reached, or talks nonsense
            self.silence = f"{type(error).__name__}: {error}"
            log.warning("can't see what runs: %s", self.silence, exc_info=True)
        return [*events, Tick(now_s)]


def _stamped(events: Sequence[Event]) -> Callable[[FleetState, float], Sequence[Event]]:
    """The events at the time of the decision: others may have been decided on since they were seen."""
    return lambda state, now_s: [replace(event, time_s=now_s) for event in events]
