"""Measured Timeline of a pipeline's step from the traces of its ranks, whose actions are named as torch names them.

torch.distributed.pipelining's runtime annotates every action as ``PP:`` and the action's text (``PP:0F3``). An action
is its computation: from its first operation to its last, or of its kernels where a GPU is in the trace, so that waiting
for a message inside the annotation is not counted; one without any, such as I of torch's first stage, takes no time.
Traces hold no arrival of a message; it is taken as the start of the action that needs it, the latest that it can be.
"""

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.simulate.events import ACTION_DTYPE, makers, users
from farpipe.core.step import KINDS, Action, Problem, Schedule
from farpipe.core.strict import shaped
from farpipe.interop.trace_files import Span, Trace

_NAME: Final = re.compile(r"PP:(\d+[FIWB]\d+)")
_COMPUTES: Final = ("aten::", "autograd::")
_NOT_COMPUTING: Final = re.compile("nccl", re.IGNORECASE)
Stamps = dict[Action, list[tuple[float, float]]]
"""Start and end of every occurrence of an action, one a step."""


class TracedStep(NamedTuple):
    """A step as traces show it, and notes on what they could not say."""

    timeline: Timeline
    notes: tuple[str, ...]


def timeline_of(traces: Sequence[Trace], problem: Problem, schedule: Schedule) -> TracedStep:
    """The traced step whose makespan is the median; of several processes of one rank the last counts.

    InputError where an action is in no trace.
    """
    zero_s = min(trace.epoch_s for trace in traces)
    found: Stamps = {}
    for trace in traces:
        with shaped(trace.source, "a trace of a pipeline's rank"):
            _merge(found, _stamps(trace, trace.epoch_s - zero_s))
    _expect_all(found, problem, [trace.source for trace in traces])
    num_steps = min(map(len, found.values()))
    order = simulate(problem, schedule)
    steps = [_timeline(order, problem, found, step) for step in range(num_steps)]
    steps.sort(key=lambda step: step.timeline.makespan_s)
    chosen = steps[(num_steps - 1) // 2]
    return chosen._replace(notes=(f"the traced step is one of {num_steps}, the median", *chosen.notes))


def _stamps(trace: Trace, offset_s: float) -> Stamps:
    """Computation of every annotated action in one trace, in the order of the steps."""
    spans = _computing(trace)
    starts = [start for start, _ in spans]
    found: Stamps = defaultdict(list)
    for note in trace.notes:
        if name := _NAME.fullmatch(note.name):
            inside = spans[bisect.bisect_left(starts, note.start_s) : bisect.bisect(starts, note.end_s)]
            begin, end = _reach(trace, inside) or (note.end_s, note.end_s)
            found[Action.parse(name[1])].append((begin + offset_s, end + offset_s))
    return found


def _computing(trace: Trace) -> list[tuple[float, Span]]:
    """Operations, or launches of kernels where there are any, by start; without those that communicate."""
    if trace.kernels:
        spans: Iterable[Span] = (span for of_thread in trace.launches.values() for span in of_thread)
    else:
        spans = (span for span in trace.operations if span.name.startswith(_COMPUTES))
    return sorted(((span.start_s, span) for span in spans), key=lambda pair: pair[0])


def _reach(trace: Trace, inside: Sequence[tuple[float, Span]]) -> tuple[float, float] | None:
    """First start and last end; of the kernels, where launches are given."""
    spans = [span for _, span in inside]
    if trace.kernels:
        numbers = (span.arguments.get("correlation") for span in spans)
        kernels = (trace.kernels[number] for number in numbers if number in trace.kernels)
        spans = [kernel for kernel in kernels if not _NOT_COMPUTING.search(kernel.name)]
    return (min(span.start_s for span in spans), max(span.end_s for span in spans)) if spans else None


def _merge(found: Stamps, more: Stamps) -> None:
    """Join the stamps of another process: of two of one rank the later start and the later end count."""
    for action, stamps in more.items():
        known = found.setdefault(action, stamps)
        if known is not stamps:
            found[action] = [(max(a[0], b[0]), max(a[1], b[1])) for a, b in zip(known, stamps, strict=False)]


def _expect_all(found: Stamps, problem: Problem, sources: Sequence[str]) -> None:
    where = ", ".join(dict.fromkeys(sources))
    if not found:
        raise InputError(
            f"{where}: no action of a pipeline is named; torch's pipeline runtime names them, other code can with "
            'torch.profiler.record_function("PP:0F3") around the forward of microbatch 3 on stage 0 (backward: B, or I '
            "and W)"
        )
    for stage in range(problem.num_stages):
        for microbatch in range(problem.num_microbatches):
            kinds = {kind for kind in KINDS if Action(stage, kind, microbatch) in found}
            if "F" not in kinds or not ("B" in kinds or {"I", "W"} <= kinds):
                raise InputError(
                    f"{where}: stage {stage} has no whole forward and backward of microbatch {microbatch}; give the "
                    f"traces of all {problem.num_ranks} ranks of the pipeline, and a job with its microbatches"
                )


def _timeline(order: Timeline, problem: Problem, found: Stamps, step: int) -> TracedStep:
    rows = [
        (problem.stages[at.stage].rank, at.stage, KINDS.index(at.kind), at.microbatch, *stamps[step])
        for at, stamps in found.items()
        if at.stage < problem.num_stages and at.microbatch < problem.num_microbatches
    ]
    actions = np.array(rows, ACTION_DTYPE)
    messages = order.messages[order.messages["microbatch"] >= 0].copy()
    traced = replace(order, source="measured", actions=actions, messages=messages)
    maker, user = makers(traced), users(traced)
    notes = _align(problem, actions, messages, maker, user)
    actions["end_s"] -= actions["start_s"].min()
    actions["start_s"] -= actions["start_s"].min()
    occupied = messages["end_s"] - messages["start_s"]
    messages["ready_s"] = messages["start_s"] = actions["end_s"][maker]
    messages["arrival_s"] = np.maximum(messages["ready_s"], actions["start_s"][user])
    messages["end_s"] = np.minimum(messages["start_s"] + occupied, messages["arrival_s"])
    actions = np.sort(actions, order=("rank", "start_s"))
    return TracedStep(replace(traced, actions=actions), notes)


def _align(
    problem: Problem,
    actions: NDArray[np.void],
    messages: NDArray[np.void],
    maker: NDArray[np.intp],
    user: NDArray[np.intp],
) -> tuple[str, ...]:
    """Shift the clocks of ranks at which messages would arrive before they were sent; notes on that.

    The shift makes the shortest gaps of both directions equal, as clocks are compared by round trips.
    """
    aligned, notes = {problem.stages[0].rank}, list[str]()
    for stage, rank in enumerate(stage.rank for stage in problem.stages[1:]):
        if rank in aligned:
            continue
        aligned.add(rank)
        gaps = actions["start_s"][user] - actions["end_s"][maker]
        forward, backward = (
            gaps[(messages["kind"] == kind) & (messages["stage"] == stage + kind)].min() for kind in (0, 1)
        )
        if min(forward, backward) < 0:
            shift_s = (backward - forward) / 2
            for end in ("start_s", "end_s"):
                actions[end][actions["rank"] == rank] += shift_s
            notes.append(
                f"the clock of rank {rank} was shifted by {shift_s * 1e3:+.3g} ms, for its messages came early"
            )
    return tuple(notes)
