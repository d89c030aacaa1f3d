"""Greedy orders: every combination of what the rules leave open is tried, the best is kept; and one by one."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from farpipe.core.step import BACKWARD, FORWARD, Action, Problem, Schedule, hiding_forwards, need_tables
from farpipe.core.step.arrays import Floats, Ints
from farpipe.core.step.codes import NUM_KINDS, B, I
from farpipe.core.step.player import CodedSchedule, Player
from farpipe.planning.search.step import SearchStep, fits_memory

MAX_ACTIONS_IN_ALL = 1_500_000
"""Over all tries together: one or two seconds' work; of steps larger than that fewer combinations are tried."""


def greedy_orders(
    step: SearchStep,
    *,
    split: bool = True,
    go_on: Callable[[], bool] = lambda: True,
    max_actions: int = MAX_ACTIONS_IN_ALL,
    target_s: float = 0.0,
) -> list[tuple[float, CodedSchedule]]:
    """(makespan_s, orders) of every greedy try, best first; empty when one microbatch does not fit some rank.

    `split`: backwards as I and W, else as B. `go_on` is asked before every try but the first;
    all of them together make about `max_actions` actions. The first order that takes `target_s` at most ends the tries.
    """
    from farpipe.planning.search import greedy_kernel  # here, for numba takes a third of a second to import

    compiled: Any = greedy_kernel.greedy
    player, limits = Player(step.arrays), _limits(step, I if split else B)
    found: dict[bytes, tuple[float, CodedSchedule]] = {}
    most = max(1, max_actions // step.num_actions)
    opened = step.problem.traffic.opening[:2]
    for (in_flight, rules), _ in zip(tries(step, split), range(most), strict=False):
        if found and not go_on():
            break
        orders = _by_rank(step, *compiled(step.tables, step.arrays.num_ranks, limits, opened, in_flight, rules))
        if orders[0].size and (key := orders[0].tobytes()) not in found and fits_memory(step, orders):
            found[key] = player.makespan_s(orders), orders
            if found[key][0] <= target_s:
                break
    return sorted(found.values(), key=lambda pair: pair[0])


def _by_rank(step: SearchStep, codes: Ints, owner: Ints) -> CodedSchedule:
    """The orders of actions `codes` that start one after the other on the ranks `owner`."""
    begin = np.cumsum([0, *np.bincount(owner, minlength=step.arrays.num_ranks)])
    return codes[np.argsort(owner, kind="stable")], begin.astype(np.int32)


def _limits(step: SearchStep, back: int) -> tuple[Any, ...]:
    """The `limits` of the kernel; `back` is the kind of the backwards."""
    chains = step.problem.chains
    needed_before = chains.forwards_needed() if chains.any else np.zeros(step.shape[1], np.int64)
    needed, released = (table.reshape(*step.shape, NUM_KINDS) for table in need_tables(step.problem))
    reserve = _reserves(step, needed[..., back].max(axis=1))
    bytes_ = (needed, released, step.headroom_bytes, reserve)
    return step.stages, step.stages_begin, *bytes_, chains.backwards, needed_before


def _reserves(step: SearchStep, backward_bytes: Floats) -> Floats:
    """Bytes that forwards which nobody waits for leave free: [S].

    What one microbatch (of chains the largest one, whole) needs in all later stages of the same rank, and one backward
    in one of its stages, `backward_bytes` [S].
    """
    activation = step.problem.chains.sums(step.activation_bytes).max(axis=1)
    reserve = np.zeros(step.shape[0])
    for mine in map(list, step.problem.stages_of_rank):
        reserve[mine] = activation[mine][::-1].cumsum()[::-1] - activation[mine] + backward_bytes[mine].max(initial=0.0)
    return reserve


def tries(step: SearchStep, split: bool) -> Iterator[tuple[Ints, Floats]]:
    """Pairs (most in flight per stage, rules), the likely ones first. The places of `rules` are `greedy_kernel`'s."""
    kinds = ((0.0, 1.0), (0.0, 0.0), (1.0, 0.0))  # alternate, backward first, forward first
    deep = (0.0, 1.0) if step.problem.num_stages > step.problem.num_ranks else (0.0,)
    fillers = product((0.0, 1.0), (0.5, 0.0, 1.0)) if split else ((0.0, 0.0),)
    for (by_weights, overshoot), (first, mixed), deepest in product(fillers, kinds, deep):
        for in_flight in depths(step):
            yield in_flight, np.array([first, deepest, mixed, by_weights, overshoot, float(split)])


def depths(step: SearchStep) -> Iterator[Ints]:
    """Microbatches that may be in flight per stage: any that fit; then what hides the round trip, and around it."""
    num_stages, num_microbatches = step.shape
    everything = np.full(num_stages, num_microbatches, np.int32)
    yield everything
    pace_s = float(step.arrays.duration_s[[0, 3]].sum(axis=0).mean(axis=1).max())
    hiding = hiding_forwards(round_trips_s(step), pace_s, num_microbatches)
    for extra in (0, 1, 2, 4):
        yield np.clip(hiding + extra, 1, num_microbatches).astype(np.int32)


def round_trips_s(step: SearchStep) -> Floats:
    """[S]: from the start of F to the end of W of one microbatch alone in the pipeline, on average."""
    arrays = step.arrays
    stage_s = arrays.duration_s[[0, 1]].sum(axis=0).mean(axis=1)
    travel_s = arrays.messages.arrives_after_s.mean(axis=2)
    hop_s = np.append(travel_s[FORWARD, :-1] + travel_s[BACKWARD, 1:], 0.0)
    below = np.cumsum((stage_s + hop_s)[::-1])[::-1]
    return np.asarray(below + arrays.duration_s[2].mean(axis=1))


def one_by_one(problem: Problem) -> Schedule:
    """One sequence after the other, its backwards one stage after the other: the order that fits memory if any does."""
    first = problem.chains.first
    sequences = [np.flatnonzero(first == j).tolist() for j in np.unique(first)]

    def rank_order(stages: tuple[int, ...], slices: list[int]) -> list[Action]:
        forwards = [Action(stage, "F", j) for j in slices for stage in stages]
        return forwards + [Action(stage, "B", j) for stage in reversed(stages) for j in reversed(slices)]

    ranks = (
        tuple(action for slices in sequences for action in rank_order(stages, slices))
        for stages in problem.stages_of_rank
    )
    return Schedule(problem.num_microbatches, tuple(ranks), "one by one")
