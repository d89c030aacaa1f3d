"""Network: nodes joined by fibres, each with its own spectrum; read strictly from CSV or JSON."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.spec.cluster import MAX_FIBRE_KM
from farpipe.core.strict import expect_format, nearest, parse_json, read_csv, read_text

FORMAT: Final = "farpipe/network/1"
MAX_FIBRES: Final = 64
"""Parallel fibres of one edge."""


@dataclass(frozen=True)
class Edge:
    """Two nodes joined by `num_fibres` pairs of fibres of `km` kilometres of fibre (not great-circle distance)."""

    a: str
    b: str
    km: float
    num_fibres: int = 1


@dataclass(frozen=True, repr=False)
class Network:
    """A connected graph of edges.

    Every edge has one fibre per direction, each with a spectrum of its own; in a network whose spectrum is
    `shared` both directions of an edge use one spectrum, which halves the capacity.
    """

    name: str
    edges: tuple[Edge, ...]
    shared: bool = False
    left_out: tuple[str, ...] = ()
    """Nodes of its file that have no edge here, for the file has neither lengths nor positions for them."""
    doubt: str = ""
    """Contradiction between lengths and positions of its file."""

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes in the order in which edges first name them."""
        return tuple(dict.fromkeys(node for edge in self.edges for node in (edge.a, edge.b)))

    @cached_property
    def km(self) -> dict[tuple[str, str], float]:
        """Length of every directed edge."""
        return {ends: edge.km for edge in self.edges for ends in ((edge.a, edge.b), (edge.b, edge.a))}

    @cached_property
    def fibres(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """The fibres of every directed edge, as places in the spectrum arrays."""
        places: dict[tuple[str, str], tuple[int, ...]] = {}
        count = 0
        for edge in self.edges:
            there = tuple(range(count, count + edge.num_fibres))
            count += edge.num_fibres
            back = there if self.shared else tuple(range(count, count + edge.num_fibres))
            count += 0 if self.shared else edge.num_fibres
            places[edge.a, edge.b], places[edge.b, edge.a] = there, back
        return places

    @property
    def num_fibres(self) -> int:
        """Number of spectra: one per fibre and direction, or per fibre where it is shared."""
        return sum(edge.num_fibres for edge in self.edges) * (1 if self.shared else 2)

    def fibre_names(self) -> tuple[str, ...]:
        """The directed edge of every fibre, ``"a>b"`` (``"a-b"`` where both directions share it)."""
        names = [""] * self.num_fibres
        for (a, b), places in self.fibres.items():
            for index, place in enumerate(places):
                mark = f"#{index + 1}" if len(places) > 1 else ""
                names[place] = names[place] or f"{a}{'-' if self.shared else '>'}{b}{mark}"
        return tuple(names)

    def path_km(self, nodes: Iterable[str]) -> float:
        """Length of a path over `nodes`; KeyError where two of them are not neighbours."""
        there = list(nodes)
        return sum(self.km[ends] for ends in itertools.pairwise(there))

    def expect_node(self, node: str, place: str) -> str:
        """`node` if the network has it; InputError with the nearest name otherwise."""
        if node not in self.nodes:
            raise InputError(f"{place}: there is no node {node!r} in {self.name}{nearest(node, self.nodes)}")
        return node

    def __repr__(self) -> str:
        lengths = [edge.km for edge in self.edges]
        kind = "shared by both directions" if self.shared else "directed"
        return (
            f"Network {self.name}: {len(self.nodes)} nodes, {len(self.edges)} edges of {min(lengths):g} to "
            f"{max(lengths):g} km, {self.num_fibres} fibres ({kind})"
        )


def build_network(
    name: str, rows: Iterable[tuple[str, Mapping[str, Any]]], *, shared: bool = False, given: Iterable[str] = ()
) -> Network:
    """The network of `rows`, each with the place to name in errors and its figures a, b, km and optionally fibres.

    `given` are the nodes of its file, of which some may have no edge in `rows`. InputError for a length that is not a
    positive number, a loop, a duplicate edge, or nodes that can't be reached.
    """
    edges: dict[frozenset[str], Edge] = {}
    for place, row in rows:
        edge = _edge(place, row)
        ends = frozenset((edge.a, edge.b))
        if ends in edges:
            raise InputError(
                f"{place}: the edge {edge.a}-{edge.b} is there already; for parallel fibres give one row "
                "with their number in the column 'fibres'"
            )
        edges[ends] = edge
    if not edges:
        raise InputError(f"{name}: a network needs at least one edge between two nodes, with its km of fibre")
    known = {node for ends in edges for node in ends}
    network = Network(name, tuple(edges.values()), shared, tuple(node for node in given if node not in known))
    _expect_connected(network)
    return network


def load_network(path: Path | str, *, shared: bool = False) -> Network:
    """Read a network file: CSV with the columns a, b, km and optionally fibres, or JSON ``farpipe/network/1``."""
    if Path(path).suffix == ".json":
        return network_from_data(parse_json(read_text(path), str(path)), str(path), shared=shared)
    return build_network(Path(path).stem, read_rows(path, ("a", "b", "km"), ("fibres",)), shared=shared)


def network_from_data(data: Any, source: str, *, shared: bool = False) -> Network:
    """Read JSON data in the format ``farpipe/network/1``."""
    body = expect_format(data, FORMAT, source)
    for key in body:
        if key not in ("name", "shared", "edges"):
            raise InputError(f"{source}: {key}: unknown key{nearest(key, ('name', 'shared', 'edges'))}")
    edges = body.get("edges")
    if not isinstance(edges, list) or not all(isinstance(edge, dict) for edge in edges):
        raise InputError(f"{source}: edges: expected a list of objects with a, b and km")
    own = body.get("shared", False)
    if not isinstance(own, bool):
        raise InputError(f"{source}: shared: expected true or false, found {own!r}")
    rows = []
    for index, edge in enumerate(edges):
        _expect_keys(edge, place := f"{source}: edges[{index}]")
        rows.append((f"{place}, {edge['a']}-{edge['b']}", edge))
    return build_network(str(body.get("name", source)), rows, shared=shared or own)


def read_rows(
    path: Path | str, needed: tuple[str, ...], optional: tuple[str, ...] = ()
) -> list[tuple[str, dict[str, str]]]:
    """The rows of a CSV file by column, each with its place for errors; InputError for wrong columns."""
    header, rows = read_csv(path)
    for name in needed:
        if name not in header:
            raise InputError(
                f"{path}: the column {name!r} is missing; expected {','.join(needed)}, found {','.join(header)[:100]}"
            )
    for name in header:
        if name not in (*needed, *optional):
            raise InputError(f"{path}: unknown column {name!r}{nearest(name, (*needed, *optional))}")
    return list(rows)


def number(
    place: str, column: str, value: Any, *, least: float = 0.0, most: float = math.inf, exclusive: bool = False
) -> float:
    """A finite number from a cell; InputError with place, column and value otherwise."""
    if value is None or value == "":
        raise InputError(f"{place}: {column}: missing, expected a number")
    try:
        found = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise InputError(f"{place}: {column}: expected a number, found {value!r}")
    if found < least or (exclusive and found == least):
        raise InputError(
            f"{place}: {column}: must be {'more than' if exclusive else 'at least'} {least:g}, found {value}"
        )
    if found > most:
        raise InputError(f"{place}: {column}: must be at most {most:g}, found {value}")
    return found


def _expect_keys(edge: dict[str, Any], place: str) -> None:
    """InputError for keys that are unknown or missing."""
    for key in edge:
        if key not in ("a", "b", "km", "fibres"):
            raise InputError(f"{place}: {key}: unknown key{nearest(key, ('a', 'b', 'km', 'fibres'))}")
    for key in ("a", "b", "km"):
        if key not in edge:
            raise InputError(f"{place}: {key}: missing")


def _edge(place: str, row: Mapping[str, Any]) -> Edge:
    a, b = (str(row[key]) for key in ("a", "b"))
    if not a or not b or any(c in name for name in (a, b) for c in ">,"):
        raise InputError(f"{place}: a node needs a name without '>' and ',', found {a!r} and {b!r}")
    if a == b:
        raise InputError(f"{place}: a fibre from {a} to itself")
    fibres = number(place, "fibres", row.get("fibres", 1), least=1)
    if fibres != int(fibres) or fibres > MAX_FIBRES:
        raise InputError(f"{place}: fibres: expected a whole number from 1 to {MAX_FIBRES}, found {row['fibres']}")
    km = number(place, "km", row["km"], exclusive=True)
    if km > MAX_FIBRE_KM:
        raise InputError(
            f"{place}: km: {km:,g} km of fibre are more than half of the Earth's circumference ({MAX_FIBRE_KM:,g} km); "
            "are the lengths metres? Give kilometres"
        )
    return Edge(a, b, km, int(fibres))


def _expect_connected(network: Network) -> None:
    neighbours: dict[str, list[str]] = {node: [] for node in network.nodes}
    for a, b in network.km:
        neighbours[a].append(b)
    seen, left = {network.nodes[0]}, [network.nodes[0]]
    while left:
        for node in neighbours[left.pop()]:
            if node not in seen:
                seen.add(node)
                left.append(node)
    apart = [node for node in network.nodes if node not in seen]
    if apart:
        without = f" without {_few(network.left_out)}, which have no position" if network.left_out else ""
        raise InputError(
            f"{network.name}: the network is not connected{without}: no path from {network.nodes[0]} to {_few(apart)}; "
            "add the missing edges or leave these nodes out"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
