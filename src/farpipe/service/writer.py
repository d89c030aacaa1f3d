"""The writer's one step: all that was asked becomes one decision of the core, and one transaction."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from farpipe.core.errors import FarpipeError, InfeasibleError, InputError
from farpipe.fleet.events import Event
from farpipe.fleet.state import FleetState
from farpipe.service.decisions import change_of, is_idle
from farpipe.service.store import Row, Store


@dataclass(eq=False)
class Ask:
    """One request to the writer."""

    events: Callable[[FleetState, float], Sequence[Event]]
    """Its events in a state, at a time; FarpipeError: it is refused."""
    refused: type[InputError] = InputError
    """Kind of the error for an event that the core refuses."""
    job: Row | None = None
    """Row of the job that it submits."""
    who: str = ""
    """Who asks for what, for people."""
    heard: Sequence[Row] = ()
    """Rows of how far attempts were heard, where its events are reports of theirs: each counts alone."""
    error: Exception | None = None
    done: "asyncio.Future[FleetState]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The state with the decision, once that is on the disk."""

    def answer(self, state: FleetState | Exception) -> None:
        """Answer who asked, with the error if it was refused."""
        found = self.error or state
        if self.done.done():
            return  # who asked has gone
        if isinstance(found, Exception):
            self.done.set_exception(found)
        else:
            self.done.set_result(found)


class Clock:
    """Unix seconds that never go back and do not jump while the process lives, however the machine's clock is set."""

    def __init__(self, last_s: float) -> None:
        self._begin_s = max(last_s, time.time()) - time.monotonic()

    def __call__(self) -> float:
        return self._begin_s + time.monotonic()


def decide_on(batch: Sequence[Ask], state: FleetState, store: Store, now_s: float) -> FleetState:
    """The state after all of `batch`, which is on the disk; whoever is refused has an `error`."""
    asked = [(ask, event) for ask in batch for event in _events(ask, state, now_s)]
    events = [event for _, event in asked]
    if not events:
        return state
    after, commands = state.handle(*events)
    for (ask, _), why in zip(asked, after.verdicts, strict=True):
        if why and not ask.heard:
            ask.error = ask.refused(why)
    _refuse_what_fits_nowhere(batch, after)
    if is_idle(state, events, after, commands):
        return state
    jobs = {ask.job["name"]: ask.job for ask in batch if ask.job is not None and ask.error is None}
    who = "; ".join(ask.who for ask in batch if ask.who and ask.error is None)
    change = change_of(state, events, after, commands, [*jobs.values()], who)
    change.heard = [row for ask in batch for row in ask.heard]
    store.write(change, after)
    return after


def _events(ask: Ask, state: FleetState, now_s: float) -> Sequence[Event]:
    try:
        return ask.events(state, now_s)
    except FarpipeError as error:
        ask.error = error
        return ()


def _refuse_what_fits_nowhere(batch: Sequence[Ask], after: FleetState) -> None:
    reasons = {one.name: one.why for one in after.done if one.what == "refuse"}
    for ask in batch:
        if ask.job is not None and ask.error is None and (why := reasons.get(ask.job["name"])):
            ask.error = InfeasibleError(why)
