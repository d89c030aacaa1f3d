"""List scheduling: the earliest startable action by priority, with W where there is time for it.

What the duration-aware orders share. Each of them says in which order it prefers forwards (F) and input gradients (I),
as numbers, and how much memory it wants to use. No action needs W, so it fills the time in which a rank would wait,
or makes room when memory is full (the heuristic of Zero Bubble Pipeline Parallelism, arXiv 2401.10241).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InfeasibleError
from farpipe.core.schedule.library.chained import chained_ranks
from farpipe.core.schedule.library.placement import microbatch_bytes
from farpipe.core.step import Problem, Schedule, byte_tables, forgiving, headroom_bytes, need_tables
from farpipe.core.step.codes import NUM_KINDS, B, F, I, cell_of, encode, kind_of, slot_of
from farpipe.core.units import format_bytes

Floats = NDArray[np.float64]
Codes = NDArray[np.int64] | NDArray[np.int32]
Arguments = tuple[Any, ...]
"""Arrays of a Problem that the kernel reads, whatever the rules."""
Played = tuple[tuple[float, float], NDArray[np.int64]]
"""((makespan, longest time of any rank) to nine digits, codes of the actions, of every rank in its order)."""

MAX_ACTIONS_TO_PLAY: Final = 1_500_000
"""All rules are tried unless that takes more: about a second."""
FIRST_RULES, FAR_ABOVE = 4, 1.05
"""Number of rules after which an order counts as too slow, and by what factor; rules seldom differ by more."""


@dataclass(frozen=True)
class Rules:
    """Rules by which a rank chooses."""

    alternate: bool = False
    """After an F the I's before the F's, and after an I the F's before the I's, whatever the keys."""
    warm_up_fit: float = 0.0
    """The share of an F that must be over when an I's message arrives, as long as no I has been done."""
    weight_fit: float = 1.0
    """Start a W in a gap only if this share of it is over when the next F or I can start. Relaxed on the rank that has
    waited longest."""
    reserve: float = 1.0
    """Multiple of the reserve of its stage that an F leaves free."""
    strict: bool = False
    """F and I exactly in the order of their keys; otherwise the key decides between those that can start."""
    most_in_flight: tuple[int, ...] = ()
    """Largest number of microbatches between F and W on every stage; none given: as many as memory holds."""
    most_held: int = 0
    """Largest number of microbatches between F and W in all stages of a rank, counted once a stage; 0: no limit."""


def list_schedule(
    problem: Problem,
    key: Floats,
    headroom_bytes: Floats,
    rules: Sequence[Rules],
    method: str,
    reserve_bytes: Floats | None = None,
    limit_s: float = np.inf,
) -> Schedule:
    """The best (least makespan, then least time of the longest rank) of the schedules that `rules`, best first, give.

    Without a barrier the time of the longest rank, which is the period, comes first.

    `key` [2, S, M] are the priorities of F and I, the least first; `headroom_bytes` [R] is what the activations of
    every rank may take, `reserve_bytes` [S] what a forward of every stage leaves of it, zero if not given. Messages
    take their links in the order in which they are made; collectives are not looked at. Of use is only what is faster
    than `limit_s`: where the first few rules are far above, the others, which seldom differ by much, are not tried.
    InfeasibleError when memory leaves nothing to start.
    """
    reserve_bytes = np.zeros(problem.num_stages) if reserve_bytes is None else reserve_bytes
    for leaves_growth in (False, True):  # room that is kept for larger stashes is worth less than what it costs
        arguments = _arguments(problem, headroom_bytes, reserve_bytes, leaves_growth=leaves_growth)
        best = _best_of(problem, arguments, key, rules, limit_s)
        if best[1].size:
            break
    else:
        raise _stuck(problem, headroom_bytes, method)
    return _decode(problem, best[1], method)


def _best_of(problem: Problem, arguments: Arguments, key: Floats, rules: Sequence[Rules], limit_s: float) -> Played:
    """The best of what the rules give; no codes where memory leaves nothing to start under any of them."""
    affordable = max(1, MAX_ACTIONS_TO_PLAY // _num_actions(problem))
    best = (np.inf, np.inf), np.empty(0, np.int64)
    for tried, rule in enumerate(rules[:affordable]):
        if tried == FIRST_RULES and FAR_ABOVE * limit_s < best[0][0] < np.inf:
            break
        has_answer = tried >= FIRST_RULES and best[0][0] < np.inf
        above_s = min(best[0][0], limit_s if has_answer else np.inf) if problem.barrier else np.inf
        seconds, codes = _play(problem, arguments, key, rule, above_s)
        better = seconds < best[0] if problem.barrier else seconds[::-1] < best[0][::-1]
        if codes.size == _num_actions(problem) and better:
            best = seconds, codes
    return best


def fill_weights(
    problem: Problem,
    passes: Sequence[Codes],
    method: str,
    most_held: int | None = None,
    wanted: float | Floats = np.inf,
) -> Schedule:
    """The F and I of every rank in the order given, as codes, and W where there is time, or where memory calls for it.

    No rank holds more than `most_held` microbatches until their W, counted once a stage (of chains, those of the
    longest), nor more bytes than so many take where every W follows its I at once; where no number is given, no more
    than the `wanted` bytes. A rank whose passes need more gets that much, and `check` reports what is missing.
    """
    count = problem.num_microbatches
    if problem.chains.any:
        begin = np.cumsum([0, *(codes.size for codes in passes)])
        ranks = Schedule.from_codes(count, np.concatenate(passes), begin, method).ranks
        passes = [Schedule(count, [order]).codes for order in chained_ranks(problem, ranks)]
    held = np.array([np.cumsum(np.where(kind_of(codes) == F, 1, -1)).max() for codes in passes])
    if most_held is not None:
        most_held = max(most_held * int(problem.chains.lengths.max()), int(held.max()))
    tables = need_tables(problem)
    least_bytes = np.array([_least_bytes(codes, *tables) for codes in passes])
    wanted = wanted if most_held is None else least_bytes * most_held / held
    headroom_bytes = np.maximum(memory_headroom(problem, wanted), least_bytes)
    key = np.zeros((2, problem.num_stages, count))
    for codes in passes:
        key[kind_of(codes), *cell_of(codes, count)] = np.arange(codes.size)
    rules = [Rules(strict=True, weight_fit=fit, most_held=most_held or 0) for fit in (1.0, 0.5)]
    return list_schedule(problem, key, headroom_bytes, rules, method)


def _least_bytes(passes: Codes, needed: Floats, released: Floats) -> float:
    """Bytes that F and I in this order need if every W follows its I at once: as a B in its place."""
    joined = np.where(kind_of(passes) == F, passes, encode(B, slot_of(passes)))
    net = needed[joined] - released[joined]
    return forgiving(float((np.cumsum(net) - net + needed[passes]).max(initial=0.0)))


def memory_headroom(problem: Problem, wanted_bytes: float | Floats = np.inf) -> Floats:
    """Bytes that the activations of every rank may take: as the order wants, but no more than the rank has: [R].

    Orders count in activations; where a stash is larger, there is room for one of these as well.
    """
    growth = _most_of_rank(problem, -byte_tables(problem)[1])  # what frees less than nothing
    return np.minimum(headroom_bytes(problem), forgiving(wanted_bytes + growth))


def _most_of_rank(problem: Problem, bytes_by_code: Floats) -> Floats:
    """Largest number of bytes of any action of every rank, at least 0: [R]."""
    most = bytes_by_code.reshape(problem.num_stages, -1).max(axis=1)
    return np.array([most[list(mine)].max(initial=0.0) for mine in problem.stages_of_rank])


def _num_actions(problem: Problem) -> int:
    return 3 * problem.num_stages * problem.num_microbatches


def _arguments(problem: Problem, headroom_bytes: Floats, reserve_bytes: Floats, *, leaves_growth: bool) -> Arguments:
    stages = np.full((problem.num_ranks, problem.num_stages), -1)
    for rank, mine in enumerate(problem.stages_of_rank):
        stages[rank, : len(mine)] = mine
    duration_s = np.stack([problem.table(name) for name in ("forward_s", "input_grad_s", "weight_grad_s")])
    tables = [table.reshape(*duration_s.shape[1:], NUM_KINDS) for table in need_tables(problem)]
    step = (duration_s, *tables, reserve_bytes, headroom_bytes)
    rank_of_stage = np.array([stage.rank for stage in problem.stages])
    wires = (*problem.traffic.messages.figures, len(problem.links))
    return stages, rank_of_stage, step, _sequence(problem, leaves_growth=leaves_growth), wires


def _sequence(problem: Problem, *, leaves_growth: bool) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """(backwards [M], forwards needed before each [M], bytes that other forwards leave to a backward [R]).

    Without chains no forward is held to be needed. `leaves_growth`: leave room for stashes larger than activations.
    """
    chains = problem.chains
    nothing = np.zeros(problem.num_microbatches, np.int64)
    tables = need_tables(problem) if leaves_growth else byte_tables(problem)
    left = _most_of_rank(problem, tables[0][I::NUM_KINDS])
    return chains.backwards, chains.forwards_needed() if chains.any else nothing, left


def _play(problem: Problem, arguments: Arguments, key: Floats, rules: Rules, limit_s: float) -> Played:
    """The actions in the order of the rules; fewer of them if the makespan is sure to be over `limit_s`."""
    from farpipe.core.schedule.library import list_kernel  # here, for numba takes a third of a second to import

    codes = np.empty(_num_actions(problem), np.int64)
    most = np.array(rules.most_in_flight or (problem.num_microbatches + 1,) * problem.num_stages, np.int64)
    most_held = rules.most_held or problem.num_stages * problem.num_microbatches
    choice = (rules.strict, rules.alternate, float(rules.warm_up_fit), float(rules.reserve), most, most_held)
    kernel: Any = list_kernel.play
    count, *seconds = kernel(*arguments, key, choice, float(rules.weight_fit), codes, limit_s * (1 + 1e-8))
    makespan, longest = (float(f"{s:.9g}") for s in seconds)
    return (makespan, longest), codes[:count]


def _decode(problem: Problem, codes: NDArray[np.int64], method: str) -> Schedule:
    rank_of_stage = np.array([stage.rank for stage in problem.stages])
    ranks = rank_of_stage[cell_of(codes, problem.num_microbatches)[0]]
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
