"""Published blocking of KSP-FF (XLRON), met with the candidate paths that its code of then made, and with others.

    python -m benchmarks.optical.optical_published [--seeds 100] [--usnet usnet_gcnrnn_directed.json]

The published figures are those of "Reinforcement learning for dynamic resource allocation in optical networks: hype or
hope?" (JOCN, 2025): mean and standard deviation of 10 runs of 10,000 requests after 3,000, the settings in XLRON's
`heuristic_evaluation.sh`. Columns: candidates by that code; the same five paths ordered by hops alone, and by hops over
efficiency; the five best by efficiency of all paths (`--set by=efficiency`). Behind each figure is its distance from
the published mean in standard errors of that mean. USNET's topology is a file of XLRON. Prints Markdown.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import combinations, islice

import networkx as nx

from farpipe.optical import (
    Grid,
    PoissonTraffic,
    find_modulation,
    find_network,
    find_policy,
    k_shortest,
    poisson_blocking,
)
from farpipe.optical.network import Network
from farpipe.optical.paths import PathTable

DEEPRMSA = find_modulation("deeprmsa")
DIRECTED, SHARED = Grid(100, 12.5, 1), Grid(80, 12.5, 0)
"""Spectrum of the settings of DeepRMSA and GCN-RMSA, and of MaskRSA's, whose fibres both directions share."""
PUBLISHED = {
    "GCN-RMSA, NSFNET": ((154, 0.06, 0.05), (168, 0.13, 0.06), (182, 0.32, 0.10), (196, 0.66, 0.22), (210, 1.14, 0.31)),
    "DeepRMSA, NSFNET": ((250, 3.07, 0.20),),
    "MaskRSA, NSFNET": (
        *((100, 0.08, 0.04), (110, 0.25, 0.08), (120, 0.62, 0.16), (130, 1.38, 0.21), (140, 2.30, 0.21)),
        *((150, 3.37, 0.31), (160, 4.59, 0.21)),
    ),
    "GCN-RMSA, USNET": ((320, 0.23, 0.13), (340, 0.47, 0.20), (360, 0.74, 0.10), (380, 1.17, 0.20), (400, 1.62, 0.21)),
}
"""By setting: Erlang, mean and standard deviation of blocking in percent."""
RULES: dict[str, Callable[[int, int, float, float], tuple[float, float]]] = {
    "as XLRON's code": lambda pair, hops, rate, km: (hops if pair % 2 else hops / rate, -km),
    "by hops": lambda pair, hops, rate, km: (hops, 0.0),
    "by hops / efficiency": lambda pair, hops, rate, km: (hops / rate, 0.0),
}
"""Sort keys of a pair's five paths with fewest hops. XLRON's code until 2026-01-30 (`init_path_link_array`) turned its
table of modulations round at every pair, so that each second pair had the lowest efficiency at all lengths, and put
the longer of equal paths first."""


def candidates(network: Network, rule: Callable[[int, int, float, float], tuple[float, float]]) -> PathTable:
    """Five paths with fewest hops of each pair as networkx finds them, ordered by `rule`; the way back is the same."""
    graph = nx.Graph() if network.shared else nx.DiGraph()
    graph.add_nodes_from(sorted(network.nodes, key=int))
    ways = (slice(None),) if network.shared else (slice(None), slice(None, None, -1))
    for way in ways:
        graph.add_edges_from((edge.a, edge.b)[way] for edge in network.edges)
    found = {}
    for index, (a, b) in enumerate(combinations(graph.nodes, 2)):
        paths = [tuple(path) for path in islice(nx.shortest_simple_paths(graph, a, b), 5)]
        lengths = {path: network.path_km(path) for path in paths}
        paths.sort(key=lambda path: rule(index, len(path) - 1, DEEPRMSA.efficiency(lengths[path]), lengths[path]))
        found[a, b], found[b, a] = tuple(paths), tuple(path[::-1] for path in paths)
    return PathTable(network, found)


def rows(setting: str, network: Network, seeds: int) -> Iterator[tuple[str, ...]]:
    tables = [candidates(network, rule) for rule in RULES.values()]
    tables.append(k_shortest(network, None, k=5, by="efficiency", modulation=DEEPRMSA))
    most, truncate_at = (50, None) if network.shared else (100, 2.0)
    grid = SHARED if network.shared else DIRECTED
    for load, mean, deviation in PUBLISHED[setting]:
        traffic = PoissonTraffic(load, high=most, truncate_at=truncate_at)
        cells = []
        for table in tables:
            found = poisson_blocking(
                traffic,
                table,
                find_policy("ksp-ff"),
                grid,
                DEEPRMSA,
                num_requests=10_000,
                warm_up=3_000,
                seeds=range(seeds),
            )
            percent = 100 * found.blocking_ratio.mean
            cells.append(f"{percent:.2f} ({(percent - mean) / (deviation / 10**0.5):+.1f})")
        yield setting, f"{load}", f"{mean:.2f} ± {deviation:.2f}", *cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--usnet")
    options = parser.parse_args()
    heads = ("setting", "Erlang", "published %", *(f"{name} %" for name in RULES), "best by efficiency %")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for setting in PUBLISHED:
        if "USNET" not in setting or options.usnet:
            name = options.usnet if "USNET" in setting else "nsfnet"
            for row in rows(setting, find_network(name, shared="MaskRSA" in setting), options.seeds):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
