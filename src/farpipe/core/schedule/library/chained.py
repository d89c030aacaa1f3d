"""Orders by index for Problems with chains: backwards in reverse, and enough forwards before them."""

from collections.abc import Sequence
from itertools import accumulate

from farpipe.core.step import Action, Problem, RankOrder, Schedule


def chained(problem: Problem, schedule: Schedule) -> Schedule:
    """`schedule`, made as if there were no chains, as one that keeps to them."""
    if not problem.chains.any:
        return schedule
    return Schedule(schedule.num_microbatches, chained_ranks(problem, schedule.ranks), schedule.method)


def chained_ranks(problem: Problem, ranks: Sequence[Sequence[Action]]) -> list[RankOrder]:
    """Orders by index in which the k-th backward of a stage is that of ``problem.chains.backwards[k]``.

    All ranks do as many forwards earlier as the rank that lacks most of them: so a sequence of n slices makes the
    warm-up n - 1 longer (as Seq1F1B, arXiv 2406.03488), and neighbours still keep their distance.
    """
    if not problem.chains.any:
        return [tuple(order) for order in ranks]
    microbatch_of = problem.chains.backwards.tolist()
    parts = [_divide(order, microbatch_of) for order in ranks]
    extra = max((_missing(forwards, backwards, done) for forwards, backwards, done in parts), default=0)
    return [_merge(*part, extra) for part in parts]


def _divide(order: Sequence[Action], microbatch_of: list[int]) -> tuple[list[Action], list[Action], list[int]]:
    """(forwards, renamed backwards, how many forwards come before each of these)."""
    forwards = [action for action in order if action.kind == "F"]
    backwards = [action._replace(microbatch=microbatch_of[action.microbatch]) for action in order if action.kind != "F"]
    counts = accumulate(int(action.kind == "F") for action in order)
    done = [count for action, count in zip(order, counts, strict=True) if action.kind != "F"]
    return forwards, backwards, done


def _missing(forwards: list[Action], backwards: list[Action], done: list[int]) -> int:
    """The largest number of further forwards that have to come before some backward."""
    place = {(stage, microbatch): index for index, (stage, _, microbatch) in enumerate(forwards)}
    needed = (place[action.stage, action.microbatch] + 1 for action in backwards)
    return max((need - count for need, count in zip(needed, done, strict=True)), default=0)


def _merge(forwards: list[Action], backwards: list[Action], done: list[int], extra: int) -> RankOrder:
    order: list[Action] = []
    at = 0
    for action, count in zip(backwards, done, strict=True):
        order += forwards[at : count + extra]
        at = max(at, count + extra)
        order.append(action)
    return tuple(order + forwards[at:])
