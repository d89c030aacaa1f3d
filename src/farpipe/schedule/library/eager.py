"""Eager 1F1B: extra warm-up forwards upstream of every slow hop, so that its round trip is hidden.

The idea is GeoPipe's (arXiv 2510.12064); the closed form below was found to hold in simulation.
"""

import math
from collections.abc import Sequence

import numpy as np

from farpipe.errors import UsageError
from farpipe.problem import Problem, Transfer
from farpipe.schedule.library.one_f_one_b import require_one_stage_per_rank, with_warm_up
from farpipe.schedule.schedule import Schedule


def eager(problem: Problem, extra: int | Sequence[int] | None = None) -> Schedule:
    """1F1B whose stage i does ``p - 1 - i + extra[i]`` forwards before it alternates.

    `extra` is one number for all stages but the last, one per stage, or None: the closed form of
    `extra_forwards`, reduced where memory forbids it.
    """
    require_one_stage_per_rank(problem, "eager")
    last = problem.num_stages - 1
    if extra is None:
        warm_up = _fit_memory(problem, [last - i + e for i, e in enumerate(extra_forwards(problem))])
    else:
        warm_up = [last - i + e for i, e in enumerate(_per_stage(extra, problem.num_stages))]
    return with_warm_up(problem, warm_up, "eager")


def extra_forwards(problem: Problem) -> list[int]:
    """Extra forwards per stage: sum over the hops c at or downstream of ``ceil(round trip_c / (F + I + W))``.

    The round trip of a hop is its forward and its backward message, latency and bytes/bandwidth both. F + I + W is
    the slowest stage's, for it sets the pace.
    """
    durations = [problem.table(name) for name in ("forward_s", "input_grad_s", "weight_grad_s")]
    pace = float(np.sum(durations, axis=0).mean(axis=1).max())
    extra = [0] * problem.num_stages
    for index, hop in enumerate(problem.hops):
        if hop is None or problem.stages[index].rank == problem.stages[index + 1].rank:
            continue
        round_trip = _mean_seconds(problem, hop.forward) + _mean_seconds(problem, hop.backward)
        hidden = problem.num_microbatches if pace == 0 else min(problem.num_microbatches, round_trip / pace)
        for stage in range(index + 1):
            extra[stage] += math.ceil(hidden - 1e-9) if round_trip > 0 else 0
    return extra


def _mean_seconds(problem: Problem, transfer: Transfer | None) -> float:
    if transfer is None:
        return 0.0
    names = [transfer.link] * problem.num_microbatches if isinstance(transfer.link, str) else transfer.link
    links = [problem.links[name] for name in names]
    seconds = [
        b / k.bandwidth_bytes_per_s + k.latency_s for b, k in zip(problem.row(transfer.bytes), links, strict=True)
    ]
    return float(sum(seconds) / len(seconds))


def _fit_memory(problem: Problem, warm_up: list[int]) -> list[int]:
    """The wish, with no more forwards in flight than the rank of a stage can hold, and not growing downstream."""
    fitted: list[int] = []
    for stage, wish in enumerate(warm_up):
        plain = problem.num_stages - 1 - stage
        allowed = max(plain, min(wish, _most_in_flight(problem, stage) - 1))
        fitted.append(min(allowed, fitted[-1]) if fitted else allowed)
    return fitted


def _most_in_flight(problem: Problem, stage: int) -> int:
    """How many microbatches of `stage` fit its rank's memory at once (the largest ones taken)."""
    rank = problem.ranks[problem.stages[stage].rank]
    held = float(problem.table("activation_bytes")[stage].max())
    if rank.memory_bytes is None or held == 0:
        return problem.num_microbatches
    room = (rank.memory_bytes - rank.static_bytes) / held
    return max(0, min(problem.num_microbatches, math.floor(room * (1 + 1e-9))))


def _per_stage(extra: int | Sequence[int], num_stages: int) -> list[int]:
    given = [extra] * (num_stages - 1) + [0] if isinstance(extra, int) else list(extra)
    if len(given) != num_stages or any(e < 0 for e in given):
        raise UsageError(f"extra forwards: expected {num_stages} counts of at least 0, found {given}")
    return given
