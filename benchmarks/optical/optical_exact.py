"""The exact program against the policies on small instances: how many requests fewer they carry. Prints Markdown.

    python -m benchmarks.optical.optical_exact [--seeds 10] [--limit 10]

Requests of 25 to 100 Gbit/s between random pairs come one after the other and none leaves ("mixed": at 64QAM, every
other one is a message of a pipeline, 450 Gbit/s between two of the main table's nodes, among requests of 4 to 20
slots); the exact program (CP-SAT) knows them all. Where it has not proven its answer within the limit, its upper bound
counts too: `gap` is (most that any assignment could carry - carried) / that most, so that a policy's true gap is at
most this.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from farpipe.optical import POLICIES, Grid, find_modulation, find_network, k_shortest, play_traffic
from farpipe.optical.modulation import Modulation
from farpipe.optical.network import build_network
from farpipe.optical.paths import Pair, PathTable
from farpipe.optical.policies import AssignmentPolicy
from farpipe.optical.traffic import Traffic

RING = [("a", "b", 500), ("b", "c", 300), ("c", "d", 700), ("d", "a", 400), ("a", "c", 900), ("d", "e", 600)]
RINGS = (("ring", 3, 16, 24), ("ring", 3, 24, 40))
SIZES = (*RINGS, ("nsfnet", 2, 12, 40), ("nsfnet, mixed", 2, 24, 24), ("nsfnet, mixed", 2, 40, 40))
HOPS = (("1", "4"), ("4", "10"), ("10", "14"), ("14", "8"), ("8", "12"))


def network_of(name):
    if name != "ring":
        return find_network(name)
    return build_network(name, [(f"edge {i}", {"a": a, "b": b, "km": km}) for i, (a, b, km) in enumerate(RING)])


def requests_of(paths, count, seed):
    random, pairs = np.random.default_rng(seed), list(paths.of_pair)
    return [(pairs[random.integers(len(pairs))], float(random.integers(25, 101))) for _ in range(count)]


def mixed_requests(paths, count, seed):
    random, others = np.random.default_rng(seed), requests_of(paths, count, seed)
    found = [(pair, 75.0 * random.integers(4, 21)) for pair, _ in others]
    for index in range(1, count, 2):
        a, b = HOPS[random.integers(len(HOPS))]
        found[index] = ((a, b) if random.integers(2) else (b, a), 450.0)
    return found


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

    One variable per request, candidate and first slot; every slot of every fibre is taken at most once.
    """
    places = [_places(index, request, paths, grid, modulation) for index, request in enumerate(requests)]
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
    requests: Sequence[tuple[Pair, float]],
    paths: PathTable,
    grid: Grid,
    modulation: Modulation,
    policy: AssignmentPolicy,
) -> int:
    """Number of the same requests that a policy carries when they come one after the other and none leaves."""
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=10.0)
    parser.add_argument("--rows", type=int, nargs=2, metavar=("FROM", "UNTIL"), help="of the table, from 0")
    options = parser.parse_args()
    print("| network | paths | slots | requests | exact | bound | proven | " + " | ".join(POLICIES) + " |")
    print("|---" * (7 + len(POLICIES)) + "|", flush=True)
    for name, k, slots, count in SIZES[slice(*(options.rows or (None,)))]:
        mixed = name.endswith("mixed")
        modulation, draw = find_modulation("64qam" if mixed else "deeprmsa"), mixed_requests if mixed else requests_of
        paths, grid = k_shortest(network_of(name.partition(",")[0]), k=k), Grid(slots)
        sets = [draw(paths, count, seed) for seed in range(options.seeds)]
        exact = [assign_exactly(one, paths, grid, modulation, time_limit_s=options.limit) for one in sets]
        cells = []
        for policy in POLICIES.values():
            carried = [assign_in_turn(one, paths, grid, modulation, policy) for one in sets]
            assert all(got <= best.upper_bound for got, best in zip(carried, exact, strict=True))
            gaps = [1 - got / best.upper_bound for got, best in zip(carried, exact, strict=True)]
            cells.append(f"{100 * mean(gaps):.1f} %")
        proven = sum(one.accepted == one.upper_bound for one in exact)
        figures = (mean(one.accepted for one in exact), mean(one.upper_bound for one in exact))
        head = f"| {name} | {k} | {slots} | {count} | {figures[0]:.1f} | {figures[1]:.1f} | {proven} of {len(exact)} | "
        print(head + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
