"""[cluster.matrices]: links between all sites from measured tables, CSVs with a row per directed pair of regions."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from farpipe.core.errors import InputError
from farpipe.core.spec.cluster import TCP_WINDOW_BYTES, Site, SiteLink, windowed_rate
from farpipe.core.spec.part import MAX_LATENCY_S, Count, Part, SiteName, Text, fault, more_than_zero
from farpipe.core.strict import nearest, read_csv
from farpipe.core.units import BYTES

Matrix = dict[tuple[str, str], float]
"""(source, target) -> value; the two directions of a pair differ."""

MAX_FIGURE: Final = 1e12
BITS_PER_GBIT: Final = 1e9
MS_PER_S: Final = 1e3
_OTHER_UNITS: Final = re.compile(
    r"(?i:[mkt]bit|[mkt]bps|byte)|[KMGT]i?B(?:_?ps|[/_]s)|"
    r"(?<!bit_)(?<=[_ (])(?i:s|sec|secs|seconds|us|usec|ns|min)(?=\)?$)"
)
"""Units in the name of a column that are none of Gbit/s, ms and USD."""
SOURCES: Final = ("src_region", "source", "src", "from")
TARGETS: Final = ("dst_region", "target", "dst", "to")
MAX_SITES: Final = 300
"""Most sites with a link each to each; more are refused, for nobody means 90,000 links."""


def read_matrix(path: Path | str, column: str, where: Mapping[str, str] | None = None) -> Matrix:
    """The figures in `column` of a CSV with the ends of each directed pair in columns of its own.

    A pair that was measured several times gets the mean. `where`: only rows with these values in other columns, a tier
    of the network for example.

    InputError names file and line of what is wrong: no such column, no number, no row at all.
    """
    names, rows = read_csv(path)
    source, target = (_one_of(names, known, path) for known in (SOURCES, TARGETS))
    if (odd := _OTHER_UNITS.search(column)) is not None:
        raise InputError(
            f"{path}: line 1: column {column!r} seems to be in {odd[0]!r}: throughputs are in Gbit/s, round trips in ms"
        )
    for name in (column, *(where or {})):
        if name not in names:
            raise InputError(f"{path}: line 1: there is no column {name!r}{nearest(name, names)}")
    found: dict[tuple[str, str], list[float]] = {}
    for place, row in rows:
        pair = row[source], row[target]
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


Window = Annotated[float, more_than_zero(BYTES, "2.7 MB")]


class WrittenMatrices(Part):
    """CSV files with a row for every directed pair of regions: throughput in Gbit/s, round trips in ms, prices.

    Files are found from the job's folder, or else from the one in which farpipe runs.
    """

    throughput: Text
    rtt: Text
    egress: Text | None = None
    throughput_column: Text = "throughput_gbit_s"
    rtt_column: Text = "avg_rtt_ms"
    egress_column: Text = "usd_per_gb"
    only: dict[str, str] = Field(default_factory=dict)
    """Rows of the throughput with these values in other columns, a tier of the network for example."""
    per: Literal["site", "machine"] = "site"
    """Unit that a throughput is of: all of a site, or one pair of machines, of which a site has as many as machines."""
    streams: Count | None = None
    """TCP streams, each with `window` bytes in flight at most; None: throughputs were measured with enough of them."""
    window: Window = TCP_WINDOW_BYTES
    regions: dict[SiteName, Text] = Field(default_factory=dict)
    """The region in the files of a site; else its `region`, or its name."""

    def links(self, sites: Iterable[tuple[Site, str | None]]) -> list[SiteLink]:
        """A directed link for every pair of the sites, each given with its region, for which there is a throughput.

        ValidationError, as seen from the cluster, where a file or a region is wrong.
        """
        known = {site.name: (site, region) for site, region in sites}
        if len(known) > MAX_SITES:
            raise fault(
                f"{len(known):,} sites are more than {MAX_SITES} for links each to each; write [[cluster.links]]",
                "matrices",
            )
        for name in self.regions:
            if name not in known:
                raise fault(f"there is no site {name!r}{nearest(name, known)}", "matrices", "regions", name)
        regions = {name: self.regions.get(name) or region or name for name, (_, region) in known.items()}
        try:
            links = links_between(regions, self._rates(), _matrix(self.rtt, self.rtt_column), self._prices())
        except InputError as error:
            raise fault(str(error), "matrices") from None
        return [self._scaled(link, known[link.source][0], known[link.target][0]) for link in links]

    def _rates(self) -> Matrix:
        return _matrix(self.throughput, self.throughput_column, tuple(self.only.items()))

    def _prices(self) -> Matrix | None:
        return None if self.egress is None else _matrix(self.egress, self.egress_column)

    def _scaled(self, link: SiteLink, source: Site, target: Site) -> SiteLink:
        rate = link.bandwidth_bytes_per_s
        if self.streams is not None:
            rate = windowed_rate(rate, self.window, 2 * link.latency_s, self.streams)
        if self.per == "machine":
            rate *= min(_num_machines(source), _num_machines(target))
        return link.model_copy(update={"bandwidth_bytes_per_s": rate})


def _num_machines(site: Site) -> int:
    return ceil(site.num_devices / site.devices_per_machine)


def _matrix(path: str, column: str, where: tuple[tuple[str, str], ...] = ()) -> Matrix:
    """The file as it is now; read once, for a job is checked several times while it is read."""
    try:
        stat = Path(path).stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
    except OSError:
        stamp = (0, 0)  # reading it reports the reason
    return dict(_read(path, column, where, stamp))


@lru_cache(maxsize=8)
def _read(
    path: str, column: str, where: tuple[tuple[str, str], ...], stamp: tuple[int, int]
) -> Mapping[tuple[str, str], float]:
    return read_matrix(path, column, dict(where))
