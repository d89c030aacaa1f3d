"""Local search over orders: annealing from several seeds, in rounds of a fixed number of evaluations."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from farpipe.core.step.player import CodedSchedule, Player
from farpipe.planning.search.step import SearchStep

NUM_THREADS: Final = 2
"""Annealings side by side. A constant, for the answer must not depend on the machine."""
HOT, COLD = 0.1, 0.01
"""Temperatures at the start of the first round and at the end of every round, in mean action durations."""
LAST: Final = 0.06
"""Temperature at which the last round begins, as a share of that at which the first begins."""


@dataclass
class Walk:
    """One annealing: where it is best, and how good that is."""

    orders: CodedSchedule
    makespan_s: float


Report = Callable[[float, CodedSchedule], bool]
"""Told of (makespan_s, orders) of the best after every round; True: go on."""


def improve(
    step: SearchStep,
    seeds: Sequence[tuple[float, CodedSchedule]],
    *,
    num_evaluations: int,
    num_rounds: int = 8,
    seed: int = 0,
    target_s: float = 0.0,
    report: Report = lambda makespan_s, orders: True,
) -> tuple[float, CodedSchedule]:
    """The best orders found from `seeds` (makespan_s, orders) with `num_evaluations` in all: (makespan_s, orders).

    The first seeds get a walk each; after every second round all go on from the best. The same
    step, seeds, seed and numbers give the same answer, unless `report` ends it. Seeds must be valid and fit memory.
    """
    walks = [Walk(orders, makespan_s) for makespan_s, orders in seeds[:NUM_THREADS]]
    walks += [Walk(walks[0].orders, walks[0].makespan_s) for _ in range(NUM_THREADS - len(walks))]
    players = [Player(step.arrays) for _ in walks]
    each = max(1, num_evaluations // (num_rounds * len(walks)))
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for index in range(num_rounds):
            heat = HOT * LAST ** (index / num_rounds)
            rounds = [
                (step, players[w], walk, each, heat, target_s, _seed(seed, index, w)) for w, walk in enumerate(walks)
            ]
            walks = list(pool.map(_anneal, *zip(*rounds, strict=True)))
            best = min(walks, key=lambda walk: walk.makespan_s)
            if not report(best.makespan_s, best.orders) or best.makespan_s <= target_s:
                break
            if index % 2:
                walks = [best] * len(walks)
    return best.makespan_s, best.orders


def _seed(seed: int, index: int, walk: int) -> int:
    return int(np.random.SeedSequence((seed, index, walk)).generate_state(1)[0])


def _anneal(
    step: SearchStep, player: Player, walk: Walk, num_evaluations: int, heat: float, target_s: float, seed: int
) -> Walk:
    from farpipe.planning.search import local_kernel  # here, for numba takes a third of a second to import

    compiled: Any = local_kernel.anneal
    codes, begin = walk.orders[0].copy(), walk.orders[1]
    memory = (step.taken_bytes, step.freed_bytes, step.headroom_bytes)
    chains = step.problem.chains
    unit = step.mean_action_s
    temperatures_s = (heat * unit, COLD * unit) if unit else (1e-12, 1e-12)
    where: tuple[Any, ...] = (
        codes,
        begin,
        step.tables,
        player.arrays.new_out(codes.size),
        player.scratch,
        memory,
        (chains.previous, chains.next),
    )
    makespan_s, _ = compiled(
        *where, step.work_s, temperatures_s, num_evaluations, step.identical, target_s * (1 + 1e-12), seed
    )
    return Walk((codes, begin), makespan_s)
