"""Decisions while a run goes on: to look for another order, to take it, and to judge if it brought the expected gain.

Decisions only: Timelines in, searches and swaps out. Clocks, processes and files are somebody else's.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.schedule import check
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.spec.run_keys import ReplanSettings
from farpipe.core.step import Problem, Schedule
from farpipe.core.strict import expect_format, finite, parse_json
from farpipe.core.units import format_percent, format_rate, format_seconds
from farpipe.engine.control.measured import as_in_step, as_measured, deviations, largest_change

Event = dict[str, Any]
"""Entry of the log: ``step``, ``event`` and what belongs to it."""

FORMAT: Final = "farpipe/replan/1"
MAX_LINKS_TOLD: Final = 4
MAX_KNOWN: Final = 8
"""Orders that are remembered for when the world is again as it was."""
MAX_KEPT_STEPS: Final = 8
"""The newest steps of a row, from which stages and links are estimated."""
MAX_SAMPLES: Final = 4
"""Largest number of these steps with whose durations orders are compared."""


@dataclass(frozen=True)
class SearchRequest:
    """An order is to be sought for `problem`, beside the run."""

    step: int
    why: str
    problem: Problem
    samples: tuple[Problem, ...]
    """`problem` with the durations of single steps; an order is judged by its mean time over these."""


@dataclass(frozen=True)
class Swap:
    """All ranks are to go over to `schedule`, as soon as they can."""

    schedule: Schedule
    why: str
    before_s: float
    """Time of a step now, measured."""
    expected_s: float
    is_step_back: bool = False


class RememberedOrder(NamedTuple):
    """An order and the world that it was sought for, or in which it was tried."""

    problem: Problem
    schedule: Schedule

    def to_data(self) -> dict[str, Any]:
        """Both as JSON data."""
        return {"problem": self.problem.to_data(), "schedule": self.schedule.to_data()}

    @classmethod
    def from_data(cls, data: dict[str, Any], source: str) -> "RememberedOrder":
        """The inverse of `to_data`."""
        return cls(Problem.from_data(data["problem"], source), Schedule.from_data(data["schedule"], source))


@dataclass
class _Trial:
    """A new order that has to prove itself."""

    swap: Swap
    previous: Schedule
    problem: Problem
    """Problem that the swap was decided on."""
    timelines: list[Timeline] = field(default_factory=list)


class UnexpectedSteps:
    """Steps in a row that are off, all in the same direction: evidence that something has changed.

    A sequential test (Page 1954, "Continuous inspection schemes"): each step counts by how far it is beyond what is
    allowed, at most once that much, so that no single step proves anything and a large change needs but few.
    """

    def __init__(self, settings: ReplanSettings) -> None:
        self._settings = settings
        self._evidence = 0.0
        self._last: NDArray[np.float64] | None = None
        self.timelines: list[Timeline] = []

    def add(self, timeline: Timeline, expected_s: float, believed: Problem) -> bool:
        """Add a step; True if the steps so far, with this one, prove a change."""
        units = self._units(timeline, expected_s, believed)
        off = float(np.abs(units).max())
        if off <= 1:
            self.clear()
            return False
        if self._last is not None and np.abs(units - self._last).max() > max(1.0, off / 2):
            self.clear()  # something is going on; count from here
        self._last = units
        self._evidence += min(off, 2.0) - 1
        self.timelines = [*self.timelines, timeline][-MAX_KEPT_STEPS:]
        return self._evidence >= self._settings.sudden_steps * (1 - 1e-9)

    def _units(self, timeline: Timeline, expected_s: float, believed: Problem) -> NDArray[np.float64]:
        """[1 + num_stages + num_links]: how far the step, and everything in it, is off; within -1 and 1 is allowed."""
        makespan = math.log(timeline.makespan_s / expected_s) / math.log1p(self._settings.drift)
        parts = deviations(believed, timeline)
        logs = np.copysign(np.log1p(np.minimum(np.abs(parts), 1e9)), parts) / math.log1p(self._settings.change)
        return np.concatenate([[makespan], logs])

    def clear(self) -> None:
        """Start over."""
        self._evidence, self._last, self.timelines = 0.0, None, []


class Replanner:
    """Watches the steps of a run. `events` collects what happened, for the log."""

    def __init__(self, problem: Problem, schedule: Schedule, settings: ReplanSettings, first_step: int = 0) -> None:
        self.schedule, self.settings = schedule, settings
        self.events: list[Event] = []
        self._limits, self._believed = problem, problem
        self._samples: tuple[Problem, ...] = (problem,)
        self._plan = hashlib.sha256((problem.to_json() + json.dumps(schedule.to_data())).encode()).hexdigest()
        self._known = [RememberedOrder(problem, schedule)]
        self._disappointed: list[RememberedOrder] = []
        """Orders that were tried, each with the world in which they did not bring what they promised."""
        self._expected_s = simulate(problem, schedule).makespan_s
        self._odd = UnexpectedSteps(settings)
        self._search: SearchRequest | None = None
        self._swap: Swap | None = None
        self._trial: _Trial | None = None
        self._first_step, self._rest_until = first_step + settings.settle_steps, 0

    def observe(self, step: int, timeline: Timeline) -> list[SearchRequest | Swap]:
        """A measured step; what is to be done about it."""
        if step < self._first_step or self._swap is not None:
            return []
        has_changed = self._odd.add(timeline, self._expected_s, self._believed)
        if self._trial is not None:
            self._trial.timelines.append(timeline)
        if has_changed:
            return self._changed(step)
        if self._trial is not None and len(self._trial.timelines) >= self.settings.watch_steps:
            return self._judge(step, self._trial)
        return []

    def _changed(self, step: int) -> list[SearchRequest | Swap]:
        """The steps in a row are of another world, or the new order is not what it promised."""
        if self._trial is not None:
            self._trial.timelines = [*self._odd.timelines]
            return self._judge(step, self._trial)
        return self._decide(step, as_measured(self._believed, self._odd.timelines), self._odd.timelines)

    def _decide(self, step: int, measured: Problem, steps: Sequence[Timeline]) -> list[SearchRequest | Swap]:
        """React to a confirmed change: switch to a known order if it wins on the last `steps`, or ask for a search on
        `measured`."""
        # A known order is tried in milliseconds, a search takes seconds, and a link that slows down often recovers. So
        # known orders are played first. A search still follows unless the winner was found for a world like this one.
        # After a search that found nothing, or a step back, only known orders are tried for `pause_steps`: a noisy
        # machine would otherwise keep a search running all the time.
        now_s, samples = _median_s(steps), _samples(measured, steps)
        why = self._reason(measured, now_s)
        swap = self._swap_to_known(measured, samples, now_s, f"{why}; known from before")
        if swap is None and step < self._rest_until:
            return []  # what is odd now will still be when the rest is over
        self._swap = swap
        todo: list[SearchRequest | Swap] = [] if swap is None else [swap]
        if swap is None or not any(self._is_about(item, measured, swap.schedule) for item in self._known):
            self._search = SearchRequest(step, why, measured, samples)
            self._log(step, "search", why=why, measured_s=now_s, expected_s=self._expected_s)
            todo.append(self._search)
        self._believe(measured, samples, now_s)
        return todo

    def found(self, step: int, schedule: Schedule | None, *, is_last: bool = True) -> Swap | None:
        """Take the search's result (None: nothing was found); return a swap to it if it is worth it.

        A search may find one after the other; `is_last`: nothing more will come.
        """
        search, before = self._search, self._swap
        assert search is not None
        obstacle = "the search found nothing" if schedule is None else self._obstacle(schedule)
        if schedule is not None and obstacle is None:
            self._remember(search.problem, schedule)
        if self._swap is None and self._trial is None:
            self._swap = self._swap_to_known(self._believed, self._samples, self._expected_s, search.why)
        if is_last:
            self._search = None
        if is_last and self._swap is None and self._trial is None:
            self._rest_until = step + self.settings.pause_steps
            self._remember(search.problem, self.schedule)
            why = self._too_little(search, schedule) if schedule is not None and obstacle is None else obstacle
            self._log(step, "stay", why=why)
        return None if self._swap is before else self._swap

    def swapped(self, step: int) -> None:
        """All ranks work in the new order from the step after `step` on."""
        swap, self._swap = self._swap, None
        assert swap is not None
        if swap.is_step_back:
            self._rest_until = step + self.settings.pause_steps
        else:
            self._trial = _Trial(swap, self.schedule, self._believed)
        self._log(
            *(step, "step back" if swap.is_step_back else "swap"),
            why=swap.why,
            method=swap.schedule.method,
            before_s=swap.before_s,
            expected_s=swap.expected_s,
        )
        self.schedule, self._expected_s, self._first_step = swap.schedule, swap.expected_s, step + 1
        self._odd.clear()

    def to_json(self) -> str:
        """Write the state that a later attempt at the run may go on with, in the format ``farpipe/replan/1``."""
        return json.dumps(
            {
                "format": FORMAT,
                "plan": self._plan,
                "schedule": self.schedule.to_data(),
                "believed": self._believed.to_data(),
                "expected_s": self._expected_s,
                "known": [item.to_data() for item in self._known],
                "disappointed": [item.to_data() for item in self._disappointed],
            }
        )

    def go_on(self, text: str, source: str) -> None:
        """Take over the order and the beliefs of an earlier attempt; its trial or search is forgotten.

        InputError when `text` is no such thing, or of a run with another plan; then nothing has changed.
        """
        body = expect_format(parse_json(text, source), FORMAT, source)
        if body.get("plan") != self._plan:
            raise InputError(f"{source}: is of a run with another plan")
        try:
            believed = Problem.from_data(body["believed"], source)
            schedule = Schedule.from_data(body["schedule"], source)
            known = [RememberedOrder.from_data(item, source) for item in body["known"]]
            disappointed = [RememberedOrder.from_data(item, source) for item in body["disappointed"]]
            expected_s = finite(body["expected_s"], exclusive=True)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{source}: not what is known of a run: {type(error).__name__}: {error}") from None
        for problem, order in [RememberedOrder(believed, schedule), *known, *disappointed]:
            check(self._limits, order)
            _expect_alike(self._limits, problem, source)
        self.schedule, self._believed, self._samples, self._expected_s = schedule, believed, (believed,), expected_s
        self._known, self._disappointed = known, disappointed

    def _judge(self, step: int, trial: _Trial) -> list[SearchRequest | Swap]:
        """Judge the new order by its steps, if the world is still the one for which it was taken."""
        self._trial = None
        now_s, problem = _median_s(trial.timelines), as_measured(self._believed, trial.timelines)
        if largest_change(trial.problem, problem) > self.settings.change:
            return self._decide(step, problem, trial.timelines)
        brought, expected = 1 - now_s / trial.swap.before_s, 1 - trial.swap.expected_s / trial.swap.before_s
        self._log(step, "judge", measured_s=now_s, old_s=trial.swap.before_s, expected_gain=expected, gain=brought)
        samples = _samples(problem, trial.timelines)
        self._believe(problem, samples, now_s)
        # Half of the gain that justifies a swap is enough to keep it: measured steps vary, and going back costs a swap
        # too. An order that brought less is remembered as a disappointment in this world, so that neither the known
        # orders nor the next search propose it again; in another world it may still win.
        if brought < self.settings.gain / 2:
            self._disappointed = [*self._disappointed, RememberedOrder(problem, self.schedule)][-MAX_KNOWN:]
            why = f"it brought {format_percent(brought)} instead of {format_percent(expected)}"
            self._swap = Swap(trial.previous, why, now_s, trial.swap.before_s, is_step_back=True)
        else:  # a search may have found a better one meanwhile
            self._swap = self._swap_to_known(problem, samples, now_s, trial.swap.why)
        return [] if self._swap is None else [self._swap]

    def _swap_to_known(self, problem: Problem, samples: Sequence[Problem], now_s: float, why: str) -> Swap | None:
        """The swap to the best of the remembered orders, if it is worth it."""
        stays_s = mean_makespan_s(samples, self.schedule)
        others = {item.schedule.ranks: item.schedule for item in self._known}
        others.pop(self.schedule.ranks, None)
        tried = [schedule for schedule in others.values() if not self._has_disappointed(schedule, problem)]
        played = [(mean_makespan_s(samples, schedule), schedule) for schedule in tried]
        becomes_s, best = min(played, key=lambda pair: pair[0], default=(math.inf, None))
        if best is None or becomes_s > stays_s * (1 - self.settings.gain):
            return None
        return Swap(best, why, now_s, now_s * becomes_s / stays_s)

    def _has_disappointed(self, schedule: Schedule, problem: Problem) -> bool:
        return any(self._is_about(item, problem, schedule) for item in self._disappointed)

    def _is_about(self, known: RememberedOrder, problem: Problem, schedule: Schedule) -> bool:
        """True if it is the same order in about the same world."""
        same_order = known.schedule.ranks == schedule.ranks
        return same_order and largest_change(known.problem, problem) <= self.settings.change

    def _remember(self, problem: Problem, schedule: Schedule) -> None:
        others = [item for item in self._known if not self._is_about(item, problem, schedule)]
        self._known = [*others, RememberedOrder(problem, schedule)][-MAX_KNOWN:]

    def _believe(self, problem: Problem, samples: tuple[Problem, ...], now_s: float) -> None:
        self._believed, self._samples, self._expected_s = problem, samples, now_s
        self._odd.clear()

    def _reason(self, measured: Problem, now_s: float) -> str:
        """Describe the change."""
        change = largest_change(self._believed, measured)
        if change > self.settings.change:
            return f"something takes {format_percent(change, 0)} longer or shorter than assumed: {_links_of(measured)}"
        return f"steps take {format_seconds(now_s)}, expected {format_seconds(self._expected_s)}"

    def _too_little(self, search: SearchRequest, schedule: Schedule) -> str:
        if self._has_disappointed(schedule, search.problem):
            return "what it found was tried before and brought too little"
        gain = 1 - mean_makespan_s(search.samples, schedule) / mean_makespan_s(search.samples, self.schedule)
        return f"predicted gain {format_percent(gain)}, less than {format_percent(self.settings.gain)}"

    def _obstacle(self, schedule: Schedule) -> str | None:
        try:
            check(self._limits, schedule)
        except FarpipeError as error:
            return str(error).splitlines()[0]
        return None

    def _log(self, step: int, event: str, **facts: Any) -> None:
        self.events.append({"step": step, "event": event, **facts})


def mean_makespan_s(samples: Sequence[Problem], schedule: Schedule) -> float:
    """Mean time of steps in this order, which has been checked."""
    return fmean(simulate(sample, schedule, checked=True).makespan_s for sample in samples)


def _samples(measured: Problem, timelines: Sequence[Timeline]) -> tuple[Problem, ...]:
    return tuple(as_in_step(measured, timeline) for timeline in timelines[-MAX_SAMPLES:])


def _expect_alike(limits: Problem, problem: Problem, source: str) -> None:
    """InputError when `problem` is of another pipeline than the run's."""
    shapes = [
        (p.num_microbatches, [s.rank for s in p.stages], p.ranks, [*p.links], p.hops, p.collectives)
        for p in (limits, problem)
    ]
    if shapes[0] != shapes[1]:
        raise InputError(f"{source}: is of another pipeline")


def _median_s(timelines: Sequence[Timeline]) -> float:
    return median(timeline.makespan_s for timeline in timelines)


def _links_of(problem: Problem) -> str:
    shapes = [
        f"{name} {format_seconds(link.latency_s)}, {format_rate(link.bandwidth_bytes_per_s)}"
        for name, link in problem.links.items()
    ]
    return "; ".join(shapes[:MAX_LINKS_TOLD]) + (" ..." if len(shapes) > MAX_LINKS_TOLD else "")
