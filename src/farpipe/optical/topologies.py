"""Topologies by name: NSFNET, SNDlib and Topology Zoo through topohub, CORONET through gnpy, or an own file."""

import importlib.util
import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Final

from farpipe.errors import InputError, UsageError
from farpipe.optical.network import Network, build_network, load_network

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
        return build_network(name, _rows(name, NSFNET), shared=shared)
    kind, _, rest = name.partition(":")
    if kind == "topohub" and rest:
        return _from_topohub(name, rest, shared=shared)
    if kind == "gnpy" and rest:
        return _from_gnpy(name, rest, shared=shared)
    if not name.endswith((".csv", ".json")) and not Path(name).exists():
        raise InputError(
            f"there is no network {name!r}; give nsfnet, topohub:sndlib/NAME, topohub:topozoo/NAME, "
            "gnpy:coronet-conus, gnpy:coronet-global, or a CSV or JSON file"
        )
    return load_network(name, shared=shared)


def _rows(name: str, edges: Iterable[tuple[Any, Any, float]]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{name}: edge {index}", {"a": str(a), "b": str(b), "km": km}) for index, (a, b, km) in enumerate(edges)]


def _expect_installed(library: str, name: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise UsageError(f"{name} comes with the package {library}: pip install 'farpipe[optical]'")


def _from_topohub(name: str, rest: str, *, shared: bool) -> Network:
    _expect_installed("topohub", name)
    file = resources.files("topohub").joinpath("data", f"{rest}.json")  # topohub.get leaves the file open
    try:
        graph = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{name}: topohub has no topology {rest!r}; see topohub.org for the names") from None
    names = _names({node["id"]: node.get("name") for node in graph["nodes"]})
    edges: dict[frozenset[str], tuple[str, str, float]] = {}
    for edge in graph["edges"]:  # parallel edges of these sources are one edge of ours
        a, b = names[edge["source"]], names[edge["target"]]
        if a != b:
            edges.setdefault(frozenset((a, b)), (a, b, fibre_km(float(edge["dist"]))))
    return build_network(name, _rows(name, edges.values()), shared=shared)


def fibre_km(great_circle_km: float) -> float:
    """Fibre length estimated from the great-circle distance, at least 1 km, by the rule of ITU-T G.826, annex A.

    1.5 times below 1000 km, 1500 km up to 1200 km, 1.25 times beyond.
    """
    if great_circle_km < 1000:
        return max(1.0, 1.5 * great_circle_km)
    return max(1500.0, 1.25 * great_circle_km)


def _names(given: dict[Any, str | None]) -> dict[Any, str]:
    """Names without the signs that stand between nodes; the source's numbers where they are missing or not unique."""
    clean = {key: "".join("_" if c in ">,-" else c for c in name or "") for key, name in given.items()}
    unique = len(set(clean.values())) == len(clean) and all(clean.values())
    return clean if unique else {key: str(key) for key in given}


_CORONET: Final = {"coronet-conus": "CORONET_CONUS_Topology.json", "coronet-global": "CORONET_Global_Topology.json"}


def _from_gnpy(name: str, rest: str, *, shared: bool) -> Network:
    if rest not in _CORONET:
        raise InputError(f"{name}: known here: {', '.join(_CORONET)}")
    _expect_installed("gnpy", name)
    text = resources.files("gnpy").joinpath("example-data", _CORONET[rest]).read_text(encoding="utf-8")
    return build_network(name, _rows(name, _spans(json.loads(text))), shared=shared)


def _spans(data: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Edges between sites from gnpy's chain of elements: the fibres and amplifiers between two ROADMs added up."""
    kinds = {element["uid"]: element for element in data["elements"]}
    after: dict[str, list[str]] = {}
    for link in data["connections"]:
        after.setdefault(link["from_node"], []).append(link["to_node"])
    clean = {uid: _site(uid, element) for uid, element in kinds.items()}
    edges: dict[frozenset[str], tuple[str, str, float]] = {}
    for uid, element in kinds.items():
        for there in after.get(uid, []) if element["type"] == "Roadm" else []:
            at, km = there, 0.0
            while kinds[at]["type"] not in ("Roadm", "Transceiver"):
                km += _fibre_km(kinds[at])
                at = after[at][0]
            ends = frozenset((clean[uid], clean[at]))
            if km > 0 and len(ends) == 2:
                edges.setdefault(ends, (clean[uid], clean[at], km))
    return list(edges.values())


def _site(uid: str, element: dict[str, Any]) -> str:
    city = element["metadata"]["location"].get("city") or uid
    return "".join("_" if c in ">,-" else c for c in city)


def _fibre_km(element: dict[str, Any]) -> float:
    if element["type"] != "Fiber":
        return 0.0
    length = float(element["params"]["length"])
    return length / 1000 if element["params"].get("length_units", "km") == "m" else length
