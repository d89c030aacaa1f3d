"""Eager 1F1B: extra warm-up forwards upstream of every slow hop, so that its round trip is hidden.

The idea is GeoPipe's (arXiv 2510.12064), whose own order is `geopipe`: it counts the hops between sites, this one all.
The closed form below was found to hold in simulation.
"""

from collections.abc import Sequence

import numpy as np

from farpipe.core.errors import UsageError
from farpipe.core.schedule.library.one_f_one_b import with_warm_up
from farpipe.core.schedule.library.placement import require_one_stage_per_rank
from farpipe.core.step import (
    Problem,
    Schedule,
    headroom_bytes,
    hiding_forwards,
    num_fitting,
    round_trip_s,
    upstream_sums,
)
from farpipe.core.step.player import makespan_s


def eager(problem: Problem, extra: int | Sequence[int] | None = None) -> Schedule:
    """1F1B whose stage i does ``p - 1 - i + extra[i]`` forwards before it alternates.

    `extra` is one number for all stages but the last, one per stage, or None: the closed form of
    `extra_forwards`, reduced where memory forbids it or fewer are faster.
    """
    if extra is None:
        return as_many_as_help(problem, extra_forwards(problem), "eager")
    return with_extra(problem, _per_stage(extra, problem.num_stages), "eager")


def with_extra(problem: Problem, extra: Sequence[int], method: str) -> Schedule:
    """1F1B with ``extra[i]`` more warm-up forwards on stage i."""
    require_one_stage_per_rank(problem, method)
    return with_warm_up(problem, [problem.num_stages - 1 - stage + more for stage, more in enumerate(extra)], method)


def as_many_as_help(problem: Problem, extra: Sequence[int], method: str) -> Schedule:
    """1F1B with ``extra[i]`` more warm-up forwards, as far as memory allows; with fewer, or none, where that is faster.

    The closed form knows one hop at a time: where hops saturate a link that they share, more forwards in flight can
    hold up the messages that others wait for, and with unequal stages the wrong ones.
    """
    require_one_stage_per_rank(problem, method)
    plain = [problem.num_stages - 1 - stage for stage in range(problem.num_stages)]
    wanted = _fit_memory(problem, [least + more for least, more in zip(plain, extra, strict=True)])
    schedule, without = (with_warm_up(problem, warm_up, method) for warm_up in (wanted, plain))
    if wanted == plain or makespan_s(problem, schedule) <= makespan_s(problem, without):
        return schedule
    more = [count - least for count, least in zip(wanted, plain, strict=True)]
    shares = [[m * eighths // 8 for m in more] for eighths in range(7, -1, -1)]
    fewer = [with_warm_up(problem, [p + m for p, m in zip(plain, share, strict=True)], method) for share in shares]
    return min(fewer, key=lambda schedule: makespan_s(problem, schedule))


def extra_forwards(problem: Problem) -> list[int]:
    """Extra forwards per stage: sum of `hidden_by` over the hops at or downstream of it."""
    return upstream_sums([hidden_by(problem, hop) for hop in range(problem.num_stages - 1)])


def hidden_by(problem: Problem, index: int) -> int:
    """The extra forwards that hide a hop: ``ceil(round trip / (F + I + W))``, at most the number of microbatches.

    The round trip is its forward and its backward message, alone on their links. F + I + W is the slowest
    stage's, for it sets the pace.
    """
    durations = [problem.table(name) for name in ("forward_s", "input_grad_s", "weight_grad_s")]
    pace = float(np.sum(durations, axis=0).mean(axis=1).max())
    return int(hiding_forwards(round_trip_s(problem, index), pace, problem.num_microbatches))


def _fit_memory(problem: Problem, wanted: list[int]) -> list[int]:
    """The wanted warm-up, with no more forwards in flight than the rank of a stage can hold.

    Where memory cuts it, it still falls from stage to stage: two neighbours with the same warm-up would wait for each
    other once per microbatch.
    """
    fitted: list[int] = []
    for stage, count in enumerate(wanted):
        plain, most = problem.num_stages - 1 - stage, _most_in_flight(problem, stage)
        allowed = count if most is None else min(count, most - 1)
        if fitted and fitted[-1] < wanted[stage - 1]:
            allowed = min(allowed, fitted[-1] - 1)
        fitted.append(max(plain, allowed))
    return fitted


def _most_in_flight(problem: Problem, stage: int) -> int | None:
    """The number of microbatches of `stage` that fit its rank's memory at once (the largest ones taken); None: all."""
    headroom = float(headroom_bytes(problem)[problem.stages[stage].rank])
    held = float(problem.table("activation_bytes")[stage].max())
    return None if held * problem.num_microbatches <= headroom else num_fitting(headroom, held)


def _per_stage(extra: int | Sequence[int], num_stages: int) -> list[int]:
    given = [extra] * (num_stages - 1) + [0] if isinstance(extra, int) else list(extra)
    if len(given) != num_stages or any(e < 0 for e in given):
        raise UsageError(f"extra forwards: expected {num_stages} counts of at least 0, found {given}")
    return given
