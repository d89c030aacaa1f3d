"""Simple paths of a graph between two nodes, the shortest first."""

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush

Path = tuple[int, ...]
Found = tuple[float, Path]
"""Length and nodes of what follows the end of a beginning."""


class SimplePaths:
    """Paths without loops of an undirected graph, given as the positive lengths to every node's neighbours.

    Yen's method (1971) with Lawler's division: the heap has disjoint sets of paths, each those with one beginning, and
    a lower bound of their lengths. When its turn comes, the shortest path from its end to the target mostly misses the
    beginning; else a search around the beginning finds its shortest, and it gets another turn.
    """

    def __init__(self, neighbours: Mapping[int, Mapping[int, float]]) -> None:
        self._neighbours = neighbours
        self._trees: dict[int, tuple[dict[int, float], dict[int, int]]] = {}

    def between(self, source: int, target: int) -> Iterator[Path]:
        """All paths from `source` to `target`."""
        rest, onward = self._tree(target)
        heap: list[tuple[float, Path, float, Path | None]] = []
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

    def _around(self, begin: Path, target: int, rest: Mapping[int, float]) -> Found | None:
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


def _straight(begin: Path, target: int, onward: Mapping[int, int]) -> Path | None:
    """The shortest path from the end of `begin` to `target`; None if it meets `begin`."""
    tail, node = list[int](), begin[-1]
    while node != target:
        node = onward[node]
        if node in begin:
            return None
        tail.append(node)
    return tuple(tail)


def _back(before: Mapping[int, int], source: int, target: int) -> Path:
    tail = [target]
    while tail[-1] != source:
        tail.append(before[tail[-1]])
    return tuple(tail[-2::-1])
