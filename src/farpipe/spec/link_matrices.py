"""Links from measured matrices: CSV files with one row per directed pair of regions."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from farpipe.errors import InputError
from farpipe.spec.cluster import SiteLink
from farpipe.spec.part import MAX_LATENCY_S
from farpipe.strict import nearest, read_text

Matrix = dict[tuple[str, str], float]
"""(source, target) -> value; the two directions of a pair differ."""

MAX_FIGURE: Final = 1e12
BITS_PER_GBIT: Final = 1e9
MS_PER_S: Final = 1e3
SOURCES: Final = ("src_region", "source", "src", "from")
TARGETS: Final = ("dst_region", "target", "dst", "to")


def read_matrix(path: Path | str, column: str, where: Mapping[str, str] | None = None) -> Matrix:
    """The figures in `column` of a CSV with the ends of each directed pair in columns of its own.

    A pair that was measured several times gets the mean. `where`: only rows with these values in other columns, a tier
    of the network for example.

    InputError names file and line of what is wrong: no such column, no number, no row at all.
    """
    reader = csv.DictReader(io.StringIO(read_text(path)))
    names = list(reader.fieldnames or [])
    source, target = (_one_of(names, known, path) for known in (SOURCES, TARGETS))
    for name in (column, *(where or {})):
        if name not in names:
            raise InputError(f"{path}: line 1: there is no column {name!r}{nearest(name, names)}")
    found: dict[tuple[str, str], list[float]] = {}
    for row in reader:
        place, pair = f"{path}: line {reader.line_num}", (row[source] or "", row[target] or "")
        if any(row[name] != value for name, value in (where or {}).items()):
            continue
        found.setdefault(pair, []).append(_number(row[column], f"{place}: {column}"))
    if not found:
        raise InputError(f"{path}: no row behind the header")
    return {pair: sum(figures) / len(figures) for pair, figures in found.items()}


def _one_of(names: list[str], known: tuple[str, ...], path: Path | str) -> str:
    for name in known:
        if name in names:
            return name
    raise InputError(f"{path}: line 1: expected a column {' or '.join(map(repr, known[:2]))}, found {names}")


def _number(text: str | None, place: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise InputError(f"{place}: expected a number, found {(text or 'nothing')[:40]!r}") from None
    if not 0 <= value < MAX_FIGURE:
        raise InputError(f"{place}: expected a number from 0 to below {MAX_FIGURE:g}, found {text!r}")
    return value


def links_between(
    regions: Mapping[str, str], gbit_per_s: Matrix, rtt_ms: Matrix, usd_per_gb: Matrix | None = None
) -> tuple[SiteLink, ...]:
    """A directed link for every pair of sites, from the figures of their regions.

    `regions` has the region of every site. A pair without a rate, or with a rate of zero, has no link; one direction
    alone can be missing. InputError for a region that no matrix knows and for a link without a round trip.
    """
    known = {name for pair in gbit_per_s for name in pair}
    for site, region in regions.items():
        if region not in known:
            raise InputError(f"site {site}: the matrices know no region {region!r}{nearest(region, known)}")
    found = []
    for source, a in regions.items():
        for target, b in regions.items():
            rate = gbit_per_s.get((a, b), 0.0) * BITS_PER_GBIT / 8
            if source == target or rate <= 0:
                continue
            price = None if usd_per_gb is None else usd_per_gb.get((a, b))
            link = SiteLink(
                source=source,
                target=target,
                latency_s=_one_way_s(rtt_ms, a, b),
                bandwidth_bytes_per_s=rate,
                egress_usd_per_gb=price,
            )
            found.append(link)
    return tuple(found)


def _one_way_s(rtt_ms: Matrix, source: str, target: str) -> float:
    """Half the round trip; that of the other direction where only it was measured."""
    found = rtt_ms.get((source, target), rtt_ms.get((target, source)))
    if found is None:
        raise InputError(f"{source} > {target}: there is a throughput but no round trip")
    if found / MS_PER_S / 2 > MAX_LATENCY_S:
        raise InputError(f"{source} > {target}: a round trip of {found:g} ms is more than two hours")
    return found / MS_PER_S / 2
