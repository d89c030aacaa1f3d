"""[cluster.matrices]: links between all sites from measured tables, instead of one entry for every pair."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from farpipe.errors import InputError
from farpipe.spec.cluster import Site, SiteLink
from farpipe.spec.link_matrices import Matrix, links_between, read_matrix
from farpipe.spec.part import Count, Part, SiteName, Text, fault
from farpipe.spec.windows import TCP_WINDOW_BYTES, windowed_rate
from farpipe.strict import nearest
from farpipe.units import BYTES, parse

MAX_SITES: Final = 300
"""With a link each to each; more are refused, for nobody means 90,000 links."""


def _window(text: object) -> float:
    value = parse(text, BYTES, "2.7 MB")
    if value == 0:
        raise ValueError(f"must be more than zero, found {text!r}")
    return value


Window = Annotated[float, BeforeValidator(_window)]


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
        stamp = (0, 0)  # reading it tells the reason
    return dict(_read(path, column, where, stamp))


@lru_cache(maxsize=8)
def _read(
    path: str, column: str, where: tuple[tuple[str, str], ...], stamp: tuple[int, int]
) -> Mapping[tuple[str, str], float]:
    return read_matrix(path, column, dict(where))
