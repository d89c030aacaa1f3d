"""List scheduling: the earliest startable action by priority, with W where there is time for it.

What the duration-aware orders share. Each of them says in which order it prefers forwards (F) and input gradients (I),
as numbers, and how much memory it wants to use. W is nobody's input, so it fills the time in which a rank would wait,
or makes room when memory is full (the heuristic of Zero Bubble Pipeline Parallelism, arXiv 2401.10241).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.errors import InfeasibleError
from farpipe.schedule.library.chained import chained_ranks
from farpipe.schedule.library.placement import microbatch_bytes
from farpipe.step import KINDS, Problem, Schedule, byte_tables
from farpipe.units import format_bytes

Floats = NDArray[np.float64]
Codes = NDArray[np.int64] | NDArray[np.int32]
_F, _B = KINDS.index("F"), KINDS.index("B")
Arguments = tuple[Any, ...]
"""Arrays of a Problem that the kernel reads, whatever the rules."""
Played = tuple[tuple[float, float], NDArray[np.int64]]
"""((makespan, longest time of any rank) to nine digits, codes of the actions, of every rank in its order)."""

MOST_ACTIONS_TO_PLAY: Final = 1_500_000
"""All rules are tried unless that takes more: about a second."""
FIRST_RULES, FAR_ABOVE = 4, 1.1
"""The number of rules that tell that an order is too slow, and what is; they seldom differ by more than a few %."""


@dataclass(frozen=True)
class Rules:
    """Rules by which a rank chooses."""

    alternate: bool = False
    """After an F the I's before the F's, and after an I the F's before the I's, whatever the keys."""
    warm_up_fit: float = 0.0
    """The share of an F that must be over when an I's message arrives, as long as no I has been done."""
    weight_fit: float = 1.0
    """The share of a W that must be over when the next F or I can start."""
    level_idle: bool = True
    """Do a W that does not fit if the rank would otherwise come to have waited longest of all."""
    reserve: float = 1.0
    """Multiple of the reserve of its stage that an F leaves free."""
    strict: bool = False
    """F and I exactly in the order of their keys; otherwise the key decides between those that can start."""
    most_in_flight: tuple[int, ...] = ()
    """So many microbatches at most are between F and W on every stage; none given: as many as memory holds."""


def list_schedule(
    problem: Problem,
    key: Floats,
    headroom_bytes: Floats,
    rules: Sequence[Rules],
    method: str,
    reserve_bytes: Floats | None = None,
    limit_s: float = np.inf,
    rival: Callable[[Problem, Arguments, Played], Played] | None = None,
) -> Schedule:
    """The best (least makespan, then least time of the busiest rank) of the schedules that `rules`, best first, give.

    `key` [2, S, M] are the priorities of F and I, the least first; `headroom_bytes` [R] is what the activations of
    every rank may take, `reserve_bytes` [S] what a forward of every stage leaves of it, zero if not given. Messages
    take their links in the order in which they are made; collectives are not looked at. Of use is only what is faster
    than `limit_s`: where the first few rules are far above, the others, which seldom differ by much, are not tried.
    `rival` may replace the best one. InfeasibleError when memory leaves nothing to start.
    """
    reserve_bytes = np.zeros(problem.num_stages) if reserve_bytes is None else reserve_bytes
    arguments = _arguments(problem, headroom_bytes, reserve_bytes)
    affordable = max(1, MOST_ACTIONS_TO_PLAY // _num_actions(problem))
    best = (np.inf, np.inf), np.empty(0, np.int64)
    known: set[Rules] = set()
    for tried, rule in enumerate(rules[:affordable]):
        if tried == FIRST_RULES and FAR_ABOVE * limit_s < best[0][0] < np.inf:
            break
        if rule in known:
            continue
        other = _other(rule, rules)
        (seconds, codes), mattered = _play(problem, arguments, key, (rule, other), best[0][0])
        known.update(_alike(rule, other, mattered))
        if codes.size == _num_actions(problem) and seconds < best[0]:
            best = seconds, codes
    if not best[1].size:
        raise _stuck(problem, headroom_bytes, method)
    if rival is not None and best[0][0] <= FAR_ABOVE * limit_s:
        best = rival(problem, arguments, best)
    return _decode(problem, best[1], method)


def fill_weights(problem: Problem, passes: Sequence[Codes], headroom_bytes: Floats, method: str) -> Schedule:
    """The F and I of every rank in the order given, as codes, and W where there is time, or where memory calls for it.

    A rank whose passes need more than its headroom gets that much: `check` then tells what is missing.
    """
    count = problem.num_microbatches
    if problem.chains.any:
        begin = np.cumsum([0, *(codes.size for codes in passes)])
        ranks = Schedule.from_codes(count, np.concatenate(passes), begin, method).ranks
        passes = [Schedule(count, [order]).codes for order in chained_ranks(problem, ranks)]
    taken, freed = byte_tables(problem)
    headroom_bytes = np.maximum(headroom_bytes, [_least_bytes(codes, taken, freed) for codes in passes])
    key = np.zeros((2, problem.num_stages, count))
    for codes in passes:
        key[codes & 3, (codes >> 2) // count, (codes >> 2) % count] = np.arange(codes.size)
    rules = (Rules(strict=True), Rules(strict=True, weight_fit=0.5))
    return list_schedule(problem, key, headroom_bytes, rules, method)


def _least_bytes(passes: Codes, taken: Floats, freed: Floats) -> float:
    """Bytes that F and I in this order hold if every W follows its I at once: as a B in its place."""
    joined = np.where(passes & 3 == _F, passes, passes - passes % 4 + _B)
    return float((np.cumsum(taken[joined]) - np.cumsum(freed[joined]) + freed[joined]).max(initial=0.0))


def memory_headroom(problem: Problem, wanted_bytes: float | Floats = np.inf) -> Floats:
    """Bytes that the activations of every rank may take: as the order wants, but no more than the rank has: [R]."""
    has = [np.inf if rank.memory_bytes is None else rank.memory_bytes - rank.static_bytes for rank in problem.ranks]
    return np.asarray(np.minimum(has, wanted_bytes), np.float64)


def _num_actions(problem: Problem) -> int:
    return 3 * problem.num_stages * problem.num_microbatches


def _arguments(problem: Problem, headroom_bytes: Floats, reserve_bytes: Floats) -> Arguments:
    stages = np.full((problem.num_ranks, problem.num_stages), -1)
    for rank, mine in enumerate(problem.stages_of_rank):
        stages[rank, : len(mine)] = mine
    duration_s = np.stack([problem.table(name) for name in ("forward_s", "input_grad_s", "weight_grad_s")])
    tables = [table.reshape(*duration_s.shape[1:], len(KINDS)) for table in byte_tables(problem)]
    step = (duration_s, *tables, reserve_bytes, headroom_bytes * (1 + 1e-9))
    rank_of_stage = np.array([stage.rank for stage in problem.stages])
    wires = (*problem.traffic.messages.figures, len(problem.links))
    return stages, rank_of_stage, step, _sequence(problem), wires


def _sequence(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """(backwards [M], forwards needed before each [M], bytes that other forwards leave to a chain's start [R]).

    Without chains no forward is held to be needed, and nothing is left.
    """
    chains = problem.chains
    if not chains.any:
        nothing = np.zeros(problem.num_microbatches, np.int64)
        return chains.backwards, nothing, _largest_chains(problem)
    return chains.backwards, chains.forwards_needed(), _largest_chains(problem)


def _largest_chains(problem: Problem) -> Floats:
    """Bytes of the largest chain's gradients of keys and values in any one stage of every rank: [R]."""
    largest = problem.chains.sums(problem.table("chain_bytes")).max(axis=1)
    return np.array([largest[list(mine)].max(initial=0.0) for mine in problem.stages_of_rank])


def _other(rule: Rules, rules: Sequence[Rules]) -> Rules:
    """`rule` with another one's shares, where `rules` have two of each, and the other choice about idle ranks."""
    warm_up, weights = {r.warm_up_fit for r in rules}, {r.weight_fit for r in rules}
    warm_up_fit = sum(warm_up) - rule.warm_up_fit if len(warm_up) == 2 else rule.warm_up_fit
    weight_fit = sum(weights) - rule.weight_fit if len(weights) == 2 else rule.weight_fit
    return replace(rule, warm_up_fit=warm_up_fit, weight_fit=weight_fit, level_idle=not rule.level_idle)


def _alike(rule: Rules, other: Rules, mattered: NDArray[np.bool_]) -> Iterator[Rules]:
    """The rules that give the same actions as `rule`, with those of the `other` shares and choices not `mattered`."""
    warm_up, weight, level, both = mattered.tolist()
    choices = [(rule.weight_fit, rule.level_idle)]
    choices += [] if weight else [(other.weight_fit, rule.level_idle)]
    choices += [] if level else [(rule.weight_fit, other.level_idle)]
    choices += [] if both else [(other.weight_fit, other.level_idle)]
    for warm_up_fit in (rule.warm_up_fit,) if warm_up else (rule.warm_up_fit, other.warm_up_fit):
        for weight_fit, level_idle in choices:
            yield replace(rule, warm_up_fit=warm_up_fit, weight_fit=weight_fit, level_idle=level_idle)


def _play(
    problem: Problem, arguments: Arguments, key: Floats, pair: tuple[Rules, Rules], limit_s: float
) -> tuple[Played, NDArray[np.bool_]]:
    """The actions in the order of the first rules; fewer of them if the makespan is sure to be over `limit_s`.

    And which of the second ones' choices would have changed them, see `list_kernel`.
    """
    from farpipe.schedule.library import list_kernel  # here, for numba takes a third of a second to import

    rules, other = pair
    codes = np.empty(_num_actions(problem), np.int64)
    most = np.array(rules.most_in_flight or (problem.num_microbatches + 1,) * problem.num_stages, np.int64)
    warm_up_fit, other_fit = float(rules.warm_up_fit), float(other.warm_up_fit)
    choice = (rules.strict, rules.alternate, warm_up_fit, float(rules.reserve), most, other_fit)
    kernel: Any = list_kernel.play
    weight_rules = (float(rules.weight_fit), rules.level_idle, float(other.weight_fit))
    mattered = np.zeros(4, np.bool_)
    count, *seconds = kernel(*arguments, key, choice, weight_rules, codes, mattered, limit_s * (1 + 1e-8))
    makespan, longest = (float(f"{s:.9g}") for s in seconds)
    return ((makespan, longest), codes[:count]), mattered


def _decode(problem: Problem, codes: NDArray[np.int64], method: str) -> Schedule:
    rank_of_stage = np.array([stage.rank for stage in problem.stages])
    ranks = rank_of_stage[codes // (len(KINDS) * problem.num_microbatches)]
    begin = np.concatenate(([0], np.cumsum(np.bincount(ranks, minlength=problem.num_ranks))))
    return Schedule.from_codes(problem.num_microbatches, codes[np.argsort(ranks, kind="stable")], begin, method)


def _stuck(problem: Problem, headroom_bytes: Floats, method: str) -> InfeasibleError:
    """The rank that is shortest of memory for one microbatch in all its stages."""
    needs = microbatch_bytes(problem)
    rank = int(np.argmax(needs - headroom_bytes))
    return InfeasibleError(
        f"schedule {method!r} finds nothing to start: rank {rank} has {format_bytes(float(headroom_bytes[rank]))} for "
        f"activations, one microbatch takes {format_bytes(float(needs[rank]))} there"
    )
