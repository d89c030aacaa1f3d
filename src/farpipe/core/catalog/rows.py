"""Reading the catalogue's tables, in SI units.

A name is looked up without regard to case; ``_`` and blanks count as ``-``. Rows have aliases ("h100" is "h100-sxm").
An unknown name is a ValueError that tells the nearest known one.
"""

import datetime
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from farpipe.core.strict import nearest
from farpipe.core.units import BYTES, BYTES_PER_S, FLOPS, SECONDS, WATTS, parse


@dataclass(frozen=True)
class DeviceRow:
    """An accelerator."""

    name: str
    peak_flops: Mapping[str, float]
    """Dense FLOP/s by precision: bf16, fp16, fp32; one that the device lacks is missing."""
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    power_w: float
    machine_link: "LinkRow"
    """Link over which one device sends to the other devices of its machine, in one direction."""
    source: str
    date: datetime.date
    flash_attention: bool = True
    """False where FlashAttention 2 has no kernels for the device."""


@dataclass(frozen=True)
class ModelRow:
    """A published model."""

    name: str
    shape: Mapping[str, int | bool | str]
    """Keys of [model] in a job; what is missing has its default there."""
    published_params: int
    """The number of parameters that the source states, true to `tolerance` (relative)."""
    tolerance: float
    source: str
    date: datetime.date


@dataclass(frozen=True)
class LinkRow:
    """One direction of a typical link."""

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    source: str
    date: datetime.date


@dataclass(frozen=True)
class ModeRow:
    """A mode of an optical transceiver and how far it reaches."""

    name: str
    rate_gbit_s: float
    width_ghz: float
    """Spectrum of a channel."""
    reach_km: float
    source: str
    date: datetime.date


@dataclass(frozen=True)
class PriceRow:
    """Prices of one region of a cloud; what is not known is None."""

    name: str
    rent_usd_per_device_hour: Mapping[str, float]
    """Rent by device."""
    electricity_usd_per_mwh: float | None
    pue: float
    carbon_g_per_kwh: float | None
    egress_usd_per_gb: float | None
    """Price of traffic to another region of the same provider."""
    source: str
    date: datetime.date


def device_names() -> tuple[str, ...]:
    """The devices of the catalogue, without aliases."""
    return tuple(_table("device"))


@cache
def rack_sizes() -> Mapping[str, int]:
    """Devices of a rack over which NVLink reaches, by the names and aliases of the devices that have such."""
    racks = {name: row for name, row in _table("device").items() if "nvlink_devices" in row}
    return {name: row["nvlink_devices"] for key, row in racks.items() for name in (key, *row.get("aliases", ()))}


def model_names() -> tuple[str, ...]:
    """The models of the catalogue, without aliases."""
    return tuple(_table("model"))


def link_names() -> tuple[str, ...]:
    """The links of the catalogue."""
    return tuple(_table("link"))


def mode_names() -> tuple[str, ...]:
    """The modes of optical transceivers in the catalogue."""
    return tuple(_table("mode"))


@lru_cache(maxsize=256)  # clusters name the same few thousands of times
def device_row(name: str) -> DeviceRow:
    """The device called `name`; ValueError if there is none."""
    found, row = _find("device", name)
    return DeviceRow(
        name=found,
        peak_flops={precision: parse(rate, FLOPS, "989 TFLOP/s") for precision, rate in row["peak"].items()},
        memory_bytes=parse(row["memory"], BYTES, "80 GiB"),
        memory_bandwidth_bytes_per_s=parse(row["memory_bandwidth"], BYTES_PER_S, "3350 GB/s"),
        power_w=parse(row["power"], WATTS, "700 W"),
        machine_link=_link(f"inside a {found} machine", row["machine_link"] | _origin(row)),
        flash_attention=row.get("flash_attention", True),
        **_origin(row),
    )


def model_row(name: str) -> ModelRow:
    """The model called `name`; ValueError if there is none."""
    found, row = _find("model", name)
    facts = {"aliases", "published", "tolerance", "source", "date"}
    shape = {key: value for key, value in row.items() if key not in facts}
    return ModelRow(found, shape, row["published"], row["tolerance"], **_origin(row))


@lru_cache(maxsize=256)
def link_row(name: str) -> LinkRow:
    """The link called `name`; ValueError if there is none."""
    return _link(*_find("link", name))


def mode_row(name: str) -> ModeRow:
    """The mode of a transceiver called `name`; ValueError if there is none."""
    found, row = _find("mode", name)
    return ModeRow(found, row["rate_gbit_s"], row["width_ghz"], row["reach_km"], **_origin(row))


def region_names() -> tuple[str, ...]:
    """The regions of the catalogue."""
    return tuple(_table("price"))


@lru_cache(maxsize=256)
def price_row(region: str) -> PriceRow:
    """The prices of the region, ``"aws:us-east-1"`` for example; ValueError if there is none."""
    name, row = _find("price", region, "region")
    figures = (row.get("electricity"), row["pue"], row.get("carbon"), row.get("egress"))
    return PriceRow(name, row.get("rent", {}), *figures, **_origin(row))


def _link(name: str, row: Mapping[str, Any]) -> LinkRow:
    latency_s = parse(row["latency"], SECONDS, "35 ms")
    bandwidth = parse(row["bandwidth"], BYTES_PER_S, "400 Gbit/s")
    return LinkRow(name, latency_s, bandwidth, **_origin(row))


def _origin(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"source": row["source"], "date": row["date"]}


def _find(kind: str, name: str, word_for_it: str = "") -> tuple[str, dict[str, Any]]:
    table = _table(kind)
    names = _names(kind)
    word = name.strip().lower().replace("_", "-").replace(" ", "-")
    if word not in names:
        near = [known for known in names if kind != "device" or _are_one_chip(known, word)]
        hint = nearest(word, near) or f"; known: {', '.join(table)}"
        raise ValueError(f"there is no {word_for_it or kind} {name[:60]!r} in the catalogue{hint}")
    return names[word], table[names[word]]


def _are_one_chip(one: str, other: str) -> bool:
    """True if names may mean one chip: another digit or letter there makes another device."""
    chips = [next((word for word in name.split("-") if any(map(str.isdigit, word))), "") for name in (one, other)]
    return (all(chips) and (chips[0].startswith(chips[1]) or chips[1].startswith(chips[0]))) or not any(chips)


@cache
def _names(kind: str) -> dict[str, str]:
    """The name of every row, by its names and aliases."""
    return {word: key for key, row in _table(kind).items() for word in (key, *row.get("aliases", ()))}


@cache
def _table(kind: str) -> dict[str, dict[str, Any]]:
    file = resources.files("farpipe.core.catalog").joinpath(f"{kind}s.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))
