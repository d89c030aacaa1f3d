"""Placement of stages on ranks that an order asks of a Problem."""

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError
from farpipe.core.step import Problem


def require_one_stage_per_rank(problem: Problem, method: str) -> None:
    """InputError unless every rank has exactly one stage."""
    for rank, stages in enumerate(problem.stages_of_rank):
        if len(stages) != 1:
            raise InputError(
                f"schedule {method!r} needs one stage on every rank; rank {rank} has {len(stages)} (in a job: "
                "layout.virtual = 1; for several stages per rank: 'gpipe', 'bfs', 'interleaved', for two in a V: "
                "'zbv', 'wave')"
            )


def require_round_robin(problem: Problem, method: str) -> list[int]:
    """The ranks in pipeline order; InputError unless stage s + p lives where stage s does."""
    num_ranks = problem.num_ranks
    ring = [stage.rank for stage in problem.stages[:num_ranks]]
    regular = problem.num_stages % num_ranks == 0 and len(set(ring)) == num_ranks
    if not regular or any(stage.rank != ring[s % num_ranks] for s, stage in enumerate(problem.stages)):
        raise InputError(
            f"schedule {method!r} needs the same number of stages on every rank, placed round robin "
            "(stage s + p on the rank of stage s)"
        )
    return ring


def require_v_shape(problem: Problem, method: str) -> list[int]:
    """The ranks in pipeline order; InputError unless stages s and 2p - 1 - s share a rank, and no others do."""
    num_ranks = problem.num_ranks
    ranks = [stage.rank for stage in problem.stages]
    if len(ranks) != 2 * num_ranks or len(set(ranks[:num_ranks])) != num_ranks or ranks != ranks[::-1]:
        raise InputError(
            f"schedule {method!r} needs two stages per rank in a V, the first and the last on the same rank "
            "(in a job: layout.virtual = 2)"
        )
    return ranks[:num_ranks]


def microbatch_bytes(problem: Problem) -> NDArray[np.float64]:
    """Bytes of one microbatch (of chains the largest one, whole) in all stages of every rank: [R]."""
    held = problem.chains.sums(problem.table("activation_bytes")).max(axis=1)
    chain = problem.chains.sums(problem.table("chain_bytes")).max(axis=1)
    return np.array([held[list(s)].sum() + chain[list(s)].max(initial=0.0) for s in problem.stages_of_rank])
