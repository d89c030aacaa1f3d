"""Candidate paths: the k shortest of every pair of nodes, as arrays that the compiled kernels read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError, UsageError
from farpipe.core.spec.cluster import SECONDS_PER_KM
from farpipe.core.strict import nearest
from farpipe.optical.modulation import Modulation
from farpipe.optical.network import Network, number, read_rows

Pair = tuple[str, ...]
"""Source and target; a further word distinguishes tables of the same nodes."""
Nodes = tuple[str, ...]
Route = tuple[int, ...]
"""Nodes of a path as numbers."""
Found = tuple[float, Route]
"""Length and nodes of what follows the end of a beginning."""
Table = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64], NDArray[np.int32], NDArray[np.int32]]

PATH_ORDERS: Final = ("km", "hops", "efficiency")
MAX_K: Final = 1000
MAX_PAIRS: Final = 50_000
"""Pairs of nodes whose paths are found when all are asked for: a minute; those of 1,000 nodes would take an hour."""
_MAX_CYCLES: Final = 12
"""Most independent cycles of a network whose simple paths are all listed: at most a few thousand for a pair."""


@dataclass(frozen=True, repr=False)
class PathTable:
    """The candidate paths of pairs of nodes, best first."""

    network: Network
    of_pair: dict[Pair, tuple[Nodes, ...]]

    @cached_property
    def pairs(self) -> dict[Pair, int]:
        """The place of every pair in `first`."""
        return {pair: index for index, pair in enumerate(self.of_pair)}

    @cached_property
    def paths(self) -> tuple[tuple[Nodes, int], ...]:
        """Every candidate: its nodes and which of the parallel fibres of its edges it takes (see `_planes`)."""
        return tuple((nodes, plane) for paths in self.of_pair.values() for nodes, plane in self._planes(paths))

    @cached_property
    def first(self) -> NDArray[np.int32]:
        """First candidate of every pair in `paths`: [num_pairs + 1]."""
        counts = [sum(1 for _ in self._planes(paths)) for paths in self.of_pair.values()]
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)

    @cached_property
    def km(self) -> NDArray[np.float64]:
        """Length of every candidate."""
        return np.array([self.network.path_km(nodes) for nodes, _ in self.paths], np.float64)

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Delay of light over every candidate."""
        return self.km * SECONDS_PER_KM

    @cached_property
    def _fibres(self) -> list[list[int]]:
        return [self._fibres_of(nodes, plane) for nodes, plane in self.paths]

    @cached_property
    def begin(self) -> NDArray[np.int32]:
        """First fibre of every candidate in `fibres`: [num_paths + 1]."""
        return np.concatenate(([0], np.cumsum([len(there) for there in self._fibres]))).astype(np.int32)

    @cached_property
    def fibres(self) -> NDArray[np.int32]:
        """The fibres of all candidates, one after the other."""
        return np.array([fibre for there in self._fibres for fibre in there], np.int32)

    @cached_property
    def arrays(self) -> Table:
        """The candidates as the kernels read them: begin, fibres, km, neighbour_begin, neighbours.

        The neighbours of a path are the fibres that leave its nodes, its own among them.
        """
        leaving: dict[str, list[int]] = {node: [] for node in self.network.nodes}
        for (source, _), places in self.network.fibres.items():
            leaving[source].extend(places)
        around = [sorted({f for node in nodes for f in leaving[node]}) for nodes, _ in self.paths]
        begin = np.concatenate(([0], np.cumsum([len(fibres) for fibres in around]))).astype(np.int32)
        neighbours = np.array([fibre for fibres in around for fibre in fibres], np.int32)
        return self.begin, self.fibres, self.km, begin, neighbours

    def pair(self, source: str, target: str, place: str = "paths") -> int:
        """The place of a pair; InputError when the table has no path for it."""
        if (source, target) not in self.pairs:
            raise InputError(f"{place}: there is no path from {source} to {target} in the table of paths")
        return self.pairs[source, target]

    def expect_all_pairs(self, source: str) -> None:
        """InputError unless every pair of the network's nodes has a path; `source` names the table."""
        missing = [pair for pair in all_pairs(self.network) if pair not in self.of_pair]
        if missing:
            raise InputError(
                f"{source}: random traffic goes between all pairs of nodes, and {len(missing)} of them have no path "
                f"here, the first {missing[0][0]} to {missing[0][1]}; add their paths, or give a trace"
            )

    def _planes(self, paths: Sequence[Nodes]) -> Iterator[tuple[Nodes, int]]:
        """Each path once per parallel fibre of its widest edge: the i-th time it takes the i-th fibre of every edge.

        An edge with fewer fibres lends its last one. Changing to another parallel fibre at a node between is left out:
        it would multiply the candidates by every edge's number of fibres.
        """
        places = self.network.fibres
        for nodes in paths:
            widest = max(len(places[ends]) for ends in pairwise(nodes))
            yield from ((nodes, plane) for plane in range(widest))

    def _fibres_of(self, nodes: Nodes, plane: int) -> list[int]:
        places = [self.network.fibres[ends] for ends in pairwise(nodes)]
        return [there[min(plane, len(there) - 1)] for there in places]

    def __repr__(self) -> str:
        return f"PathTable: {len(self.of_pair)} pairs, {len(self.paths)} candidates in {self.network.name}"


def all_pairs(network: Network) -> tuple[Pair, ...]:
    """Every ordered pair of different nodes."""
    return tuple((a, b) for a in network.nodes for b in network.nodes if a != b)


def k_shortest(
    network: Network,
    pairs: Iterable[Pair] | None = None,
    *,
    k: int = 5,
    by: str = "km",
    modulation: Modulation | None = None,
) -> PathTable:
    """The `k` best loopless paths of every pair (all of them by default).

    `by` is "km"; "hops" (ties: km); or "efficiency": hops / (bit/s per Hz), which is the spectrum that a request
    takes, by `modulation` (ties: km). Further ties are settled by km, hops and the names of the nodes, so that a
    table does not depend on the order of the file. A path and its reverse have the same place.
    """
    _expect_sound(k, by, modulation)
    asked = tuple(pairs) if pairs is not None else None
    num_nodes = len(network.nodes)
    if not asked and num_nodes * (num_nodes - 1) > MAX_PAIRS:
        raise InputError(
            f"{network.name}: the paths of all pairs of {num_nodes} nodes would take too long to find (at most "
            f"{MAX_PAIRS} pairs); give a trace, whose pairs alone are needed, or a table of paths"
        )
    candidates = _Candidates(network, k, by, modulation)
    return PathTable(network, {pair: candidates.of(pair) for pair in (asked or all_pairs(network))})


def _expect_sound(k: int, by: str, modulation: Modulation | None) -> None:
    if by not in PATH_ORDERS:
        raise UsageError(
            f"there is no order of paths {by!r}{nearest(by, PATH_ORDERS)}; known: {', '.join(PATH_ORDERS)}"
        )
    if by == "efficiency" and modulation is None:
        raise UsageError("paths by efficiency need a modulation table")
    if not 1 <= k <= MAX_K:
        raise UsageError(f"the number of paths must be from 1 to {MAX_K}, found {k}")


class _Candidates:
    """Finds and sorts paths, each pair of nodes once for both directions."""

    def __init__(self, network: Network, k: int, by: str, modulation: Modulation | None) -> None:
        self._network, self._k, self._by, self._modulation = network, k, by, modulation
        self._listed = len(network.edges) - len(network.nodes) + 1 <= _MAX_CYCLES
        self._names = sorted(network.nodes)
        self._rank = {node: index for index, node in enumerate(self._names)}
        self._found: dict[Pair, tuple[Nodes, ...]] = {}
        neighbours: dict[int, dict[int, float]] = {index: {} for index in range(len(self._names))}
        hop_km = 2.0 * sum(edge.km for edge in network.edges)
        for (a, b), km in network.km.items():
            neighbours[self._rank[a]][self._rank[b]] = 1.0 + km / hop_km if by == "hops" else km
        self._simple_paths = SimplePaths(neighbours)

    def of(self, pair: Pair) -> tuple[Nodes, ...]:
        """The best paths of `pair`."""
        source, target = sorted(pair)
        if (source, target) not in self._found:
            keyed = sorted((self._key(nodes), nodes) for nodes in self._pool(source, target))
            self._found[source, target] = tuple(nodes for _, nodes in keyed[: self._k])
        found = self._found[source, target]
        return found if pair == (source, target) else tuple(nodes[::-1] for nodes in found)

    def _key(self, nodes: Nodes) -> tuple[Any, ...]:
        km, hops = self._network.path_km(nodes), len(nodes) - 1
        names = tuple(self._rank[node] for node in nodes)
        if self._by == "km":
            return (km, hops, names)
        if self._by == "hops":
            return (hops, km, names)
        bits = self._modulation.efficiency(km) if self._modulation else 1.0
        return (hops / bits if bits else float("inf"), km, hops, names)

    def _pool(self, source: str, target: str) -> Iterator[Nodes]:
        """Enough paths to hold the best k: the shortest ones, and at most 4 k + 8 of them.

        By efficiency these are all in a small network, else the 4 k shortest: what takes least spectrum is not far from
        these.
        """
        found = self._simple_paths.between(self._rank[source], self._rank[target])
        generated = (tuple(self._names[index] for index in path) for path in found)
        if self._by == "efficiency":
            yield from generated if self._listed else islice(generated, 4 * self._k)
            return
        worst = float("inf")
        for count, nodes in enumerate(islice(generated, 4 * self._k + 8), start=1):  # ties with the k-th
            cost = self._key(nodes)[0]
            if cost > worst * (1 + 1e-12):
                return
            if count == self._k:
                worst = cost
            yield nodes


class SimplePaths:
    """Paths without loops of an undirected graph, given as the positive lengths to every node's neighbours.

    Yen's method (1971) with Lawler's division: the heap has disjoint sets of paths, each those with one beginning, and
    a lower bound of their lengths. When its turn comes, the shortest path from its end to the target mostly misses the
    beginning; else a search around the beginning finds its shortest, and it gets another turn.
    """

    def __init__(self, neighbours: Mapping[int, Mapping[int, float]]) -> None:
        self._neighbours = neighbours
        self._trees: dict[int, tuple[dict[int, float], dict[int, int]]] = {}

    def between(self, source: int, target: int) -> Iterator[Route]:
        """All paths from `source` to `target`."""
        rest, onward = self._tree(target)
        heap: list[tuple[float, Route, float, Route | None]] = []
        if source in rest:
            heap.append((rest[source], (source,), 0.0, None))
        while heap:
            bound, begin, length, tail = heappop(heap)
            if tail is None and (tail := _straight(begin, target, onward)) is None:
                if found := self._around(begin, target, rest):
                    heappush(heap, (max(bound, length + found[0]), begin, length, found[1]))
                continue
            yield begin + tail
            for node in tail:
                near = self._neighbours[begin[-1]]
                for other, far in near.items():
                    if other != node and other not in begin and other in rest:
                        heappush(heap, (length + far + rest[other], (*begin, other), length + far, None))
                begin, length = (*begin, node), length + near[node]

    def _tree(self, target: int) -> tuple[dict[int, float], dict[int, int]]:
        """Length to `target` from every node that reaches it, and the next node on that way."""
        if target not in self._trees:
            rest, onward = dict[int, float](), dict[int, int]()
            heap = [(0.0, target, target)]
            while heap:
                length, node, after = heappop(heap)
                if node not in rest:
                    rest[node], onward[node] = length, after
                    for other, far in self._neighbours[node].items():
                        heappush(heap, (length + far, other, node))
            self._trees[target] = rest, onward
        return self._trees[target]

    def _around(self, begin: Route, target: int, rest: Mapping[int, float]) -> Found | None:
        """The shortest path from the end of `begin` to `target` that visits no node of it again (A*)."""
        before, closed = dict[int, int](), set(begin[:-1])
        heap = [(rest[begin[-1]], 0.0, begin[-1], begin[-1])]
        while heap:
            _, length, node, last = heappop(heap)
            if node in closed:
                continue
            closed.add(node)
            before[node] = last
            if node == target:
                return length, _back(before, begin[-1], target)
            for other, far in self._neighbours[node].items():
                if other not in closed:
                    heappush(heap, (length + far + rest[other], length + far, other, node))
        return None


def _straight(begin: Route, target: int, onward: Mapping[int, int]) -> Route | None:
    """The shortest path from the end of `begin` to `target`; None if it meets `begin`."""
    tail, node = list[int](), begin[-1]
    while node != target:
        node = onward[node]
        if node in begin:
            return None
        tail.append(node)
    return tuple(tail)


def _back(before: Mapping[int, int], source: int, target: int) -> Route:
    tail = [target]
    while tail[-1] != source:
        tail.append(before[tail[-1]])
    return tuple(tail[-2::-1])


def load_paths(path: Path | str, network: Network) -> PathTable:
    """Read a table of paths: CSV with the columns src, dst, order, nodes (joined by ``-``), km; best first."""
    rows = read_rows(path, ("src", "dst", "order", "nodes", "km"))
    found: dict[Pair, dict[float, Nodes]] = {}
    for place, row in rows:
        pair = (network.expect_node(row["src"], place), network.expect_node(row["dst"], place))
        nodes = _nodes(row, pair, network, place)
        order = number(place, "order", row["order"])
        if order in found.setdefault(pair, {}):
            raise InputError(f"{place}: order: {pair[0]} to {pair[1]} has a path {order:g} already")
        km = number(place, "km", row["km"], exclusive=True)
        if abs(km - network.path_km(nodes)) > 1e-6 * km:
            raise InputError(
                f"{place}: km: the edges of this path add up to {network.path_km(nodes):g} km, found {km:g}"
            )
        found[pair][order] = nodes
    if not found:
        raise InputError(f"{path}: a table of paths needs at least one row")
    return PathTable(network, {pair: tuple(paths[i] for i in sorted(paths)) for pair, paths in found.items()})


def _nodes(row: dict[str, str], pair: Pair, network: Network, place: str) -> Nodes:
    nodes = tuple(network.expect_node(name, place) for name in row["nodes"].split("-"))
    if (nodes[0], nodes[-1]) != pair or len(nodes) < 2:
        raise InputError(f"{place}: nodes: expected a path from {pair[0]} to {pair[1]}, found {row['nodes']!r}")
    for ends in pairwise(nodes):
        if ends not in network.km:
            raise InputError(f"{place}: nodes: there is no edge between {ends[0]} and {ends[1]}")
    if len(set(nodes)) < len(nodes):
        raise InputError(f"{place}: nodes: the path visits a node twice")
    return nodes
