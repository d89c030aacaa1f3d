"""``farpipe list models|devices|links|schedules|policies|networks|assignments|recipes``: what a command can name."""

from dataclasses import asdict
from datetime import date
from enum import StrEnum
from typing import Annotated, Any

import typer

from farpipe.cli.options import AsJson
from farpipe.cli.output import console, print_json
from farpipe.core.catalog import device_names, device_row, link_names, link_row, model_names, model_row
from farpipe.core.units import format_bytes, format_flops, format_large, format_rate, format_seconds
from farpipe.report.tables import TableView, to_rich


class Listed(StrEnum):
    """Tables of the catalogue, and names of methods."""

    MODELS = "models"
    DEVICES = "devices"
    LINKS = "links"
    SCHEDULES = "schedules"
    POLICIES = "policies"
    NETWORKS = "networks"
    ASSIGNMENTS = "assignments"
    RECIPES = "recipes"


def list_(
    kind: Annotated[
        Listed, typer.Argument(help="models, devices, links, schedules, policies, networks, assignments or recipes.")
    ],
    as_json: AsJson = False,
) -> None:
    """List what a job or a command can name: presets, schedules, fleet policies, networks, assignments, recipes.

    Schedules, policies and assignments of installed packages are included. --json has every preset's source and date.
    """
    if as_json:
        print_json(_facts(kind))
        return
    console().print(to_rich(_methods(kind) if kind in _METHODS else _TABLES[kind]()))


def _facts(kind: Listed) -> list[dict[str, Any]]:
    """The rows of a table, in SI units."""
    if kind in _METHODS:
        return [{"name": name, "about": about} for name, about in _METHODS[kind]()]
    rows: dict[Listed, list[Any]] = {
        Listed.MODELS: [model_row(name) for name in model_names()],
        Listed.DEVICES: [device_row(name) for name in device_names()],
        Listed.LINKS: [link_row(name) for name in link_names()],
    }
    return [_plain(asdict(row)) for row in rows[kind]]


def _plain(value: Any) -> Any:
    """`value` with its dates as text, for JSON."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.isoformat() if isinstance(value, date) else value


def _models() -> "TableView":
    rows = []
    for name in model_names():
        row = model_row(name)
        shape = [str(row.shape[key]) for key in ("num_layers", "hidden", "num_heads", "vocab_size")]
        rows.append((name, format_large(row.published_params), *shape))
    columns = ("model", "parameters", "layers", "hidden", "heads", "vocabulary")
    note = 'In a job: [model] preset = "NAME"; the sources are in --json.'
    return TableView("Models", columns, tuple(rows), frozenset(range(1, 6)), note=note)


def _devices() -> "TableView":
    rows = []
    for name in device_names():
        row = device_row(name)
        peak = row.peak_flops.get("bf16") or max(row.peak_flops.values())
        others = ", ".join(sorted(row.peak_flops))
        inside = format_rate(row.machine_link.bandwidth_bytes_per_s)
        rows.append((name, format_flops(peak), others, format_bytes(row.memory_bytes), inside, f"{row.power_w:.0f} W"))
    columns = ("device", "peak (bf16)", "precisions", "memory", "inside a machine", "power")
    note = "Peak: dense, of bf16 or of the fastest precision that there is; the sources are in --json."
    return TableView("Devices", columns, tuple(rows), frozenset({1, 3, 4, 5}), note=note, expendable=(2,))


def _links() -> "TableView":
    found = [link_row(name) for name in link_names()]
    rows = [(row.name, format_seconds(row.latency_s), format_rate(row.bandwidth_bytes_per_s)) for row in found]
    note = "Latency: one way; the sources are in --json."
    return TableView("Links", ("link", "latency", "bandwidth"), tuple(rows), frozenset({1, 2}), note=note)


def _schedules() -> list[tuple[str, str]]:
    from farpipe.core.schedule.library import ADDED

    return [(name, (order.__doc__ or "").strip().partition("\n")[0]) for name, order in ADDED.all().items()]


def _assignments() -> list[tuple[str, str]]:
    from farpipe.optical.policies import ADDED

    return [(name, f"path: {one.paths}; slots: {one.slots} fit") for name, one in ADDED.all().items()]


def _policies() -> list[tuple[str, str]]:
    from farpipe.fleet.policies import known_policies

    return list(known_policies().items())


def _recipes() -> list[tuple[str, str]]:
    from farpipe.cli.recipes import recipes

    return list(recipes().items())


def _networks() -> list[tuple[str, str]]:
    return [
        ("nsfnet", "14 nodes, as DeepRMSA has it"),
        ("topohub:sndlib/NAME", "SNDlib, such as topohub:sndlib/germany50 (topohub.org)"),
        ("topohub:topozoo/NAME", "the Internet Topology Zoo (topohub.org)"),
        ("gnpy:coronet-conus", "CORONET, the United States"),
        ("gnpy:coronet-global", "CORONET, the world"),
    ]


_METHODS = {
    Listed.SCHEDULES: _schedules,
    Listed.POLICIES: _policies,
    Listed.NETWORKS: _networks,
    Listed.ASSIGNMENTS: _assignments,
    Listed.RECIPES: _recipes,
}


def _methods(kind: Listed) -> "TableView":
    return TableView(kind.capitalize(), ("name", "what it does"), tuple(_METHODS[kind]()))


_TABLES = {Listed.MODELS: _models, Listed.DEVICES: _devices, Listed.LINKS: _links}
