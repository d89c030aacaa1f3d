"""When to look for another order while a run goes on, whether to take it, and whether it brought what was expected.

Decisions only: Timelines in, requests and proposals out. Clocks, processes and files are somebody else's.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from farpipe.errors import FarpipeError
from farpipe.plan.measured import as_measured, largest_change
from farpipe.problem import Problem
from farpipe.schedule import Schedule, check
from farpipe.simulate import Timeline, simulate
from farpipe.spec.replanning import ReplanSettings
from farpipe.units import format_rate, format_seconds

Event = dict[str, Any]
"""What is logged: ``step``, ``event`` and what belongs to it."""


MAX_LINKS_TOLD: Final = 4
MAX_KNOWN: Final = 8
"""Orders that are remembered for when the world is again as it was."""


@dataclass(frozen=True)
class Search:
    """An order is to be sought for `problem`, beside the run."""

    step: int
    why: str
    problem: Problem


@dataclass(frozen=True)
class Swap:
    """All ranks are to go over to `schedule`, as soon as they can."""

    schedule: Schedule
    why: str
    before_s: float
    """What a step takes now, measured."""
    expected_s: float
    is_step_back: bool = False


@dataclass
class _Trial:
    """A new order that has to prove itself."""

    swap: Swap
    previous: Schedule
    problem: Problem
    """What the swap was decided on."""
    makespans_s: list[float] = field(default_factory=list)


class Replanner:
    """Watches the steps of a run. `events` collects what happened, for the log."""

    def __init__(self, problem: Problem, schedule: Schedule, settings: ReplanSettings) -> None:
        self.schedule, self.settings = schedule, settings
        self.events: list[Event] = []
        self._limits, self._believed = problem, problem
        self._known = [(problem, schedule)]
        """Orders that were sought, each with what it was sought for."""
        self._expected_s = simulate(problem, schedule).makespan_s
        self._window: deque[Timeline] = deque(maxlen=settings.window_steps)
        self._search: Search | None = None
        self._swap: Swap | None = None
        self._trial: _Trial | None = None
        self._first_step, self._rest_until = 0, 0

    def observe(self, step: int, timeline: Timeline) -> Search | Swap | None:
        """A measured step; a search to begin, or an order to go back to."""
        if step < self._first_step:
            return None
        self._window.append(timeline)
        if self._trial is not None:
            return self._judge(step, timeline)
        if len(self._window) < self.settings.window_steps or self._search or self._swap or step < self._rest_until:
            return None
        why = self._reason()
        if why is None:
            return None
        measured = self._measured()
        self._swap = self._swap_to_known(measured, why)
        if self._swap is not None:
            self._believed = measured
            return self._swap
        self._search = Search(step, why, measured)
        self._log(step, "search", why=why, measured_s=self._median_s(), expected_s=self._expected_s)
        return self._search

    def _swap_to_known(self, measured: Problem, why: str) -> Swap | None:
        """To an order that was sought for about the same world before, if it is worth it: no search is needed."""
        for problem, schedule in reversed(self._known):
            if schedule != self.schedule and largest_change(problem, measured) <= self.settings.change:
                stays_s, becomes_s = (simulate(measured, order).makespan_s for order in (self.schedule, schedule))
                if becomes_s <= stays_s * (1 - self.settings.gain):
                    before_s = self._median_s()
                    return Swap(schedule, f"{why}; known from before", before_s, before_s * becomes_s / stays_s)
        return None

    def found(self, step: int, schedule: Schedule | None) -> Swap | None:
        """What the search has found (None: nothing); an order to go over to if it is worth it."""
        search, self._search = self._search, None
        assert search is not None
        self._believed = search.problem
        before_s = self._median_s()
        stays_s = simulate(search.problem, self.schedule).makespan_s
        obstacle = "the search found nothing" if schedule is None else self._obstacle(schedule)
        becomes_s = stays_s
        if schedule is not None and obstacle is None:
            becomes_s = simulate(search.problem, schedule).makespan_s
            if becomes_s > stays_s * (1 - self.settings.gain):
                obstacle = f"predicted gain {1 - becomes_s / stays_s:.1%}, less than {self.settings.gain:.1%}"
        if schedule is None or obstacle is not None:
            self._expected_s = before_s
            self._rest_until = step + self.settings.pause_steps
            self._log(step, "stay", why=obstacle)
            return None
        self._known = [*self._known, (search.problem, schedule)][-MAX_KNOWN:]
        self._swap = Swap(schedule, search.why, before_s, before_s * becomes_s / stays_s)
        return self._swap

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
        self._window.clear()

    def _judge(self, step: int, timeline: Timeline) -> Swap | None:
        """After enough steps: what the new order brought, compared with the old one in the world as it is now."""
        trial = self._trial
        assert trial is not None
        trial.makespans_s.append(timeline.makespan_s)
        if len(trial.makespans_s) < self.settings.watch_steps:
            return None
        self._trial = None
        now_s, problem = median(trial.makespans_s), self._measured()
        old_s = trial.swap.before_s
        if largest_change(trial.problem, problem) > self.settings.change:  # it is not the same world any more
            old_s = simulate(problem, trial.previous).makespan_s
        brought, expected = 1 - now_s / old_s, 1 - trial.swap.expected_s / trial.swap.before_s
        self._log(step, "judge", measured_s=now_s, old_s=old_s, expected_gain=expected, gain=brought)
        self._expected_s, self._believed = now_s, problem
        if brought >= self.settings.gain / 2:
            return None
        why = f"it brought {brought:.1%} instead of {expected:.1%}"
        self._swap = Swap(trial.previous, why, now_s, old_s, is_step_back=True)
        return self._swap

    def _reason(self) -> str | None:
        """Why an order should be sought now, if it should."""
        ratios = [timeline.makespan_s / self._expected_s for timeline in self._window]
        if min(ratios) > 1 + self.settings.drift or max(ratios) < 1 - self.settings.drift:
            return f"steps take {format_seconds(self._median_s())}, expected {format_seconds(self._expected_s)}"
        if max(ratios) > min(ratios) * (1 + self.settings.drift):
            return None  # something is going on; wait until it is over
        measured = self._measured()
        change = largest_change(self._believed, measured)
        if change > self.settings.change:
            return f"something takes {change:.0%} longer or shorter than assumed: {_links_of(measured)}"
        return None

    def _measured(self) -> Problem:
        return as_measured(self._believed, self._window)

    def _median_s(self) -> float:
        return median(timeline.makespan_s for timeline in self._window) if self._window else self._expected_s

    def _obstacle(self, schedule: Schedule) -> str | None:
        try:
            check(self._limits, schedule)
        except FarpipeError as error:
            return str(error).splitlines()[0]
        return None

    def _log(self, step: int, event: str, **facts: Any) -> None:
        self.events.append({"step": step, "event": event, **facts})


def _links_of(problem: Problem) -> str:
    shapes = [
        f"{name} {format_seconds(link.latency_s)}, {format_rate(link.bandwidth_bytes_per_s)}"
        for name, link in problem.links.items()
    ]
    return "; ".join(shapes[:MAX_LINKS_TOLD]) + (" ..." if len(shapes) > MAX_LINKS_TOLD else "")
