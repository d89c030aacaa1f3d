"""The exact assignment of a few simultaneous requests, an integer program: the yardstick of the policies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from farpipe.errors import InputError
from farpipe.optical.modulation import Modulation
from farpipe.optical.paths import Pair, PathTable
from farpipe.optical.policies import Policy
from farpipe.optical.spectrum import Grid
from farpipe.optical.traffic import Traffic

MAX_PLACES: Final = 200_000
"""Requests x candidates x first slots that a program may have."""


@dataclass(frozen=True)
class Exact:
    """The most that any assignment carries, and how far that is proven."""

    accepted: int
    upper_bound: int
    """No assignment carries more; equal to `accepted` when that is proven to be the best."""
    blocks: tuple[tuple[int, int, int] | None, ...]
    """(candidate, first slot, slots) of every request, or None: refused."""


def assign_exactly(
    requests: Sequence[tuple[Pair, float]],
    paths: PathTable,
    grid: Grid,
    modulation: Modulation,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> Exact:
    """The largest number of `requests` (pair, Gbit/s) that fit on their candidates at the same time (CP-SAT).

    One variable per request, candidate and first slot; every slot of every fibre is taken at most once. InputError when
    that would be too many.
    """
    from ortools.sat.python import cp_model

    places = [_places(index, request, paths, grid, modulation) for index, request in enumerate(requests)]
    if sum(map(len, places)) > MAX_PLACES:
        raise InputError(f"the exact program would have {sum(map(len, places))} variables, more than {MAX_PLACES}")
    model = cp_model.CpModel()
    chosen = [[model.new_bool_var("") for _ in there] for there in places]
    users: dict[tuple[int, int], list[cp_model.IntVar]] = {}
    for there, variables in zip(places, chosen, strict=True):
        model.add_at_most_one(variables)
        for (path, start, count), variable in zip(there, variables, strict=True):
            for fibre in paths.fibres[paths.begin[path] : paths.begin[path + 1]]:
                for slot in range(start, start + count):
                    users.setdefault((int(fibre), slot), []).append(variable)
    for variables in users.values():
        model.add_at_most_one(variables)
    model.maximize(sum(variable for variables in chosen for variable in variables))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.random_seed = time_limit_s, seed
    solver.parameters.num_workers = 2
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(0, len(requests), (None,) * len(requests))
    blocks = tuple(_taken(solver.boolean_value, *both) for both in zip(places, chosen, strict=True))
    accepted = sum(block is not None for block in blocks)
    return Exact(accepted, int(np.floor(solver.best_objective_bound + 1e-6)), blocks)


def _taken(value: Any, there: list[tuple[int, int, int]], variables: Sequence[Any]) -> tuple[int, int, int] | None:
    return next((place for place, v in zip(there, variables, strict=True) if value(v)), None)


def _places(
    index: int, request: tuple[Pair, float], paths: PathTable, grid: Grid, modulation: Modulation
) -> list[tuple[int, int, int]]:
    pair, gbit_s = request
    place = paths.pair(pair[0], pair[1], f"requests[{index}]")
    found = []
    for path in range(paths.first[place], paths.first[place + 1]):
        rate = modulation.efficiency(float(paths.km[path])) * grid.slot_ghz
        count = int(np.ceil(gbit_s / rate - 1e-9)) + grid.guard if rate else grid.num_slots + 1
        found += [(int(path), start, count) for start in range(grid.num_slots - count + 1)]
    return found


def assign_in_turn(
    requests: Sequence[tuple[Pair, float]], paths: PathTable, grid: Grid, modulation: Modulation, policy: Policy
) -> int:
    """Number of the same requests that a policy carries when they come one after the other and none leaves."""
    from farpipe.optical.blocking import play_traffic

    pairs = tuple(dict.fromkeys(pair for pair, _ in requests))
    count = len(requests)
    traffic = Traffic(
        pairs,
        np.arange(count, dtype=np.float64),
        np.array([pairs.index(pair) for pair, _ in requests], np.int32),
        np.array([gbit_s for _, gbit_s in requests]),
        np.full(count, 1e12),
    )
    return play_traffic(traffic, paths, policy, grid, modulation).accepted
