"""Networks by name (topohub, gnpy), and files of others: gnpy, SNDlib (XML, native), node-link JSON, GraphML, GML."""

import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from farpipe.core.errors import InputError, UsageError
from farpipe.core.strict import nearest, parse_json, read_text
from farpipe.optical.network import Edge, Network, build_network, load_network, number

Attributes = Mapping[str, Any]
Position = tuple[Any, Any]
FIBRE_KM_KEYS: Final = ("km", "length", "weight", "distance")
"""Keys of an edge's length in km of fibre, the first that is there."""
TOO_SHORT: Final = 0.9
"""Fibre km over the great circle's below which they contradict each other; 2 km are for rounded positions."""
TOO_LONG: Final = 5.0
"""Median of that ratio beyond which lengths seem to have another unit; the highest of 121 networks of XLRON is 2.5."""
_LONGITUDE, _LATITUDE = ("lon", "longitude", "x"), ("lat", "latitude", "y")
_EARTH_KM: Final = 6371.0
_NAMESPACE: Final = re.compile(r"\{.*?\}")
_YANG: Final = "gnpy-network-topology:topology"
"""Key of the elements in gnpy's JSON by YANG."""
_GML_GRAPH: Final = re.compile(r"^\s*graph\s*\[", re.M)
_SNDLIB_LINE: Final = re.compile(r"^\s*(\S+)\s*\(\s*(\S+)\s+(\S+)\s*\)")


@dataclass(frozen=True)
class Graph:
    """A topology as a file has it: names and positions (longitude, latitude) of nodes, edges with their attributes."""

    names: Mapping[Any, str | None]
    positions: Mapping[Any, Position]
    edges: list[tuple[Any, Any, Attributes]]


def load_topology(path: Path | str, *, shared: bool = False) -> Network:
    """Read a network file of any known format; InputError with the place of whatever is wrong in it."""
    source, kind = str(path), Path(path).suffix.lower()
    readers = {".xml": _of_xml, ".graphml": _of_xml, ".gml": _of_gml, ".txt": _of_text}
    if kind not in (".csv", ".json", *readers):
        raise InputError(f"{source}: a network is a file .csv, .json, .xml, .graphml, .gml or .txt")
    if kind == ".csv":
        return load_network(path, shared=shared)
    text = read_text(path)
    data = parse_json(text, source) if kind == ".json" else None
    if kind == ".json" and not (isinstance(data, dict) and {"elements", "nodes", _YANG} & data.keys()):
        return load_network(path, shared=shared)
    with _as_input_errors(source):
        if data is not None:
            return network_of_data(Path(path).stem, data, source, shared=shared)
        return _network(Path(path).stem, readers[kind](text, source), source, shared=shared)


@contextmanager
def _as_input_errors(source: str) -> Iterator[None]:
    """InputError for whatever reading a file of the wrong form raises."""
    import networkx

    wrong = (networkx.NetworkXException, ElementTree.ParseError, LookupError, ValueError, TypeError, AttributeError)
    try:
        yield
    except InputError:
        raise
    except (*wrong, RecursionError) as error:
        what = f"an entry lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise InputError(f"{source}: not a network in the format of its name: {what}") from None


def network_of_data(name: str, data: dict[str, Any], source: str, *, shared: bool = False) -> Network:
    """Network of gnpy's JSON (elements and connections) or of node-link JSON (nodes, and links or edges)."""
    data = data.get(_YANG, data)
    if "elements" in data:
        return _network(name, _of_elements(data, source), source, shared=shared)
    nodes = _by_name(data["nodes"], "id", source)
    edges = [(edge["source"], edge["target"], edge) for edge in data["links" if "links" in data else "edges"]]
    return _network(name, _graph(nodes, edges), source, shared=shared)


def _by_name(entries: list[dict[str, Any]], key: str, source: str) -> dict[Any, dict[str, Any]]:
    """Entries by their `key`; InputError for one that is there twice."""
    found: dict[Any, dict[str, Any]] = {}
    for index, entry in enumerate(entries):
        if entry[key] in found:
            raise InputError(f"{source}: entry {index}: {key} {entry[key]!r} is there already; give each another")
        found[entry[key]] = entry
    return found


def fibre_km(great_circle_km: float) -> float:
    """Fibre length estimated from the great-circle distance, at least 1 km, by the rule of ITU-T G.826, annex A.

    1.5 times below 1000 km, 1500 km up to 1200 km, 1.25 times beyond.
    """
    if great_circle_km < 1000:
        return max(1.0, 1.5 * great_circle_km)
    return max(1500.0, 1.25 * great_circle_km)


def _graph(nodes: Mapping[Any, Attributes], edges: list[tuple[Any, Any, Attributes]]) -> Graph:
    """Graph of nodes with attributes; a position is ``pos`` or a pair such as ``Longitude`` and ``Latitude``."""
    names, positions = {}, {}
    for node, given in nodes.items():
        lowered = {key.lower(): value for key, value in given.items()}
        names[node] = lowered.get("name") or lowered.get("label")
        ends = [next((lowered[key] for key in keys if key in lowered), None) for keys in (_LONGITUDE, _LATITUDE)]
        position = lowered.get("pos") or ends
        if None not in position:
            positions[node] = (position[0], position[1])
    return Graph(names, positions, edges)


def _network(name: str, graph: Graph, source: str, *, shared: bool) -> Network:
    """The network of a graph; of parallel edges the shortest, loops and nodes without a known edge left out."""
    names, keys = _names(graph.names), _length_keys(graph)
    edges: dict[frozenset[str], tuple[str, str, float]] = {}
    for index, (a, b, attributes) in enumerate(graph.edges):
        for node in (a, b):
            if node not in names:
                raise InputError(f"{source}: edge {index}: there is no node {node!r}")
        place, ends = f"{source}: edge {index}, {names[a]}-{names[b]}", frozenset((names[a], names[b]))
        km = _edge_km(place, graph, (a, b), attributes, keys)
        if km is not None and len(ends) == 2 and (ends not in edges or km < edges[ends][2]):
            edges[ends] = (names[a], names[b], km)
    if graph.edges and not edges:
        raise InputError(
            f"{source}: no edge between two nodes has a length: give km of fibre as one of {', '.join(FIBRE_KM_KEYS)} "
            "(weights that are all 1 are none), or longitude and latitude of the nodes"
        )
    left_out = tuple(dict.fromkeys(names[node] for a, b, _ in graph.edges for node in (a, b)))
    network = build_network(name, rows_of(source, edges.values()), shared=shared, given=left_out)
    at = {names[node]: place for node, place in graph.positions.items()}
    return replace(network, doubt=_doubt([(edge, circle) for edge in network.edges if (circle := _apart_km(edge, at))]))


def _doubt(lengths: Sequence[tuple[Edge, float]]) -> str:
    """Contradiction between fibre km and great circles, with the worst edge and both its figures; empty: none."""
    by_ratio = sorted(lengths, key=lambda each: each[0].km / each[1])
    short = [edge for edge, circle in lengths if edge.km < TOO_SHORT * circle - 2]
    if short:
        edge, circle = by_ratio[0]
        what = f"edges shorter than the great circle between their ends: {len(short)} of {len(lengths)}, the worst"
    elif lengths and (middle := by_ratio[len(lengths) // 2])[0].km > TOO_LONG * middle[1]:
        edge, circle = by_ratio[-1]
        what = f"half of the edges are more than {TOO_LONG:g} times as long as the great circle (metres?), the longest"
    else:
        return ""
    figures = f"{edge.a}-{edge.b} with {edge.km:.4g} km of fibre for {circle:.4g} km"
    return f"{what} {figures}; lengths are taken as they are: check their unit (km) and the positions"


def _apart_km(edge: Edge, at: Mapping[str, Position]) -> float:
    """Great circle between the ends of an edge; 0 where positions are missing, drawings (whole numbers), or one."""
    try:
        ends = [(float(at[node][0]), float(at[node][1])) for node in (edge.a, edge.b)]
    except (KeyError, TypeError, ValueError):
        return 0.0
    if all(x.is_integer() and y.is_integer() for x, y in ends) or any(abs(x) > 180 or abs(y) > 90 for x, y in ends):
        return 0.0
    a, b = ((math.radians(x), math.radians(y)) for x, y in ends)
    return _great_circle_km(a, b)


def _length_keys(graph: Graph) -> tuple[str, ...]:
    """Keys of lengths in this graph: weights that are all 1 are what graph libraries write, and no km."""
    weights = {str(attributes.get("weight")) for _, _, attributes in graph.edges}
    return tuple(key for key in FIBRE_KM_KEYS if key != "weight" or not weights <= {"1", "1.0"})


def _edge_km(
    place: str, graph: Graph, ends: tuple[Any, Any], attributes: Attributes, keys: Sequence[str]
) -> float | None:
    """Fibre km of an edge: given, or estimated from the great circle, ``dist`` or between positions; None: unknown."""
    for key in keys:
        if key in attributes:
            return number(place, key, attributes[key], exclusive=True)
    if "dist" in attributes:
        return fibre_km(number(place, "dist", attributes["dist"]))
    if not all(node in graph.positions for node in ends):
        return None
    return fibre_km(_great_circle_km(*(_radians(f"{place}: node {node!r}", graph.positions[node]) for node in ends)))


def _radians(place: str, position: Position) -> tuple[float, float]:
    """Longitude and latitude; InputError for pixels."""
    longitude, latitude = (number(place, "position", value, least=-math.inf) for value in position)
    if abs(longitude) > 180 or abs(latitude) > 90:
        raise InputError(
            f"{place}: expected longitude and latitude in degrees, found {longitude:g}, {latitude:g}; from pixels no "
            f"length follows: give edges their km of fibre ({', '.join(FIBRE_KM_KEYS)}), or write them as CSV (a,b,km)"
        )
    return math.radians(longitude), math.radians(latitude)


def _great_circle_km(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Distance on the sphere (haversine)."""
    half = math.sin((b[1] - a[1]) / 2) ** 2 + math.cos(a[1]) * math.cos(b[1]) * math.sin((b[0] - a[0]) / 2) ** 2
    return 2 * _EARTH_KM * math.asin(math.sqrt(min(1.0, half)))


def _names(given: Mapping[Any, Any]) -> dict[Any, str]:
    """Names without the signs that stand between nodes; the source's numbers where they are missing or not unique."""
    clean = {key: _clean(str(name or "")) for key, name in given.items()}
    unique = len(set(clean.values())) == len(clean) and all(clean.values())
    return clean if unique else {key: _clean(str(key)) for key in given}


def _clean(name: str) -> str:
    return "".join("_" if c in ">,-" else c for c in name)


def rows_of(source: str, edges: Iterable[tuple[Any, Any, float]]) -> list[tuple[str, dict[str, Any]]]:
    """Rows of `build_network`."""
    return [
        (f"{source}: edge {index}, {a}-{b}", {"a": str(a), "b": str(b), "km": km})
        for index, (a, b, km) in enumerate(edges)
    ]


def _of_xml(text: str, source: str) -> Graph:
    """Graph of SNDlib's XML or of GraphML; a document type, and with it any entity, is refused."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise InputError(f"{source}: a document type (DTD) is not read, for entities can grow without end; delete it")
    root = ElementTree.fromstring(text)
    if _NAMESPACE.sub("", root.tag) == "graphml":
        import networkx

        return _of_networkx(networkx.parse_graphml(text))
    nodes: dict[str, Attributes] = {}
    edges: list[tuple[Any, Any, Attributes]] = []
    for element in root.iter():
        kind, words = _NAMESPACE.sub("", element.tag), {_NAMESPACE.sub("", e.tag): e.text for e in element.iter()}
        if kind == "node":
            nodes[element.attrib["id"]] = {"name": element.attrib["id"], "x": words.get("x"), "y": words.get("y")}
        elif kind == "link":
            edges.append((words["source"], words["target"], {}))
    return _graph(nodes, edges)


def _of_gml(text: str, source: str) -> Graph:
    """Graph of GML; parallel edges need no ``multigraph 1``, which the Topology Zoo's files lack."""
    import networkx

    several = text if re.search(r"^\s*multigraph\s", text, re.M) else _GML_GRAPH.sub(r"\g<0> multigraph 1\n", text, 1)
    return _of_networkx(networkx.parse_gml(several, label="id"))


def _of_networkx(graph: Any) -> Graph:
    return _graph(dict(graph.nodes(data=True)), list(graph.edges(data=True)))


def _of_text(text: str, source: str) -> Graph:
    """Graph of SNDlib's native format, or of optical-rl-gym's text: how many nodes and links, then lines ``a b km``."""
    if text.lstrip().startswith("?SNDlib native format"):
        return _of_native(text)
    rows = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if [len(row) for row in rows[:3]] != [1, 1, 3] or not {len(row) for row in rows[2:]} == {3}:
        raise InputError(
            f"{source}: expected SNDlib's native format, whose first line is '?SNDlib native format; ...', or "
            "optical-rl-gym's: the number of nodes, that of links, and a line 'a b km' for each link"
        )
    if len(rows) - 2 != number(source, "number of links", rows[1][0]):
        raise InputError(f"{source}: the second line says {rows[1][0]} links, found {len(rows) - 2} lines 'a b km'")
    names = {node: node for a, b, _ in rows[2:] for node in (a, b)}
    return Graph(names, {}, [(a, b, {"km": km}) for a, b, km in rows[2:]])


def _of_native(text: str) -> Graph:
    """Graph of SNDlib's native format: lines ``id ( x y )`` and ``id ( from to ) ...`` in NODES and LINKS."""
    section, nodes = "", dict[str, Attributes]()
    edges: list[tuple[Any, Any, Attributes]] = []
    for line in text.splitlines():
        heading = re.match(r"^([A-Z]+)\s*\($", line.split("#")[0].strip())
        section = heading[1] if heading else section
        found = _SNDLIB_LINE.match(line.split("#")[0])
        if found and section == "NODES":
            nodes[found[1]] = {"name": found[1], "x": found[2], "y": found[3]}
        elif found and section == "LINKS":
            edges.append((found[2], found[3], {}))
    return _graph(nodes, edges)


def _of_elements(data: dict[str, Any], source: str) -> Graph:
    """Graph of gnpy's elements: sites are ROADMs and transceivers, edges the fibres between two of them added up."""
    elements = _by_name(data["elements"], "uid", source)
    after: dict[Any, list[Any]] = {uid: [] for uid in elements}
    for index, link in enumerate(data["connections"]):
        for uid in (link["from_node"], link["to_node"]):
            if uid not in elements:
                raise InputError(f"{source}: connections[{index}]: there is no element {uid!r}{nearest(uid, elements)}")
        after[link["from_node"]].append(link["to_node"])
    ends = {uid for uid, element in elements.items() if element["type"] in ("Roadm", "Transceiver")}
    km = {uid: _span_km(element, source) for uid, element in elements.items()}
    edges: list[tuple[Any, Any, Attributes]] = []
    for uid in filter(ends.__contains__, elements):
        edges += [(uid, at, {"km": far}) for at, far in _lines(uid, ends, after, km, source) if far and at != uid]
    places = {uid: elements[uid].get("metadata", {}).get("location", {}) for a, b, _ in edges for uid in (a, b)}
    positions = {uid: (place.get("longitude"), place.get("latitude")) for uid, place in places.items()}
    return Graph({uid: place.get("city") for uid, place in places.items()}, positions, edges)


def _lines(
    begin: Any, ends: set[Any], after: Mapping[Any, list[Any]], km: Mapping[Any, float], source: str
) -> Iterator[tuple[Any, float]]:
    """Ends of the lines that begin at a site, and km to there; fused halves of an amplifier lead on and back."""
    left, seen = [(there, 0.0) for there in after[begin]], set()
    while left:
        at, far = left.pop()
        if at in ends:
            yield at, far
        elif at not in seen:
            seen.add(at)
            left += [(there, far + km[at]) for there in after[at]]
            if not after[at]:
                raise InputError(
                    f"{source}: connections: nothing follows {at!r}; a line ends at a Roadm or Transceiver"
                )


def _span_km(element: dict[str, Any], source: str) -> float:
    if element["type"] not in ("Fiber", "RamanFiber"):
        return 0.0
    length = number(f"{source}: element {element['uid']!r}", "length", element["params"]["length"])
    return length / 1000 if element["params"].get("length_units", "km") == "m" else length


NSFNET: Final = (
    *((1, 2, 1050), (1, 3, 1500), (1, 8, 2400), (2, 3, 600), (2, 4, 750), (3, 6, 1800), (4, 5, 600), (4, 11, 1950)),
    *((5, 6, 1200), (5, 7, 600), (6, 10, 1050), (6, 14, 1800), (7, 8, 750), (7, 10, 1350), (8, 9, 750), (9, 10, 750)),
    *((9, 12, 300), (9, 13, 300), (11, 12, 600), (11, 13, 750), (12, 14, 300), (13, 14, 150)),
)
"""NSFNET's 14 nodes and 22 edges with fibre km, as in DeepRMSA (Chen et al., JLT 37(16), 2019)."""


def find_network(name: str, *, shared: bool = False) -> Network:
    """The network called `name`: ``nsfnet``, ``topohub:sndlib/germany50``, ``gnpy:coronet-conus``, or a file.

    InputError for what does not exist; UsageError when the library that has it is not installed.
    """
    if name == "nsfnet":
        return build_network(name, rows_of(name, NSFNET), shared=shared)
    kind, _, rest = name.partition(":")
    if kind in ("topohub", "gnpy") and rest:
        return network_of_data(name, _packaged(name, kind, rest), name, shared=shared)
    if not Path(name).suffix and not Path(name).exists():
        raise InputError(
            f"there is no network {name!r}; give nsfnet, topohub:sndlib/NAME, topohub:topozoo/NAME, "
            "gnpy:coronet-conus, gnpy:coronet-global, or a file"
        )
    return load_topology(name, shared=shared)


_CORONET: Final = {"coronet-conus": "CORONET_CONUS_Topology.json", "coronet-global": "CORONET_Global_Topology.json"}


def _packaged(name: str, library: str, rest: str) -> Any:
    """JSON data of a topology that comes with a library."""
    if library == "gnpy" and rest not in _CORONET:
        raise InputError(f"{name}: known here: {', '.join(_CORONET)}")
    if importlib.util.find_spec(library) is None:
        raise UsageError(f"{name} comes with the package {library}: pip install 'farpipe[optical]'")
    place = ("example-data", _CORONET[rest]) if library == "gnpy" else ("data", f"{rest}.json")
    try:
        return json.loads(resources.files(library).joinpath(*place).read_text("utf-8"))  # topohub.get leaves it open
    except (OSError, ValueError):
        raise InputError(f"{name}: topohub has no topology {rest!r}; see topohub.org for the names") from None
