"""Lower bounds: no schedule of a Problem can be faster. Each with the sketch of its proof."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.problem import Problem, Transfer

ROUNDING: Final = 1e-12


def lower_bound_s(problem: Problem) -> float:
    """The largest of the bounds below, seconds; a hair less, for sums in another order round differently."""
    simple = max(*busiest_rank_bounds_s(problem), critical_path_s(problem), link_work_s(problem))
    return max(simple, relaxation_s(problem)) * (1 - ROUNDING)


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


def relaxation_s(problem: Problem) -> float:
    """Every rank alone, given the earliest start and the least rest of all its actions.

    Number the actions of one stage and kind in the order in which they happen. Then the i-th F of a stage follows the
    i - 1 before it and, as i microbatches must have come through, the i-th F of the stage before; the i-th I likewise;
    and where K microbatches fit memory, the i-th F waits for the (i - K)-th release, whichever those are: that makes
    one round trip per K microbatches. So longest paths through these numbers (the least durations of any microbatch
    taken) bound every start, the same backwards in time every rest, and the best interruptible order of one rank's
    actions between those bounds the step (Carlier's and Jackson's bound for one machine).
    """
    from farpipe.schedule import bound_kernel  # here, for numba takes a third of a second to import

    names = ("forward_s", "input_grad_s", "weight_grad_s")
    durations = np.stack([problem.table(name).min(axis=1) for name in names])
    travel = np.zeros((2, problem.num_stages))
    for index in range(problem.num_stages - 1):
        travel[0, index] = _travel_s(problem, index, "forward").min()
        travel[1, index + 1] = _travel_s(problem, index, "backward").min()
    limits: tuple[Any, ...] = (_windows(problem), problem.num_microbatches)
    head = bound_kernel.heads(durations, travel, _collectives_s(problem, "gather"), *limits)
    tail = bound_kernel.tails(durations, travel, _collectives_s(problem, "reduce"), *limits)
    ranks = [np.array(stages, np.int64) for stages in problem.stages_of_rank if stages]
    return max(float(bound_kernel.one_machine(head, tail, durations, stages)) for stages in ranks)


def _windows(problem: Problem) -> NDArray[np.int64]:
    """[2, S]: at most how many microbatches fit between F and the end of I, and between F and the end of W."""
    most = np.full((2, problem.num_stages), problem.num_microbatches, np.int64)
    held = problem.table("activation_bytes").min(axis=1)
    kept = np.minimum(held, problem.table("weight_stash_bytes").min(axis=1))
    for index, stage in enumerate(problem.stages):
        memory_bytes, static_bytes = problem.ranks[stage.rank].memory_bytes, problem.ranks[stage.rank].static_bytes
        for row, size in enumerate((held[index], kept[index])):
            if memory_bytes is not None and size > 0:
                room = max((memory_bytes * (1 + 1e-9) - static_bytes) / size, 1.0)
                most[row, index] = min(problem.num_microbatches, int(room * (1 + 1e-9)))
    return most


def _collectives_s(problem: Problem, kind: str) -> NDArray[np.float64]:
    """Per stage how long its gather or reduce takes, alone on its link: [num_stages]."""
    found = np.zeros(problem.num_stages)
    for index, sync in enumerate(problem.sync or ()):
        transfer: Transfer | None = getattr(sync, kind) if sync is not None else None
        if transfer is not None:
            assert isinstance(transfer.link, str)
            link = problem.links[transfer.link]
            found[index] = problem.row(transfer.bytes)[0] / link.bandwidth_bytes_per_s + link.latency_s
    return found


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
