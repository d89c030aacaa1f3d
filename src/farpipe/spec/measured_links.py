"""Writes a measured link into a cluster's TOML file and leaves the rest as it is, other comments included."""

from typing import TYPE_CHECKING, Any

from farpipe.errors import InputError
from farpipe.units import BYTES_PER_S, SECONDS, parse

if TYPE_CHECKING:
    import tomlkit


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
