"""Writing a job as job.toml, and a measured link into a cluster's file, whose rest and comments stay as they are."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from farpipe.core.errors import InputError
from farpipe.core.spec.cluster import Device, LocalLink, Site, SiteLink
from farpipe.core.units import BYTES_PER_S, SECONDS, parse

if TYPE_CHECKING:
    import tomlkit


def as_toml(*sections: tuple[str, Mapping[str, Any]]) -> str:
    """Tables, each with its header, in the format that `parse_job` reads; those without any key are left out."""
    texts = [_section(header, table) for header, table in sections]
    return "\n".join(text for text in texts if text)


def site_table(site: Site) -> dict[str, Any]:
    """[[cluster.sites]] of `site`."""
    links = {"machine_link": _speed(site.machine_link), "site_link": _speed(site.site_link)}
    table = site.model_dump(exclude={"memory_reserve_bytes", "prices"}) | {"device": _device(site.device)} | links
    prices = {"prices": site.prices.model_dump(exclude_none=True, exclude_defaults=True) or None}
    times = {name.removesuffix("_s"): _quantity(table.pop(name), "s") for name in ("mtbf_s", "mttr_s") if name in table}
    return table | times | {"memory_reserve": _quantity(site.memory_reserve_bytes, "B")} | prices


def _device(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "peak": {precision: _quantity(rate, "FLOP/s") for precision, rate in device.peak_flops.items()},
        "memory": _quantity(device.memory_bytes, "B"),
        "memory_bandwidth": _quantity(device.memory_bandwidth_bytes_per_s, "B/s"),
        "power": None if device.power_w is None else _quantity(device.power_w, "W"),
    }


def link_table(link: SiteLink) -> dict[str, Any]:
    """[[cluster.links]] of `link`, one direction."""
    queue = {} if link.queue_bytes is None else {"queue": _quantity(link.queue_bytes, "B")}
    disturbed = {"loss": link.loss or None, "jitter": _quantity(link.jitter_s, "s") if link.jitter_s else None}
    if link.congestion_control != "bbr":
        disturbed["congestion_control"] = link.congestion_control
    if (plain := link.plain_tcp) is not None:
        disturbed |= {"slow_start": True, "streams": plain.num_streams, "window": _quantity(plain.window_bytes, "B")}
        disturbed["mtu"] = plain.mtu_bytes
    price = {"egress_usd_per_gb": link.egress_usd_per_gb}
    return {"from": link.source, "to": link.target} | _speed(link) | queue | disturbed | price


def _speed(link: SiteLink | LocalLink) -> dict[str, Any]:
    return {"latency": _quantity(link.latency_s, "s"), "bandwidth": _quantity(link.bandwidth_bytes_per_s, "B/s")}


def _quantity(value: float, unit: str) -> str:
    return f"{repr(value).removesuffix('.0')} {unit}"


def _section(header: str, table: Mapping[str, Any]) -> str:
    pairs = _pairs(table)
    return "".join(f"{line}\n" for line in [header, *pairs]) if pairs else ""


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {toml_value(value)}" for key, value in table.items() if value is not None]


def toml_value(value: Any) -> str:
    """A value in TOML; tables stand in braces."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_pairs(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def with_link(text: str, source: str, target: str, latency_s: float, bandwidth_bytes_per_s: float) -> str:
    """The file `text` with these figures for the link from `source` to `target`, in the place of earlier ones.

    An entry for both directions is split in two, and only the one direction is changed; a link that is missing is
    added at the end. InputError when the file has no site of that name.
    """
    import tomlkit

    document = tomlkit.parse(text)
    cluster: Any = document.get("cluster", {})
    for name in (source, target):
        if name not in [site.get("name") for site in cluster.get("sites", [])]:
            raise InputError(f"there is no site {name!r} in this file's [[cluster.sites]]")
    entry = _entry(cluster, source, target)
    figures = {
        "latency": _written(latency_s, SECONDS, "ms"),
        "bandwidth": _written(bandwidth_bytes_per_s, BYTES_PER_S, "Mbit/s"),
    }
    for key, figure in figures.items():
        entry[key] = figure
        entry[key].comment("measured")  # in the place of a remark about the earlier figure
    return tomlkit.dumps(document)


def _entry(cluster: Any, source: str, target: str) -> Any:
    """The table of this directed link, made if need be."""
    import tomlkit

    if "links" not in cluster:
        cluster["links"] = tomlkit.aot()
    links = cluster["links"]
    for link in links:
        if (link.get("from"), link.get("to")) == (source, target):
            return link
        if sorted(link.get("between", [])) == sorted((source, target)):
            other = _copy(link, target, source)
            del link["between"]
            link.update({"from": source, "to": target})
            links.append(other)
            return link
    link = tomlkit.table()
    link.update({"from": source, "to": target})
    links.append(link)
    return link


def _copy(link: Any, source: str, target: str) -> "tomlkit.items.Table":
    """The same figures for one direction."""
    import tomlkit

    other = tomlkit.table()
    other.update({"from": source, "to": target} | {key: value for key, value in link.items() if key != "between"})
    return other


def _written(value: float, units: dict[str, float], unit: str) -> str:
    """`value` as a quantity with four digits, which reads back as what it says."""
    text = f"{value / units[unit]:.4g} {unit}"
    assert abs(parse(text, units, text) - value) <= 1e-3 * value, text
    return text
