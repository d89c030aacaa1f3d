"""The exact program against the policies on small instances: how many requests fewer they carry. Prints Markdown.

    python benchmarks/optical_exact.py [--seeds 10] [--limit 10]

Requests of 25 to 100 Gbit/s between random pairs come one after the other and none leaves ("mixed": at 64QAM, every
other one is a message of a pipeline, 450 Gbit/s between two of the main table's nodes, among requests of 4 to 20
slots); the exact program (CP-SAT) knows them all. Where it has not proven its answer within the limit, its upper bound
counts too: `gap` is (most that any assignment could carry - carried) / that most, so that a policy's true gap is at
most this.
"""

import argparse
from statistics import mean

import numpy as np

from farpipe.optical import POLICIES, Grid, find_modulation, find_network, k_shortest
from farpipe.optical.exact import assign_exactly, assign_in_turn
from farpipe.optical.network import build_network

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
            gaps = [1 - got / best.upper_bound for got, best in zip(carried, exact, strict=True)]
            cells.append(f"{100 * mean(gaps):.1f} %")
        proven = sum(one.accepted == one.upper_bound for one in exact)
        figures = (mean(one.accepted for one in exact), mean(one.upper_bound for one in exact))
        head = f"| {name} | {k} | {slots} | {count} | {figures[0]:.1f} | {figures[1]:.1f} | {proven} of {len(exact)} | "
        print(head + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
