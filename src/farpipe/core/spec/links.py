"""Links as people write them: one by one, or between all sites from measured tables with a row per directed pair."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from farpipe.core.catalog import LinkRow, link_row
from farpipe.core.errors import InputError
from farpipe.core.spec.cluster import (
    MAX_FIBRE_KM,
    RDMA_WINDOW_BYTES,
    SECONDS_PER_KM,
    SITE_RTT_S,
    TCP_WINDOW_BYTES,
    CongestionControl,
    LocalLink,
    PlainTcp,
    Site,
    SiteLink,
    windowed_rate,
)
from farpipe.core.spec.part import (
    MAX_LATENCY_S,
    Bandwidth,
    Count,
    Flag,
    Latency,
    NonNegative,
    Part,
    Queue,
    Share,
    SiteName,
    Text,
    Written,
    at_most_an_hour,
    fault,
    first,
    known,
    more_than_zero,
)
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
"""Most sites with a link each to each; more are refused as a mistake, for they would have over 90,000 links."""


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
    """File of the throughputs."""
    rtt: Text
    """File of the round-trip times."""
    egress: Text | None = None
    """File of the prices of traffic; a pair that it lacks has the price of the site."""
    throughput_column: Text = "throughput_gbit_s"
    """Its column in Gbit/s."""
    rtt_column: Text = "avg_rtt_ms"
    """Its column in ms."""
    egress_column: Text = "usd_per_gb"
    """Its column in USD per 10^9 bytes."""
    only: dict[str, str] = Field(default_factory=dict)
    """Take rows of the throughput with these values in other columns: `{ src_tier = "PREMIUM" }`."""
    per: Literal["site", "machine"] = "site"
    """`"site"`: a throughput is all that a site has; `"machine"`: that of one pair of machines; two sites have as many
    pairs as the smaller has machines."""
    streams: Count | None = None
    """As for a link, of each pair of machines."""
    window: Window = TCP_WINDOW_BYTES
    """As for a link, of each pair of machines; 2.7 MB."""
    regions: dict[SiteName, Text] = Field(default_factory=dict)
    """Regions of the sites in the files, by site. Default: the site's `region`, or its name."""

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


LinkPreset = Annotated[Text, known(link_row)]


class WrittenSpeed(Part):
    """`machine_link` and `site_link` of a site: a preset, figures, or both."""

    preset: LinkPreset | None = None
    """A link of the catalogue; `latency` and `bandwidth` replace its figures."""
    latency: Latency | None = None
    """One way (a `ping` shows twice as much); at most an hour."""
    bandwidth: Bandwidth | None = None
    """Rate of one direction, from 8 bit/s up, for everything that the job sends from one site to the other; a run never
    sends faster."""

    def speed(self, *place: str, default: LinkRow | None = None) -> LocalLink:
        """Latency and bandwidth of the table at `place`; what is not given is the preset's, or else the default's."""
        row = link_row(self.preset) if self.preset else default
        bandwidth = getattr(row, "bandwidth_bytes_per_s", None)
        return LocalLink(
            latency_s=first((*place, "latency"), self.latency, getattr(row, "latency_s", None)),
            bandwidth_bytes_per_s=first((*place, "bandwidth"), self.bandwidth, bandwidth),
        )


class WrittenLink(WrittenSpeed, Written):
    """[[cluster.links]]: `between` two sites in both directions, or `from` one `to` another."""

    between: tuple[SiteName, SiteName] | None = None
    """Two sites; the link works alike in both directions."""
    source: SiteName | None = Field(default=None, alias="from")
    """Instead of `between`: one direction only; give the other in a table of its own."""
    target: SiteName | None = Field(default=None, alias="to")
    """Instead of `between`: one direction only; give the other in a table of its own."""
    queue: Queue | None = None
    """Longest queue before the link, in bytes or as a time at full bandwidth; more is dropped. Default: one round
    trip's worth, at least 2 ms and 256 KiB."""
    loss: Share = 0.0
    """Share of packets that are lost, `0.001` for one in a thousand."""
    jitter: Latency = 0.0
    """Largest delay of a packet on top of `latency`, evenly distributed; packets keep their order."""
    congestion_control: CongestionControl = "bbr"
    """Congestion control of TCP on the hosts: `"bbr"`, `"cubic"` or `"reno"`; farpipe sets BBR wherever it may."""
    slow_start: Flag = False
    """Messages go over plain TCP, as NCCL's and gloo's do, which starts slowly after a pause: over `streams`
    connections (default 1; NCCL has 16 on AWS, 4 on Google Cloud), each with `window`, which do not lower the bandwidth
    then. False: farpipe's own transport, which keeps its connections warm."""
    mtu: Annotated[int, Field(ge=576, le=1 << 16)] = 1500
    """With `slow_start`: bytes of the largest packet; `9001` inside AWS."""
    egress_usd_per_gb: NonNegative | None = None
    """Price of 10^9 bytes over this link. Default: that of the site they leave."""
    kind: Literal["tcp", "rdma", "lossless-otn"] = "tcp"
    """`"tcp"`, `"rdma"`, or `"lossless-otn"`: RDMA through an optical transport network whose equipment acknowledges
    and never drops, as GeoPipe's, which keeps the whole `bandwidth` at any distance that `buffer` covers."""
    fibre_km: NonNegative | None = None
    """Length of the fibre instead of `latency`: 4.9 us per km."""
    streams: Count | None = None
    """TCP connections that share the link; each has at most `window` in flight, so the bandwidth is at most `streams` x
    `window` / round trip. Default: as many as the bandwidth needs."""
    window: Window | None = None
    """Bytes in flight and not yet acknowledged, in each stream or in the RDMA queue. Default: with `streams` `"2.7
    MB"`, measured with TCP's default buffers; with `kind = "rdma"` `"16 MB"`; otherwise no window."""
    acknowledged: Literal["target", "source"] = "target"
    """`"target"`, or `"source"` where a switch at the source's site acknowledges RDMA in place of the far end (round
    trip 20 us), as MatchRDMA does."""
    budget: Bandwidth | None = None
    """Rate that the destination grants; needs `acknowledged = "source"`."""
    buffer: Window | None = None
    """Buffer behind the link for what arrives after a pause frame; needs `kind = "lossless-otn"`. The rate is at most
    `buffer` / round trip. Default: large enough."""

    def ends(self) -> list[tuple[str, str]]:
        """Source and target of each direction."""
        if self.between and not (self.source or self.target):
            return [self.between, self.between[::-1]]
        if self.source and self.target and not self.between:
            return [(self.source, self.target)]
        raise fault('give either between = ["a", "b"] (both directions) or from = "a" and to = "b" (one)')

    def resolve(self) -> list[SiteLink]:
        """One directed link, or two."""
        speed = self._carried(self._over_fibre()).model_dump()
        disturbed = {"loss": self.loss, "jitter_s": self.jitter, "congestion_control": self.congestion_control}
        figures = speed | disturbed | {"egress_usd_per_gb": self.egress_usd_per_gb}
        if self.slow_start:
            window = self.window or TCP_WINDOW_BYTES
            figures["plain_tcp"] = PlainTcp(num_streams=self.streams or 1, window_bytes=window, mtu_bytes=self.mtu)
        if self.queue is not None:
            length, kind = self.queue
            figures["queue_bytes"] = length * (speed["bandwidth_bytes_per_s"] if kind == "seconds" else 1.0)
        return [SiteLink(source=source, target=target, **figures) for source, target in self.ends()]

    def _over_fibre(self) -> LocalLink:
        """Latency and bandwidth as they are written; the latency may be that of light in `fibre_km` of fibre."""
        if self.fibre_km is None:
            return self.speed()
        if self.latency is not None:
            raise fault("the latency follows from fibre_km: give one of the two", "latency")
        if self.fibre_km > MAX_FIBRE_KM:
            raise fault(
                f"{self.fibre_km:,g} km are more than half of the Earth's circumference ({MAX_FIBRE_KM:,g}); metres?",
                "fibre_km",
            )
        latency_s = at_most_an_hour(self.fibre_km * SECONDS_PER_KM, f"{self.fibre_km:g} km")
        return self.model_copy(update={"latency": latency_s}).speed()

    def _carried(self, speed: LocalLink) -> LocalLink:
        """The link with the rate that its kind leaves of the bandwidth."""
        self._expect_keys_of_kind()
        rate, rtt_s = speed.bandwidth_bytes_per_s, 2 * speed.latency_s
        if self.kind == "lossless-otn":
            rate = rate if self.buffer is None else windowed_rate(rate, self.buffer, rtt_s)
        elif not self.slow_start and (self.kind == "rdma" or self.window is not None or self.streams is not None):
            usual = RDMA_WINDOW_BYTES if self.kind == "rdma" else TCP_WINDOW_BYTES
            window = usual if self.window is None else self.window
            acknowledged_s = SITE_RTT_S if self.acknowledged == "source" else rtt_s
            rate = windowed_rate(rate, window, acknowledged_s, self.streams or 1)
        return speed.model_copy(update={"bandwidth_bytes_per_s": min(rate, self.budget or rate)})

    def _expect_keys_of_kind(self) -> None:
        otn, at_source = self.kind == "lossless-otn", self.acknowledged == "source"
        if at_source and self.kind == "tcp" and self.window is None:
            raise fault("acknowledgements at the source need a window", "acknowledged")
        if self.budget is not None and not at_source:
            raise fault('a destination grants rates only with acknowledged = "source"', "budget")
        if self.buffer is not None and not otn:
            raise fault('a buffer for pause frames belongs to kind = "lossless-otn"', "buffer")
        if otn and (self.window is not None or at_source):
            key = "window" if self.window is not None else "acknowledged"
            raise fault('the equipment of a lossless OTN paces RDMA: leave this out, or take kind = "rdma"', key)
        if "mtu" in self.model_fields_set and not self.slow_start:
            raise fault("packets are counted with slow_start = true only: set it, or leave this out", "mtu")
        if self.kind != "tcp":
            for key in ("streams", "loss", "jitter", "slow_start"):
                if getattr(self, key):
                    raise fault(f'"{self.kind}" has no {key}: leave it out, or take kind = "tcp"', key)
