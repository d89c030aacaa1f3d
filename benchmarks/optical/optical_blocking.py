"""Speed of the blocking simulation: requests per second on one core by policy, network and load.

    python -m benchmarks.optical.optical_blocking [--requests 100000]
    python -m benchmarks.optical.optical_blocking --sizes    a million requests per network and load, KSP-FF, k = 5
    python -m benchmarks.optical.optical_blocking --batch    many backgrounds side by side, on one thread and on two
    python -m benchmarks.optical.optical_blocking --paths    time to find the paths of all pairs of nodes

Compares with a plain Python loop over whole numbers as bit masks in the same process. With --sizes every row is a
process of its own, so that its peak of memory is its own. Prints Markdown.
"""

import argparse
import heapq
import math
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from farpipe.optical import POLICIES, Grid, PoissonTraffic, find_modulation, find_network, k_shortest, play_traffic

DEEPRMSA = find_modulation("deeprmsa")


def plain_first_fit(traffic, paths, grid):
    """KSP-FF in plain Python: the number of requests accepted."""
    free = [(1 << grid.num_slots) - 1] * paths.network.num_fibres
    leaving, accepted = [], 0
    fibres = [list(map(int, paths.fibres[a:b])) for a, b in zip(paths.begin, paths.begin[1:], strict=False)]
    rates = [DEEPRMSA.efficiency(km) * grid.slot_ghz for km in paths.km]
    places = [paths.pairs[pair] for pair in traffic.pairs]
    for i in range(len(traffic)):
        now = traffic.arrival_s[i]
        while leaving and leaving[0][0] <= now:
            _, path, mask = heapq.heappop(leaving)
            for fibre in fibres[path]:
                free[fibre] |= mask
        pair = places[traffic.pair[i]]
        for path in range(paths.first[pair], paths.first[pair + 1]):
            count = math.ceil(traffic.gbit_s[i] / rates[path]) + grid.guard
            starts = free[fibres[path][0]]
            for fibre in fibres[path]:
                starts &= free[fibre]
            together = starts
            for shift in range(1, count):
                together &= starts >> shift
            starts = together
            if starts:
                mask = ((1 << count) - 1) * (starts & -starts)
                for fibre in fibres[path]:
                    free[fibre] &= ~mask
                heapq.heappush(leaving, (now + traffic.holding_s[i], path, mask))
                accepted += 1
                break
    return accepted


def timed(work, repeats=3):
    """(shortest CPU seconds of `repeats`, result)."""
    best = math.inf
    for _ in range(repeats):
        begin = time.process_time()
        result = work()
        best = min(best, time.process_time() - begin)
    return best, result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--batch", action="store_true")
    parser.add_argument("--paths", action="store_true")
    options = parser.parse_args()
    if options.batch or options.paths:
        batch_table() if options.batch else paths_table()
        return
    if options.sizes or options.row:
        size_row(*options.row) if options.row else size_table()
        return
    count = options.requests
    print("| network | k | policy | load | requests | CPU s | requests/s | peak RSS MiB |")
    print("|---" * 8 + "|")
    grid, how = Grid(), PoissonTraffic(250.0, truncate_at=2.0)
    for network, k, load, policies in (
        ("nsfnet", 5, 250.0, tuple(POLICIES)),
        ("nsfnet", 5, 500.0, ("ksp-ff",)),
        ("nsfnet", 50, 250.0, ("ksp-ff",)),
        ("topohub:sndlib/germany50", 5, 1000.0, ("ksp-ff",)),
    ):
        paths = k_shortest(find_network(network), k=k)
        traffic = PoissonTraffic(load, truncate_at=2.0).draw(tuple(paths.of_pair), count, seed=1)
        for name in policies:
            play_traffic(traffic, paths, POLICIES[name], grid, DEEPRMSA)  # compiles
            seconds, _ = timed(lambda t=traffic, p=paths, n=name: play_traffic(t, p, POLICIES[n], grid, DEEPRMSA))
            show(network, k, name, load, count, seconds)
    paths = k_shortest(find_network("nsfnet"))
    traffic = how.draw(tuple(paths.of_pair), 1_000_000, seed=1)
    seconds, outcome = timed(lambda: play_traffic(traffic, paths, POLICIES["ksp-ff"], grid, DEEPRMSA), repeats=1)
    show("nsfnet", 5, "ksp-ff", 250.0, 1_000_000, seconds)
    few = how.draw(tuple(paths.of_pair), 10_000, seed=1)
    seconds, accepted = timed(lambda: plain_first_fit(few, paths, grid), repeats=2)
    assert accepted == play_traffic(few, paths, POLICIES["ksp-ff"], grid, DEEPRMSA).accepted
    show("nsfnet", 5, "ksp-ff, plain Python", 250.0, 10_000, seconds)
    print(f"\nblocking over a million requests: {outcome.blocking_ratio:.3%}")


SIZES = (
    *(("nsfnet", load) for load in (125, 250, 500)),
    *(("topohub:sndlib/germany50", load) for load in (500, 1000, 2000)),
    *(("topohub:topozoo/Uninett2010", load) for load in (250, 500)),
)


def size_table():
    print("| network | nodes | fibres | paths | Erlang | blocked | finding paths s | CPU s | requests/s | peak MiB |")
    print("|---" * 10 + "|", flush=True)
    for network, load in SIZES:
        command = [sys.executable, __file__, "--row", network, str(load)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        print(done.stdout.strip() or f"| {network} | {done.stderr.strip().splitlines()[-1]} |", flush=True)


def size_row(network, load, count=1_000_000):
    net = find_network(network)
    begin = time.process_time()
    paths = k_shortest(net)
    paths_s = time.process_time() - begin
    how = PoissonTraffic(float(load), truncate_at=2.0)
    grid, policy = Grid(), POLICIES["ksp-ff"]
    play_traffic(how.draw(tuple(paths.of_pair), 1000, seed=2), paths, policy, grid, DEEPRMSA)  # compiles
    traffic = how.draw(tuple(paths.of_pair), count, seed=1)
    seconds, outcome = timed(lambda: play_traffic(traffic, paths, policy, grid, DEEPRMSA), repeats=2)
    print(
        f"| {network} | {len(net.nodes)} | {net.num_fibres} | {len(paths.paths)} | {load} | "
        f"{outcome.blocking_ratio:.3%} | {paths_s:.1f} | {seconds:.2f} | {count / seconds:,.0f} | {peak_mib():.0f} |"
    )


def background(paths, count, seed):
    """One environment: so many requests of a background of its own."""
    traffic = PoissonTraffic(250.0, truncate_at=2.0).draw(tuple(paths.of_pair), count, seed)
    return play_traffic(traffic, paths, POLICIES["ksp-ff"], Grid(), DEEPRMSA)


def batch_table(total=4_000_000):
    """Backgrounds side by side as `farpipe optical blocking` plays them; one and two threads in turn."""
    print("| requests each | threads | requests/s by the clock | by CPU time | Python ms each | MiB each |")
    print("|---" * 6 + "|", flush=True)
    paths = k_shortest(find_network("nsfnet"))
    for count in (13_000, 103_000):
        alone = [background(paths, count, seed) for seed in range(total // count)]
        python_s = timed(lambda: [background(paths, 10, seed) for seed in range(100)])[0] / 100
        rates = {1: [], 2: []}
        for threads in (1, 2) * 3:
            begin, cpu = time.perf_counter(), time.process_time()
            with ThreadPoolExecutor(threads) as pool:
                outcomes = list(pool.map(partial(background, paths, count), range(len(alone))))
            clock_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
            expect_equal(outcomes, alone)
            rates[threads].append((len(alone) * count / clock_s, len(alone) * count / cpu_s))
        for threads, found in rates.items():
            clock, cpu = (max(column) for column in zip(*found, strict=True))
            cells = (
                f"{count:,}",
                threads,
                f"{clock:,.0f}",
                f"{cpu:,.0f}",
                f"{1000 * python_s:.2f}",
                kept_mib(alone[0]),
            )
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def kept_mib(outcome):
    """Memory of an environment until the end: its requests and what became of them."""
    parts = [value for one in (outcome, outcome.traffic) for value in vars(one).values()]
    return f"{sum(part.nbytes for part in parts if isinstance(part, np.ndarray)) / 2**20:.2f}"


def expect_equal(outcomes, others):
    """All requests have the same path and slots, bit for bit."""
    for one, other in zip(outcomes, others, strict=True):
        assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("path", "start", "slots"))


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def paths_table():
    """The candidates of all pairs, found twice in one process."""
    print("| network | nodes | edges | paths | by | CPU s | again |\n" + "|---" * 7 + "|", flush=True)
    for name in ("nsfnet", "topohub:topozoo/Bellcanada", "topohub:sndlib/germany50"):
        net = find_network(name)
        for k, by in ((5, "km"), (5, "hops"), (5, "efficiency"), (50, "efficiency")):
            find = partial(k_shortest, net, k=k, by=by, modulation=DEEPRMSA)
            first, again = (timed(find, repeats=1)[0] for _ in range(2))
            cells = (name, len(net.nodes), len(net.edges), k, by, f"{first:.1f}", f"{again:.1f}")
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def show(network, k, policy, load, count, seconds):
    figures = f"{count} | {seconds:.3f} | {count / seconds:,.0f} | {peak_mib():.0f} |"
    print(f"| {network} | {k} | {policy} | {load:g} | {figures}", flush=True)


if __name__ == "__main__":
    main()
