"""FLEET.toml: the sites, links, prices and failures that a fleet lives with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster, Prices, Site
from farpipe.core.spec.cluster import check_ends
from farpipe.core.spec.links import WrittenLink, links_between, read_matrix
from farpipe.core.spec.part import (
    BandwidthOrNone,
    Flag,
    Natural,
    NonNegative,
    Part,
    Positive,
    Power,
    Share,
    SiteName,
    Text,
)
from farpipe.core.spec.written import WrittenSite
from farpipe.core.strict import as_utc, nearest, parse_toml, read_text, seen_from, validate
from farpipe.fleet.events import Event, LinkChanged, Price, PriceChanged, SiteBack, SiteLost
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.quotes import HopQuotes, StopCosts
from farpipe.fleet.series import Series, read_series
from farpipe.fleet.simulator import Failures
from farpipe.planning.cost.money import egress_of

IDLE_SHARE: Final = 0.2
"""Share of a device's board power that it draws idle: an A100 takes 50 to 60 of 400 W, its share of the machine
added."""


class SeriesFile(Part):
    """A column of a CSV with hourly figures."""

    file: Text
    column: Text


def _series(value: Any) -> Any:
    return value if isinstance(value, dict) else float(value) if isinstance(value, int) else value


Figures = Annotated[SeriesFile | float | None, BeforeValidator(_series)]
"""A series, or one figure for ever."""


Latitude = Annotated[float, BeforeValidator(_series), Field(ge=-90, le=90)]
Longitude = Annotated[float, BeforeValidator(_series), Field(ge=-180, le=180)]


LAUNCHING: Final = {"launch", "slurm", "ray", "kubernetes", "ssh"}


class FleetSite(WrittenSite):
    """[[sites]]: as in a job, with what its devices and energy cost."""

    pue: Positive | None = None
    rent_usd_per_device_hour: NonNegative | None = None
    electricity: Figures = None
    """USD/MWh."""
    carbon: Figures = None
    """g/kWh."""
    idle_power: Power | None = None
    """Power of an idle device."""
    location: tuple[Latitude, Longitude] | None = None
    """Degrees; for the map alone."""
    matrix_region: Text | None = None
    """Its name in the matrices, if it is another."""
    launch: dict[str, Any] | None = None
    slurm: dict[str, Any] | None = None
    ray: dict[str, Any] | None = None
    kubernetes: dict[str, Any] | None = None
    ssh: dict[str, Any] | None = None
    """Tables of a launcher, which reads them: `LAUNCHING`."""

    def resolve(self) -> Site:
        """The site with its prices; a series counts from the first hour on, when it becomes events."""
        site = super().resolve()
        given = {"pue": self.pue, "rent_usd_per_device_hour": self.rent_usd_per_device_hour}
        for key, figures in (("electricity_usd_per_mwh", self.electricity), ("carbon_g_per_kwh", self.carbon)):
            given[key] = figures if isinstance(figures, float) else None
        known = site.prices.model_dump() | {key: value for key, value in given.items() if value is not None}
        return site.model_copy(update={"prices": Prices.model_validate(known)})


def _moment(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date) else value


class FleetClock(Part):
    """[clock]"""

    start: Annotated[Text, BeforeValidator(_moment)]
    """The moment that is second 0 of the trace, in UTC: text, or a date-time of TOML."""


class Matrices(Part):
    """[matrices]: CSV files with measured figures for every directed pair of regions."""

    throughput: Text
    """Column throughput_gbit_s."""
    rtt: Text
    """Column avg_rtt_ms."""
    egress: Text | None = None
    """Column usd_per_gb."""
    where: dict[str, Text] = Field(default_factory=dict)
    """Rows of the throughputs to take: values by column, such as src_tier = "PREMIUM"."""
    scale: Positive = 1.0
    """Factor on the throughputs."""


class Outage(Part):
    """[[outages]]: a site that is gone for a while."""

    site: SiteName
    from_s: NonNegative
    to_s: Positive


class WrittenLinkChange(Part):
    """[[link_changes]]: another rate from a moment on; "0 Gbit/s": the link is down."""

    link: Text
    """``a>b``."""
    at_s: NonNegative
    bandwidth: BandwidthOrNone


class Stops(Part):
    """[stops]: what stopping and starting takes; see `StopCosts`."""

    restart_s: NonNegative = StopCosts.restart_s
    checkpoint_bytes_per_s: Positive = StopCosts.checkpoint_bytes_per_s
    checkpoint_every_s: Positive = StopCosts.checkpoint_every_s
    transfer_share: Share = StopCosts.transfer_share
    stop_s: NonNegative = StopCosts.stop_s
    copy_every_s: NonNegative = StopCosts.copy_every_s
    start_limit_s: NonNegative = StopCosts.start_limit_s
    stop_limit_s: NonNegative = StopCosts.stop_limit_s
    first_pause_s: NonNegative = StopCosts.first_pause_s
    longest_pause_s: NonNegative = StopCosts.longest_pause_s
    max_failures: Natural = StopCosts.max_failures


class Tenant(Part):
    """[[tenants]]: who jobs belong to, by the column `tenant` of JOBS.csv."""

    name: Text
    share: Positive = 1.0
    """Weight of its share of the devices in use; tenants that are not listed have 1."""


class FailureTable(Part):
    """[failures]"""

    device_hours: Positive | None = None
    final_share: Share = 0.0
    seed: Natural = 0


def _switch(value: Any) -> Any:
    return bool(value) if value in (0, 1) else value


Switch = Annotated[Flag, BeforeValidator(_switch)]
"""True or false, or 1 or 0."""


class PolicyTable(Part):
    """[policy]: parameters of `FarpipePolicy`, which describes them."""

    electricity_only: Switch = FarpipePolicy.electricity_only
    carbon_usd_per_t: NonNegative = FarpipePolicy.carbon_usd_per_t
    hour_value: NonNegative = FarpipePolicy.hour_value
    order: Literal["rest", "work", "arrival"] = FarpipePolicy.order
    sees_prices: Switch = FarpipePolicy.sees_prices
    preempts: Switch = FarpipePolicy.preempts
    factor: Positive = FarpipePolicy.factor
    moves_per_event: Natural = FarpipePolicy.moves_per_event
    grows: Switch = FarpipePolicy.grows
    moves: Switch = FarpipePolicy.moves
    fairness: NonNegative = FarpipePolicy.fairness
    max_queued_s: NonNegative = FarpipePolicy.max_queued_s


class FleetFile(Part):
    """FLEET.toml."""

    clock: FleetClock
    sites: Annotated[tuple[FleetSite, ...], Field(min_length=1)]
    links: tuple[WrittenLink, ...] = ()
    matrices: Matrices | None = None
    outages: tuple[Outage, ...] = ()
    link_changes: tuple[WrittenLinkChange, ...] = ()
    stops: Stops = Stops()
    failures: FailureTable = FailureTable()
    tenants: tuple[Tenant, ...] = ()
    policy: PolicyTable = PolicyTable()
    hop_quotes: HopQuotes = "planner"
    """Source of the speed of a job over several sites: the planner, or a formula, pessimistic and quicker."""
    launcher: Text = "sites"
    """What starts jobs, of a fleet that is served."""

    @model_validator(mode="after")
    def _linked(self) -> Self:
        ends = [(("links", i), *ends) for i, link in enumerate(self.links) for ends in link.ends()]
        check_ends([site.name for site in self.sites], ends)
        return self


@dataclass(frozen=True)
class Scenario:
    """A fleet without jobs, and what will happen to it whatever it does."""

    cluster: Cluster
    start: datetime
    events: Sequence[Event]
    """Prices, outages, links, by time."""
    stops: StopCosts
    failures: Failures
    idle_power_w: dict[str, float]
    policy_parameters: dict[str, Any]
    """Parameters of `FarpipePolicy` that are set."""
    hop_quotes: HopQuotes = "planner"
    tenant_shares: Mapping[str, float] = field(default_factory=dict)
    """Weights of the tenants' shares of the devices in use."""
    locations: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Latitude and longitude of the sites that have them."""
    series_end_s: Mapping[str, float] = field(default_factory=dict)
    """Time of the last figure of every series, by site and kind."""
    unpriced: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Sites without a figure, by what it is of: rent, electricity, egress, carbon, energy, idle energy."""
    launcher: str = "sites"
    """Name of what starts jobs, where the fleet is served."""
    launching: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What each site says to its launcher."""


def load_scenario(path: Path | str) -> Scenario:
    """Read a FLEET.toml; files that it names are looked for beside it. InputError names the place of what is wrong."""
    text = read_text(path)
    written = validate(FleetFile, parse_toml(text, str(path)), str(path), toml=text)
    return resolve(written, Path(path))


def resolve(written: FleetFile, path: Path) -> Scenario:
    """The scenario that a file stands for."""
    start = as_utc(written.clock.start, f"{path}: clock.start")
    sites = tuple(site.resolve() for site in written.sites)
    links = tuple(directed for link in written.links for directed in link.resolve())
    if written.matrices is not None:
        links += tuple(link for link in _from_matrices(written, path) if link.name not in {one.name for one in links})
    cluster = validate(Cluster, {"sites": sites, "links": links}, str(path))
    series = _series_of_sites(written, path, start)
    events = [*_price_events(written, series), *_outages(written, cluster, path)]
    return Scenario(
        cluster=cluster,
        start=start.astimezone(UTC),
        events=sorted(events, key=lambda event: event.time_s),
        stops=StopCosts(**written.stops.model_dump()),
        failures=Failures(**written.failures.model_dump()),
        idle_power_w={site.name: _idle_w(table, site) for table, site in zip(written.sites, sites, strict=True)},
        policy_parameters=written.policy.model_dump(exclude_unset=True),
        hop_quotes=written.hop_quotes,
        tenant_shares=_tenant_shares(written, path),
        series_end_s={f"{path}: {site}: {kind}": rows[-1][0] for (site, kind), rows in series.items() if len(rows) > 1},
        locations={site.name: site.location for site in written.sites if site.location is not None},
        unpriced=_unpriced(written, cluster),
        launcher=written.launcher,
        launching={site.name: site.model_dump(include=LAUNCHING, exclude_none=True) for site in written.sites},
    )


def _unpriced(written: FleetFile, cluster: Cluster) -> dict[str, frozenset[str]]:
    """Sites of which nobody gave a figure, by its kind; of egress those that a link without a price leaves."""
    pairs = [*zip(written.sites, cluster.sites, strict=True)]
    powerless = frozenset(site.name for _, site in pairs if site.device.power_w is None)

    def without(written_key: str, resolved_key: str) -> frozenset[str]:
        given = {s.name for t, s in pairs if (getattr(t, written_key), getattr(s.prices, resolved_key)) != (None, None)}
        return frozenset(site.name for site in cluster.sites) - given

    return {
        "rent": without("rent_usd_per_device_hour", "rent_usd_per_device_hour"),
        "electricity": without("electricity", "electricity_usd_per_mwh") | powerless,
        "egress": frozenset(name.partition(">")[0] for name, usd in egress_of(cluster).items() if usd is None),
        "carbon": without("carbon", "carbon_g_per_kwh") | powerless,
        "energy": powerless,
        "idle energy": powerless - {table.name for table, _ in pairs if table.idle_power is not None},
    }


def _tenant_shares(written: FleetFile, path: Path) -> dict[str, float]:
    shares = {tenant.name: tenant.share for tenant in written.tenants}
    if len(shares) < len(written.tenants):
        names = [tenant.name for tenant in written.tenants]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{path}: tenants: {twice!r} is listed twice")
    return shares


def _idle_w(table: FleetSite, site: Site) -> float:
    return table.idle_power or IDLE_SHARE * (site.device.power_w or 0.0)


def _from_matrices(written: FleetFile, path: Path) -> Any:
    named = written.matrices
    assert named is not None
    rates = read_matrix(seen_from(path.parent, named.throughput), "throughput_gbit_s", named.where)
    rates = {pair: rate * named.scale for pair, rate in rates.items()}
    egress = read_matrix(seen_from(path.parent, named.egress), "usd_per_gb") if named.egress else None
    regions = {site.name: site.matrix_region or site.name for site in written.sites}
    rtt = read_matrix(seen_from(path.parent, named.rtt), "avg_rtt_ms")
    return links_between(regions, rates, rtt, egress)


def _series_of_sites(written: FleetFile, path: Path, start: datetime) -> dict[tuple[str, str], Series]:
    """The figures by site and kind."""
    found = {}
    for site in written.sites:
        found[site.name, "electricity"] = _rows(site.electricity, path, start, negative=True)
        found[site.name, "carbon"] = _rows(site.carbon, path, start, negative=False)
    return found


def _price_events(written: FleetFile, series: Mapping[tuple[str, str], Series]) -> list[PriceChanged]:
    by_time: dict[float, dict[str, Price]] = {}
    for site in written.sites:
        usd, carbon = dict(series[site.name, "electricity"]), dict(series[site.name, "carbon"])
        price, intensity = next(iter(usd.values()), 0.0), next(iter(carbon.values()), 0.0)
        for time_s in sorted({*usd, *carbon}):
            price, intensity = usd.get(time_s, price), carbon.get(time_s, intensity)
            by_time.setdefault(time_s, {})[site.name] = Price(price, intensity)
    return [PriceChanged(time_s, prices) for time_s, prices in sorted(by_time.items())]


def _rows(figures: SeriesFile | float | None, path: Path, start: datetime, *, negative: bool) -> Series:
    if isinstance(figures, SeriesFile):
        return read_series(seen_from(path.parent, figures.file), figures.column, start, negative=negative)
    return [] if figures is None else [(0.0, figures)]


def _outages(written: FleetFile, cluster: Cluster, path: Path) -> list[Event]:
    names, links = [site.name for site in cluster.sites], [link.name for link in cluster.links]
    events: list[Event] = []
    for index, outage in enumerate(written.outages):
        if outage.site not in names:
            raise InputError(f"{path}: outages[{index}].site: no site {outage.site!r}{nearest(outage.site, names)}")
        if outage.to_s <= outage.from_s:
            raise InputError(
                f"{path}: outages[{index}]: ends at {outage.to_s:g} s, but begins at {outage.from_s:g} s; "
                "give a to_s after from_s"
            )
        events += [SiteLost(outage.from_s, outage.site), SiteBack(outage.to_s, outage.site)]
    for index, change in enumerate(written.link_changes):
        if change.link not in links:
            raise InputError(
                f"{path}: link_changes[{index}].link: no link {change.link!r}{nearest(change.link, links)}"
            )
        events.append(LinkChanged(change.at_s, change.link, change.bandwidth))
    return events
