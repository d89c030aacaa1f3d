"""A Problem as flat arrays: what the compiled kernel reads besides the codes of a Schedule."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.simulate.timeline import MESSAGE_KINDS
from farpipe.step import Problem, Transfer

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

NOTHING: Final = -2
"""Instead of a link: nothing is sent (behind the last stage, before the first)."""
FREE: Final = -1
"""Instead of a link: the tensor is there at once (same rank, or a hop that costs nothing)."""

FORWARD, BACKWARD, GATHER, REDUCE = range(len(MESSAGE_KINDS))


@dataclass(frozen=True)
class StepArrays:
    """A Problem as arrays; first axes: kind (of action or message), stage, microbatch."""

    duration_s: Floats
    """[4, S, M] by place in KINDS."""
    rank_of_stage: Ints
    """[S]"""
    link: Ints
    """[2, S, M]: the link of the message that stage s sends forward or backward, or FREE, or NOTHING."""
    transfer_s: Floats
    """[2, S, M]: how long it occupies the link, the other replicas' turns included."""
    sync_link: Ints
    """[2, S]: the link of the gather and the reduce of a stage, or NOTHING."""
    sync_s: Floats
    """[2, S]: how long they occupy it."""
    latency_s: Floats
    """[L]: from when a message leaves its link free until it arrives; below zero where others' turns take longer."""
    pause_s: Floats
    """[L]: the part of `transfer_s` and `sync_s` that is the other replicas' turns."""
    lag_s: float
    """When the first action can begin."""
    bytes: Floats
    """[2, S, M] per message."""
    sync_bytes: Floats
    """[2, S] per collective."""
    shared: NDArray[np.bool_]
    """[L]: whether messages may become ready out of the order in which one rank makes them."""
    num_ranks: int


def lower(problem: Problem) -> StepArrays:
    """The arrays of `problem`."""
    forward, input_grad, weight_grad = map(problem.table, ("forward_s", "input_grad_s", "weight_grad_s"))
    shape = (2, problem.num_stages, problem.num_microbatches)
    link, size, seconds = np.full(shape, NOTHING, np.int32), np.zeros(shape), np.zeros(shape)
    for index, hop in enumerate(problem.hops):
        same_rank = problem.stages[index].rank == problem.stages[index + 1].rank
        for kind, stage in ((FORWARD, index), (BACKWARD, index + 1)):
            transfer = None if hop is None or same_rank else (hop.forward, hop.backward)[kind]
            link[kind, stage], size[kind, stage], seconds[kind, stage] = _transfer_rows(problem, transfer)
    sync_link, sync_bytes, sync_s = _lower_sync(problem)
    pause_s = np.array([problem.pause_s(name) for name in problem.links], np.float64)
    latency_s = np.array([spec.latency_s for spec in problem.links.values()], np.float64)
    duration_s = np.stack([forward, input_grad, weight_grad, input_grad + weight_grad])
    rank_of_stage = np.array([stage.rank for stage in problem.stages], np.int32)
    return StepArrays(
        duration_s=duration_s,
        rank_of_stage=rank_of_stage,
        link=link,
        transfer_s=seconds,
        sync_link=sync_link,
        sync_s=sync_s,
        latency_s=latency_s - pause_s,
        pause_s=pause_s,
        lag_s=problem.lag_s,
        bytes=size,
        sync_bytes=sync_bytes,
        shared=_shared(rank_of_stage, link, sync_link, duration_s, len(problem.links)),
        num_ranks=problem.num_ranks,
    )


def _transfer_rows(problem: Problem, transfer: Transfer | None) -> tuple[Ints | int, Floats | float, Floats | float]:
    """(link, bytes, seconds) per microbatch of one hop's direction."""
    if transfer is None:
        return FREE, 0.0, 0.0
    place = {name: index for index, name in enumerate(problem.links)}
    names = (transfer.link,) if isinstance(transfer.link, str) else transfer.link
    bandwidth = np.array([problem.links[name].bandwidth_bytes_per_s for name in names])
    pause_s = np.array([problem.pause_s(name) for name in names])
    size = problem.row(transfer.bytes)
    return np.array([place[name] for name in names], np.int32), size, size / bandwidth + pause_s


def _lower_sync(problem: Problem) -> tuple[Ints, Floats, Floats]:
    shape = (2, problem.num_stages)
    link, size, seconds = np.full(shape, NOTHING, np.int32), np.zeros(shape), np.zeros(shape)
    for stage, sync in enumerate(problem.sync or ()):
        for row, transfer in enumerate((sync.gather, sync.reduce) if sync else ()):
            if transfer is not None:
                links, sizes, times = _transfer_rows(problem, transfer)
                link[row, stage] = np.ravel(links)[0]
                size[row, stage], seconds[row, stage] = np.ravel(sizes)[0], np.ravel(times)[0]
    return link, size, seconds


def _shared(rank_of_stage: Ints, link: Ints, sync_link: Ints, duration_s: Floats, num_links: int) -> NDArray[np.bool_]:
    """Links that several ranks feed, and those of stages with empty actions, whose messages can be ready together."""
    feeders: list[set[int]] = [set() for _ in range(num_links)]
    shared = np.zeros(num_links, np.bool_)
    for stage, rank in enumerate(rank_of_stage):
        used = np.unique(np.concatenate([link[:, stage].ravel(), sync_link[:, stage]]))
        for name in used[used >= 0]:
            feeders[name].add(int(rank))
            shared[name] |= not duration_s[:, stage].all()
    return shared | np.array([len(ranks) > 1 for ranks in feeders], np.bool_)
