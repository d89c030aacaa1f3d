"""A Problem as measured: durations of stages, latency and rate of links, estimated from the Timelines of some steps.

Medians and absolute errors throughout, so that a slow moment of a machine or a lost packet changes nothing.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.simulate import Timeline
from farpipe.core.step import KINDS, Kind, Link, Problem, Stage
from farpipe.core.step.codes import B
from farpipe.core.step.links import free_again_s

RATES_TRIED: Final = 2.0 ** np.linspace(-8, 8, 65)
"""Multiples of the believed rate, that itself among them."""
NUM_REFINEMENTS: Final = 3
SURE_S: Final = 2e-4
"""Mean errors that differ by less tell nothing: it is about what clocks and schedulers of operating systems add."""
SURE_RATIO: Final = 0.02
BELIEVABLE_RATIO: Final = 8.0
"""A sender that measured more than this multiple of the believed rate measured its own buffers."""
_LEAST_S: Final = 1e-9
_DURATION_DTYPE: Final = np.dtype([("microbatch", "i8"), ("seconds", "f8")])
_FIGURES: Final[dict[Kind, str]] = {"F": "forward_s", "I": "input_grad_s", "W": "weight_grad_s"}


def as_measured(problem: Problem, window: Sequence[Timeline]) -> Problem:
    """`problem` with the durations and links that the Timelines in `window` show; bytes and memory stay.

    What was not measured, and what the measurements can't tell, stays as it is. Where replicas are staggered on a link,
    the Timelines have to show the messages of all of them.
    """
    stages = tuple(_measured_stage(problem, number, window) for number in range(problem.num_stages))
    links = {name: _measured_link(link, name, window) for name, link in problem.links.items()}
    return replaced(problem, stages=stages, links=links)


def as_in_step(measured: Problem, timeline: Timeline) -> Problem:
    """`measured` with every action as long as it was in this step, which tells orders that need luck from robust ones.

    Actions go by stage, kind and microbatch, so another order can be played with them; where the step had B, I and W
    share what it took.
    """
    figures = [measured.table(figure) for figure in _FIGURES.values()]
    table = np.stack([*figures, figures[1] + figures[2]])
    actions, ratios = timeline.actions, np.ones(table.shape)
    place = actions["kind"], actions["stage"], actions["microbatch"]
    expected = np.where(table[place] > 0, table[place], 1.0)
    ratios[place] = np.where(table[place] > 0, (actions["end_s"] - actions["start_s"]) / expected, 1.0)
    joined = actions[actions["kind"] == B]
    where = joined["stage"], joined["microbatch"]
    ratios[1][where] = ratios[2][where] = ratios[3][where]
    seconds = np.maximum(table * ratios, 0.0)
    stages = tuple(
        stage.model_copy(
            update={figure: tuple(seconds[i, number].tolist()) for i, figure in enumerate(_FIGURES.values())}
        )
        for number, stage in enumerate(measured.stages)
    )
    return replaced(measured, stages=stages)


def replaced(problem: Problem, **fields: Any) -> Problem:
    """`problem` with other `fields`, checked again."""
    return Problem.model_validate({name: getattr(problem, name) for name in Problem.model_fields} | fields)


def _measured_stage(problem: Problem, number: int, window: Sequence[Timeline]) -> Stage:
    stage = problem.stages[number]
    seconds: dict[str, NDArray[np.void]] = {kind: _durations(window, number, kind) for kind in KINDS}
    believed: dict[str, NDArray[np.float64]] = {
        kind: problem.row(getattr(stage, figure)) for kind, figure in _FIGURES.items()
    }
    believed["B"] = believed["I"] + believed["W"]
    ratios: dict[str, float] = {kind: _ratio(seconds[kind], believed[kind]) for kind in KINDS}
    changes: dict[str, Any] = {}
    for kind, figure in _FIGURES.items():
        measured = kind if len(seconds[kind]) or kind == "F" else "B"
        if not len(seconds[measured]):
            continue
        if believed[measured].max() > 0:
            changes[figure] = _scaled(getattr(stage, figure), ratios[measured])
        elif measured == kind:
            changes[figure] = float(np.median(seconds[kind]["seconds"]))
    return stage.model_copy(update=changes)


def _durations(window: Sequence[Timeline], stage: int, kind: Kind) -> NDArray[np.void]:
    """(microbatch, seconds) of every such action."""
    found = [np.empty(0, _DURATION_DTYPE)]
    for timeline in window:
        is_such = (timeline.actions["stage"] == stage) & (timeline.actions["kind"] == KINDS.index(kind))
        actions = timeline.actions[is_such]
        rows = np.empty(len(actions), _DURATION_DTYPE)
        rows["microbatch"], rows["seconds"] = actions["microbatch"], actions["end_s"] - actions["start_s"]
        found.append(rows)
    return np.concatenate(found)


def _ratio(measured: NDArray[np.void], believed: NDArray[np.float64]) -> float:
    """Return the ratio of the actions' times to the believed ones; 1 if the difference is too small to tell anything.

    Stages that are believed to be alike then stay so: a search finds better orders for them, and often proves it.
    """
    expected = believed[measured["microbatch"]]
    seconds, expected = measured["seconds"][expected > 0], expected[expected > 0]
    if not len(expected) or abs(np.median(seconds - expected)) <= max(SURE_S, SURE_RATIO * np.median(expected)):
        return 1.0
    return float(np.median(seconds / expected))


def _scaled(value: float | tuple[float, ...], ratio: float) -> float | tuple[float, ...]:
    return tuple(item * ratio for item in value) if isinstance(value, tuple) else value * ratio


class Passages(NamedTuple):
    """The messages of one step on one link, in the order in which they became ready."""

    ready_s: NDArray[np.float64]
    arrival_s: NDArray[np.float64]
    bytes: NDArray[np.float64]
    on_link_s: NDArray[np.float64]
    """Time of each on the link as its sender saw it: too short where buffers took it in."""


def _measured_link(believed: Link, name: str, window: Sequence[Timeline]) -> Link:
    steps = [passages(timeline, name) for timeline in window]
    return fit_link(believed, [step for step in steps if len(step.bytes)])


def passages(timeline: Timeline, link: str) -> Passages:
    """A Timeline's messages over `link`; collectives, which may be many messages in one, are left out."""
    place = timeline.links.index(link) if link in timeline.links else -2
    messages = timeline.messages[(timeline.messages["link"] == place) & (timeline.messages["microbatch"] >= 0)]
    messages = messages[np.argsort(messages["ready_s"], kind="stable")]
    on_link_s = messages["end_s"] - messages["start_s"]
    return Passages(messages["ready_s"], messages["arrival_s"], messages["bytes"], on_link_s)


def fit_link(believed: Link, steps: Sequence[Passages]) -> Link:
    """The latency and rate that explain best when messages arrived, given when they were ready.

    For a rate, the queue of the link says when each message has left; the latency is then the median of what is left
    until its arrival. The best rates have the smallest errors. Several may be as good: messages of one size that never
    wait for each other tell only the sum of both times. Then the senders' own stamps decide if they are believable, and
    if not, the rate stays as near to the believed one as it can.
    """
    if not steps:
        return believed
    rate = believed.bandwidth_bytes_per_s
    seen = _seen_by_senders(steps)
    tried = {r: _fit_latency(r, steps)[1] for r in [*(rate * RATES_TRIED).tolist(), *([seen] if seen else [])]}
    for _ in range(NUM_REFINEMENTS):
        rates = sorted(tried)
        best = rates.index(min(rates, key=lambda r: tried[r]))
        around = rates[max(best - 1, 0)], rates[min(best + 1, len(rates) - 1)]
        # An odd number of parts: a rate in the middle would be the best again but for rounding, and hide its neighbour.
        tried |= {r: _fit_latency(r, steps)[1] for r in np.geomspace(*around, 8)[1:-1].tolist()}
    least = min(tried.values())
    good = [r for r, error in tried.items() if error <= least + max(SURE_S, SURE_RATIO * least)]
    if seen is not None and seen in good and seen <= BELIEVABLE_RATIO * rate:
        rate = seen
    else:
        rate = min(good, key=lambda r: abs(math.log(r / rate)))
    return believed.model_copy(update={"latency_s": _fit_latency(rate, steps)[0], "bandwidth_bytes_per_s": rate})


def _seen_by_senders(steps: Sequence[Passages]) -> float | None:
    """Bytes per second of the median message while it was on the link."""
    size, seconds = (np.concatenate([getattr(step, name) for step in steps]) for name in ("bytes", "on_link_s"))
    rates = size[(seconds > 0) & (size > 0)] / seconds[(seconds > 0) & (size > 0)]
    return float(np.median(rates)) if len(rates) else None


def _fit_latency(rate: float, steps: Sequence[Passages]) -> tuple[float, float]:
    """The latency in seconds that fits a rate, and the mean absolute error that remains."""
    left_over = np.concatenate([step.arrival_s - _departures(step, rate) for step in steps])
    latency_s = max(0.0, float(np.median(left_over)))
    return latency_s, float(np.abs(left_over - latency_s).mean())


def _departures(step: Passages, rate: float) -> NDArray[np.float64]:
    """Times at which the messages have left a link of this rate."""
    return free_again_s(step.ready_s, step.bytes / rate)


def largest_change(before: Problem, after: Problem) -> float:
    """Relative difference of durations and times of links: 0.5 where something takes half as long again.

    Of a link counts the time of its largest message, latency included, and at most the difference as a part of the
    longest action: what is nothing to the computation is no change.
    """
    links = [
        (_message_s(before.links[name], size), _message_s(after.links[name], size)) for name, size in _largest(before)
    ]
    return float(np.abs(_changes(before, after.stages, links)).max(initial=0.0))


def deviations(believed: Problem, timeline: Timeline) -> NDArray[np.float64]:
    """Estimate `largest_change` from one step, at little cost: [num_stages + num_links], above 0 for longer times.

    A link is judged by the rate that it is believed to have, so a message's time is known better than its cause.
    """
    stages = [_measured_stage(believed, number, [timeline]) for number in range(believed.num_stages)]
    links = []
    for name, size in _largest(believed):
        link, seen = believed.links[name], passages(timeline, name)
        believed_s = _message_s(link, size)
        if not len(seen.bytes):
            links.append((believed_s, believed_s))
            continue
        late_s = float(np.median(seen.arrival_s - _departures(seen, link.bandwidth_bytes_per_s))) - link.latency_s
        links.append((believed_s, max(believed_s + late_s, _LEAST_S)))
    return _changes(believed, stages, links)


def _changes(before: Problem, stages: Sequence[Stage], links: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    """[num_stages + num_links], signed; `links` as seconds of the largest message before and after."""
    totals = [
        [sum(float(before.row(getattr(s, figure)).mean()) for figure in _FIGURES.values()) for s in pair]
        for pair in zip(before.stages, stages, strict=True)
    ]
    longest = max(float(before.table(figure).max()) for figure in _FIGURES.values())
    found = [_relative(*pair) for pair in totals]
    for old_s, new_s in links:
        most = abs(new_s - old_s) / longest if longest else math.inf
        found.append(math.copysign(min(abs(_relative(old_s, new_s)), most), new_s - old_s))
    return np.array(found)


def _largest(problem: Problem) -> list[tuple[str, float]]:
    """Every link with the bytes of its largest message."""
    sizes: dict[str, float] = dict.fromkeys(problem.links, 0.0)
    for _, transfer in problem.transfers():
        for name in {transfer.link} if isinstance(transfer.link, str) else set(transfer.link):
            sizes[name] = max(sizes[name], float(np.max(transfer.bytes)))
    return [*sizes.items()]


def _message_s(link: Link, size: float) -> float:
    return link.travel_s(size)


def _relative(old: float, new: float) -> float:
    """0.5 for half as long again, -0.5 for the change back."""
    if old == new:
        return 0.0
    change = max(old, new) / min(old, new) - 1 if min(old, new) > 0 else math.inf
    return math.copysign(change, new - old)
