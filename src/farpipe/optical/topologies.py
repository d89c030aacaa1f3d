"""Topologies by name: NSFNET, SNDlib and Topology Zoo through topohub, CORONET through gnpy, or an own file."""

import importlib.util
import json
from importlib import resources
from pathlib import Path
from typing import Final

from farpipe.errors import InputError, UsageError
from farpipe.optical.network import Network, build_network
from farpipe.optical.network_files import load_topology, network_of_data, rows_of

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
    if kind == "topohub" and rest:
        return _from_topohub(name, rest, shared=shared)
    if kind == "gnpy" and rest:
        return _from_gnpy(name, rest, shared=shared)
    if not Path(name).suffix and not Path(name).exists():
        raise InputError(
            f"there is no network {name!r}; give nsfnet, topohub:sndlib/NAME, topohub:topozoo/NAME, "
            "gnpy:coronet-conus, gnpy:coronet-global, or a file"
        )
    return load_topology(name, shared=shared)


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
    return network_of_data(name, graph, name, shared=shared)


_CORONET: Final = {"coronet-conus": "CORONET_CONUS_Topology.json", "coronet-global": "CORONET_Global_Topology.json"}


def _from_gnpy(name: str, rest: str, *, shared: bool) -> Network:
    if rest not in _CORONET:
        raise InputError(f"{name}: known here: {', '.join(_CORONET)}")
    _expect_installed("gnpy", name)
    text = resources.files("gnpy").joinpath("example-data", _CORONET[rest]).read_text(encoding="utf-8")
    return network_of_data(name, json.loads(text), name, shared=shared)
