"""Sites from what a scheduler says is there: Slurm's nodes (scontrol, sinfo) and tasks of SkyPilot."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from farpipe.core.catalog import DeviceRow, device_names, device_row
from farpipe.core.errors import InputError
from farpipe.core.strict import read_text, shaped
from farpipe.interop.cells import json_in, number, whole
from farpipe.interop.settings import DraftSite, Setting
from farpipe.interop.yaml_files import yaml_documents

_NODE: Final = re.compile(r"^NodeName=", re.MULTILINE)
_GPUS: Final = re.compile(r"\bgpu(?::([^:,()\s]+))?:(\d+)")
_AWAY: Final = frozenset({"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "FUTURE", "NO_RESPOND", "INVAL"})
"""States of a node on which nothing is started (slurm.schedmd.com/sinfo.html)."""
_NOT_RESPONDING: Final = re.compile(r"\*|NOT_RESPONDING", re.IGNORECASE)
"""``NO_RESPOND`` as texts and versions before 23.02 write it."""
_SLICE: Final = re.compile(r"(^|[_-])\d+g\.\d+gb", re.IGNORECASE)
"""A part of a GPU (MIG), such as ``a100_3g.20gb``."""
_MAKERS: Final = frozenset({"nvidia", "tesla", "amd", "instinct", "geforce"})
_LEFT_OUT: Final = tuple(
    map(re.compile, ("hbm3e?", r"hbm3e?|\d+gb", r"hbm3e?|sxm\d?|oam|pcie", r"hbm3e?|\d+gb|sxm\d?|oam|pcie"))
)
"""Words of a device's name that the catalogue may leave out where they agree with its row: fewest first."""
_RESOURCES: Final = frozenset(
    {"accelerators", "any_of", "ordered", "infra", "cloud", "region", "zone", "instance_type", "use_spot", "cpus"}
)
"""Resources that a task of SkyPilot asks for."""
_PCIE_BYTES_PER_S: Final = 64e9
"""Rate of PCIe 5.0 x16: what links faster inside a machine is no card."""
_AGREE: Final = 0.12
"""Largest relative difference of a memory that a name tells and that of which the driver reports."""
_SKYPILOT: Final = {"a100": "a100-40gb"}
"""Names that are another device there than in the catalogue (docs.skypilot.co, `sky show-gpus`: A100-80GB is apart)."""


class FoundSites(NamedTuple):
    """Sites, and what of the file could not be used, in words."""

    sites: list[DraftSite]
    notes: list[str]


class Node(NamedTuple):
    """Machines of one kind: their name, state, generic resources, and how many there are."""

    name: str
    states: frozenset[str]
    resources: str
    num_nodes: int = 1


def read_sites(path: Path, device: str) -> FoundSites | None:
    """The sites that the file at `path` describes, one per kind of device; None for a file of another kind.

    `device` is what GPUs are whose type the scheduler does not say. InputError where no GPU can be used.
    """
    with shaped(str(path), "what a scheduler says of its machines"):
        return _sites_of(read_text(path), path, device)


def _sites_of(text: str, path: Path, device: str) -> FoundSites | None:
    if path.suffix in (".yaml", ".yml"):
        tasks = [one for one in yaml_documents(text, str(path)) if _is_task(one)]
        return FoundSites([_of_task(task, path, number) for number, task in enumerate(tasks)], []) if tasks else None
    data = json_in(text, str(path))
    if isinstance(data, Mapping):
        nodes, cluster = _nodes_of_json(data, path), _cluster_of(data)
    else:
        nodes, cluster = _nodes_of_text(text), ""
    return None if nodes is None else _of_slurm(nodes, cluster or path.name.partition(".")[0], path, device)


def _nodes_of_text(text: str) -> list[Node] | None:
    """Records of ``scontrol show nodes``, on one line each or on several."""
    if not _NODE.search(text):
        return None
    found = []
    for record in _NODE.split(text)[1:]:
        fields = dict(re.findall(r"\b(Gres|State)=(\S+)", record))
        found.append(Node(record.split()[0], _states(fields.get("State", "")), fields.get("Gres", "")))
    return found


def _nodes_of_json(data: Mapping[str, Any], path: Path) -> list[Node] | None:
    """Nodes of ``scontrol show nodes --json`` (and of sinfo before 23.02), or groups of nodes of ``sinfo --json``."""
    if isinstance(nodes := data.get("nodes"), list) and all(_is_node(node) for node in nodes):
        return [
            Node(str(at.get("name")), _states(at.get("state")) | _states(at.get("state_flags")), str(at.get("gres")))
            for at in nodes
        ]
    groups = data.get("sinfo")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) and "nodes" in group for group in groups):
        return None
    return [node for group in groups for node in _nodes_of_group(group, path)]


def _is_node(node: Any) -> bool:
    """True for a node of Slurm, and not of a graph."""
    return isinstance(node, Mapping) and {"name", "gres"} <= node.keys()


def _nodes_of_group(group: Any, path: Path) -> list[Node]:
    try:
        nodes, states, gres = group["nodes"], _states(group["node"]["state"]), str(group["gres"]["total"])
        if isinstance(names := nodes.get("nodes"), list) and names:
            return [Node(name, states, gres) for name in names]
        return [Node("", states, gres, int(nodes["total"]))]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(
            f"{path}: sinfo: expected groups with nodes.total, node.state and gres.total, as sinfo --json writes them, "
            f"found {str(group)[:80]}; `scontrol show nodes` will do as well"
        ) from None


def _states(value: Any) -> frozenset[str]:
    words = value if isinstance(value, list) else [value or ""]
    parts = (re.split(r"[+~#$@^!%-]", _NOT_RESPONDING.sub("+NO_RESPOND", str(word))) for word in words)
    return frozenset(part.upper() for each in parts for part in each if part)


def _cluster_of(data: Mapping[str, Any]) -> str:
    """The name of Slurm's cluster, where its version says it."""
    with suppress(KeyError, TypeError, AttributeError):
        return str(data["meta"]["slurm"]["cluster"])
    return ""


def _of_slurm(nodes: Iterable[Node], cluster: str, path: Path, device: str) -> FoundSites:
    """Nodes that can be used, by kind and number of their GPUs; one that is in several partitions counts once."""
    once = {node.name or index: node for index, node in enumerate(nodes)}.values()
    up = [node for node in once if not node.states & _AWAY]
    counts = Counter[tuple[str, int]]()
    for node in up:
        for kind, each in _GPUS.findall(node.resources):
            counts[kind, int(each)] += node.num_nodes
    away = sum(node.num_nodes for node in once) - sum(node.num_nodes for node in up)
    notes = [f"{path.name}: {away} nodes left out, which are down or drained"] if away else []
    sites = []
    for (kind, each), num_nodes in counts.items():
        found = _device(kind) if kind else device
        if not found:
            notes.append(f"{path.name}: {num_nodes} nodes with {each} {kind!r}, which is not in the catalogue")
        elif each:
            notes += [f"{path.name}: {doubt}" for doubt in (_open_kind(kind, found),) if doubt and kind]
            name = cluster if len(counts) == 1 else f"{cluster}-{kind or 'gpu'}-{each}"
            origin = f"{path.name}, Gres"
            of_kind = Setting(found, origin if kind else f"--site: {origin} has no type")
            sites.append(DraftSite(name, of_kind, Setting(num_nodes * each, origin), Setting(each, origin)))
    if not sites:
        raise InputError(
            "; ".join([f"{path}: no node that is up has GPUs of the catalogue (Gres=gpu:TYPE:NUMBER)", *notes])
        )
    return FoundSites(sites, notes)


def _device(kind: str) -> str:
    """The catalogue's name for a scheduler's, or none.

    Only words that say nothing else than the catalogue's row are left out: a card (PCIe, NVL) is no module (SXM), a
    Ti no plain one, and another memory another device. Parts of a GPU have none.
    """
    if _SLICE.search(kind):
        return ""
    words = _words(kind)
    with suppress(ValueError):
        return device_row("-".join(words)).name
    for pattern in _LEFT_OUT:
        with suppress(ValueError):
            row = device_row("-".join(word for word in words if not pattern.fullmatch(word)))
            if all(_agrees(word, row) for word in words):
                return row.name
    return ""


def _words(kind: str) -> list[str]:
    return [word for word in re.split(r"[-_\s]+", kind.lower()) if word not in _MAKERS]


def _agrees(word: str, row: DeviceRow) -> bool:
    """False for a form or a memory of a device that its row of the catalogue has not."""
    is_card = row.machine_link.bandwidth_bytes_per_s <= _PCIE_BYTES_PER_S
    if match := re.fullmatch(r"(\d+)gb", word):
        return f"-{word}" in f"-{row.name}" or abs(int(match[1]) * 2**30 / row.memory_bytes - 1) < _AGREE
    return (word != "pcie" or is_card) and not (is_card and re.fullmatch(r"sxm\d?|oam", word))


def _open_kind(kind: str, found: str) -> str:
    """A sentence on a name that stands for several devices of the catalogue; empty: it stands for one.

    The driver's own names, which begin with the maker, tell a card from a module.
    """
    chip = kind.lower()
    others = [name for name in device_names() if name != found and name.startswith(f"{chip}-")]
    if not others or chip not in (found, found.partition("-")[0]):
        return ""
    return f"{kind!r} does not tell its memory and form: taken as {found}, not {' or '.join(others)}"


def _num_accelerators(count: Any, path: Path) -> float:
    """Accelerators of a node; a part of one counts as one then, as in lists of jobs."""
    asked = number(str(1 if count in (None, "") else count), f"{path}: resources.accelerators")
    if not 0 < asked < 1 << 20:
        raise InputError(f"{path}: resources.accelerators: expected 1 or more of a node, found {str(count)[:40]!r}")
    return asked


def _is_task(document: Any) -> bool:
    """True for a task of SkyPilot, or the settings of one of its clusters; not for a container's resources."""
    resources = document.get("resources") if isinstance(document, Mapping) else None
    return isinstance(resources, Mapping) and bool(resources.keys() & _RESOURCES)


def _of_task(task: Mapping[str, Any], path: Path, number: int) -> DraftSite:
    resources = task["resources"]
    if "any_of" in resources or "ordered" in resources:
        raise InputError(f"{path}: resources has several choices (any_of or ordered); leave the one that you have")
    wanted = resources.get("accelerators")
    pairs = [*wanted.items()] if isinstance(wanted, Mapping) else [str(wanted or "").partition(":")[::2]]
    if len(pairs) != 1 or not pairs[0][0] or isinstance(wanted, list | set):
        raise InputError(f"{path}: resources.accelerators: expected one kind such as H100:8, found {wanted!r}")
    kind, asked = str(pairs[0][0]), _num_accelerators(pairs[0][1], path)
    each = math.ceil(asked)
    if not (found := _SKYPILOT.get(kind.lower()) or _device(kind)):
        raise InputError(f"{path}: {kind!r} is not in the catalogue; see `farpipe list devices`")
    nodes = whole(task.get("num_nodes") or 1, f"{path}: num_nodes")
    where = str(resources.get("infra") or resources.get("region") or "").replace("/", "-").replace("*", "")
    name = str(task.get("name") or where.strip("-") or f"site-{number}")
    origin = f"{path.name}, resources.accelerators" + ("" if each == asked else f" (part of one, {asked:g}: as one)")
    return DraftSite(
        re.sub(r"[^\w.-]", "-", name),
        Setting(found, origin),
        Setting(nodes * each, f"{origin} x num_nodes"),
        Setting(each, origin),
    )
