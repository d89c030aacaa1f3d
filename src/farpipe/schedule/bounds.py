"""Lower bounds: no schedule of a Problem can be faster. Each with the sketch of its proof."""

import numpy as np
from numpy.typing import NDArray

from farpipe.problem import Problem, Transfer


def lower_bound_s(problem: Problem) -> float:
    """The largest of the bounds below, seconds."""
    return max(*busiest_rank_bounds_s(problem), critical_path_s(problem), link_work_s(problem))


def busiest_rank_bounds_s(problem: Problem) -> tuple[float, float]:
    """A rank can't begin before its first input, and does one thing at a time.

    With all its work: it ends no earlier than head + F + I + W of everything it has. Without W: after its last I or B
    the gradient still has to go back through all earlier stages, however W is postponed: head + F + I + tail.
    """
    forward, inputs, weights = (problem.table(name) for name in ("forward_s", "input_grad_s", "weight_grad_s"))
    head, tail = _heads_s(problem), _tails_s(problem)
    everything, without_weights = 0.0, 0.0
    for stages in problem.stages_of_rank:
        mine = list(stages)
        if mine:
            first, last = head[mine].min(), tail[mine].min()
            work = float((forward[mine] + inputs[mine]).sum())
            everything = max(everything, first + work + float(weights[mine].sum()))
            without_weights = max(without_weights, first + work + last)
    return everything, without_weights


def critical_path_s(problem: Problem) -> float:
    """One microbatch through all stages and back, with every message on its way alone, and the W of stage 0."""
    forward, inputs, weights = (problem.table(name) for name in ("forward_s", "input_grad_s", "weight_grad_s"))
    way = (forward + inputs).sum(axis=0) + weights[0]
    for index in range(problem.num_stages - 1):
        way = way + _travel_s(problem, index, "forward") + _travel_s(problem, index, "backward")
    return float(way.max())


def link_work_s(problem: Problem) -> float:
    """A link carries one message at a time: the sum of what all of them occupy it."""
    busy = dict.fromkeys(problem.links, 0.0)
    for place, transfer in problem.transfers():
        if place.startswith("hops") and _is_free(problem, int(place[5 : place.index("]")])):
            continue
        names = [transfer.link] if isinstance(transfer.link, str) else transfer.link
        rows = problem.row(transfer.bytes) if place.startswith("hops") else np.array([transfer.bytes])
        for name in dict.fromkeys(names):
            share = rows if isinstance(transfer.link, str) else rows[np.array(names) == name]
            busy[name] += float(share.sum()) / problem.links[name].bandwidth_bytes_per_s
    return max(busy.values(), default=0.0)


def _heads_s(problem: Problem) -> NDArray[np.float64]:
    """Per stage the earliest that any forward can start: [num_stages]."""
    forward = problem.table("forward_s")
    reach = np.zeros((problem.num_stages, problem.num_microbatches))
    for index in range(problem.num_stages - 1):
        reach[index + 1] = reach[index] + forward[index] + _travel_s(problem, index, "forward")
    return np.asarray(reach.min(axis=1))


def _tails_s(problem: Problem) -> NDArray[np.float64]:
    """Per stage the least time from the end of any I to the end of the step: [num_stages]."""
    inputs, weights = problem.table("input_grad_s"), problem.table("weight_grad_s")
    rest = np.zeros((problem.num_stages, problem.num_microbatches))
    rest[0] = weights[0]
    for index in range(1, problem.num_stages):
        rest[index] = rest[index - 1] + inputs[index - 1] + _travel_s(problem, index - 1, "backward")
    return np.asarray(rest.min(axis=1))


def _is_free(problem: Problem, index: int) -> bool:
    return problem.stages[index].rank == problem.stages[index + 1].rank


def _travel_s(problem: Problem, index: int, way: str) -> NDArray[np.float64]:
    """Latency and bytes/bandwidth of a hop's messages: [num_microbatches]."""
    hop = problem.hops[index]
    transfer: Transfer | None = getattr(hop, way) if hop is not None else None
    if transfer is None or _is_free(problem, index):
        return np.zeros(problem.num_microbatches)
    names = (transfer.link,) if isinstance(transfer.link, str) else transfer.link
    links = [problem.links[name] for name in names]
    bandwidth = np.array([link.bandwidth_bytes_per_s for link in links])
    return np.asarray(problem.row(transfer.bytes) / bandwidth + np.array([link.latency_s for link in links]))
