"""Sites with their devices and prices, and the directed links between the sites; a price not known is None, not 0."""

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from farpipe.core.catalog import device_names, device_row, rack_sizes
from farpipe.core.spec.part import (
    BytesPerSecond,
    Count,
    LatencySeconds,
    Name,
    NonNegative,
    NumDevices,
    Part,
    Place,
    Positive,
    Share,
    SiteName,
    fault,
)
from farpipe.core.spec.training import Rate
from farpipe.core.strict import nearest
from farpipe.core.units import format_bytes, format_rate, format_seconds

CongestionControl = Literal["bbr", "cubic", "reno"]

USUAL_MACHINE: Final = 8
RESERVED_BYTES: Final = 2.5 * 2**30
RESERVED_FRACTION: Final = 1 / 16
"""Memory of a device that is left free by default, the less of both; with less than the share free a plan warns:
docs/reference/cost-model.md, section 3."""
TCP_WINDOW_BYTES: Final = 2.7e6
"""Window of one stream with default buffers: hivemind-multi-cloud's measurements between clouds 0.2 to 300 ms apart."""
RDMA_WINDOW_BYTES: Final = 16e6
"""Default window of an RDMA queue between sites: 12.8 Gbit/s at 1000 km of fibre, as MatchRDMA reports."""
SECONDS_PER_KM: Final = 4.9e-6
"""Delay of light in silica fibre: group index 1.468 / c = 4.9 us/km (ITU-T G.652 fibre)."""
MAX_FIBRE_KM: Final = 20_038.0
"""Half of the Earth's circumference: no fibre between two places need be longer."""
SITE_RTT_S: Final = 20e-6
"""Round trip inside a site, from the sender to the switch that acknowledges."""


def _finite_number(value: Any) -> float:
    """Prices of electricity may be negative, and were in Victoria in 22 % of the hours of early 2024."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
        raise ValueError(f"expected a price in USD, found {value!r:.40}")
    return float(value)


def _pue(value: Any) -> float:
    number = _finite_number(value)
    if not 1 <= number <= 10:
        raise ValueError(f"a site draws at least what its devices draw: from 1 to 10, found {value!r:.40}")
    return number


class Prices(Part):
    """Prices of one site, and the carbon of its electricity."""

    rent_usd_per_device_hour: NonNegative | None = None
    """Rent of one device."""
    electricity_usd_per_mwh: Annotated[float, BeforeValidator(_finite_number)] | None = None
    """Price of electricity; may be negative."""
    pue: Annotated[float, BeforeValidator(_pue)] = 1.0
    """Power usage effectiveness: watts that the site draws for each watt of its devices, 1 or more."""
    carbon_g_per_kwh: NonNegative | None = None
    """Carbon of the electricity."""
    egress_usd_per_gb: NonNegative | None = None
    """Price of 10^9 bytes that leave for another site, unless the link has a price of its own."""


class Device(Part):
    """One accelerator."""

    name: Name
    peak_flops: dict[Rate, Positive] = Field(min_length=1)
    """Dense FLOP/s by precision, without sparsity; a precision that is missing can't be used."""
    memory_bytes: Positive
    memory_bandwidth_bytes_per_s: Positive
    power_w: Positive | None = None
    """Board power; None where it is not known."""

    def __hash__(self) -> int:
        return hash(self.name)  # rates are a dictionary

    @property
    def is_cpu(self) -> bool:
        """True for cores of a CPU: one of the words of its name is cpu."""
        return "cpu" in re.split("[^a-z]+", self.name.lower())


class LocalLink(Part):
    """A connection inside a site, as one device sees it in one direction."""

    latency_s: LatencySeconds
    bandwidth_bytes_per_s: BytesPerSecond


def rack_share(device: str, num_devices: int) -> int | None:
    """Devices of each of the largest equal parts of `num_devices` that NVLink reaches, where `device` is one of the
    catalogue's whose NVLink reaches over a rack.

    512 devices of racks of 72 are eight times 64: jobs leave some of each rack out.
    """
    reached = rack_sizes().get(device.lower())
    most = max((size for size in range(1, (reached or 0) + 1) if num_devices % size == 0), default=0)
    return most if most > USUAL_MACHINE else None


def without_flash_attention(devices: Iterable[Device]) -> list[str]:
    """Names of those of `devices` that the catalogue has and for which FlashAttention 2 has no kernels."""
    known = [device_row(name) for name in {device.name: None for device in devices} if name in device_names()]
    return [row.name for row in known if not row.flash_attention]


def _usual_machines(known: dict[str, Any]) -> int:
    """A rack's share where NVLink reaches over it; else eight devices, or all where there are fewer, and the last
    machine may have fewer."""
    count = int(known.get("num_devices", 1))
    inside = rack_share(known["device"].name, count) if "device" in known else None
    return inside or min(USUAL_MACHINE, count)


def _usual_reserve(known: dict[str, Any]) -> float:
    return min(RESERVED_BYTES, RESERVED_FRACTION * known["device"].memory_bytes) if "device" in known else 0.0


MTTR_S: Final = 120.0
"""Usual time for which a site is away: a restart of its processes. A guess."""


class Site(Part):
    """A datacenter with `num_devices` equal devices in machines of `devices_per_machine`.

    With machines of the usual size the last one may have fewer.
    """

    name: SiteName
    device: Device
    num_devices: NumDevices
    devices_per_machine: Count = Field(default_factory=_usual_machines)
    machine_link: LocalLink
    """Link between the devices of one machine, NVLink for example."""
    site_link: LocalLink
    """Link between the machines of the site, InfiniBand for example."""
    memory_reserve_bytes: NonNegative = Field(default_factory=_usual_reserve)
    """Memory of every device that plans leave free: the driver's context, buffers of libraries, fragmentation."""
    prices: Prices = Prices()
    mtbf_s: Annotated[Positive | None, Field(exclude_if=lambda seconds: seconds is None)] = None
    """Mean time between failures of the site; None: it is not planned for."""
    mttr_s: Annotated[Positive, Field(exclude_if=lambda seconds: seconds == MTTR_S)] = MTTR_S
    """Mean time to repair: for how long a site is away."""

    @model_validator(mode="after")
    def _whole_machines(self) -> Self:
        usual = self.devices_per_machine == USUAL_MACHINE <= self.num_devices
        if self.num_devices % self.devices_per_machine and not usual:
            raise fault(
                f"{self.devices_per_machine} does not divide num_devices {self.num_devices}", "devices_per_machine"
            )
        if self.memory_reserve_bytes >= self.device.memory_bytes:
            reserve, memory = format_bytes(self.memory_reserve_bytes), format_bytes(self.device.memory_bytes)
            raise fault(f"{reserve} leaves nothing of the device's {memory}", "memory_reserve")
        return self

    @property
    def plannable_bytes(self) -> float:
        """Memory of one device that a plan may fill."""
        return self.device.memory_bytes - self.memory_reserve_bytes


class PlainTcp(Part):
    """TCP connections that are not kept warm, as those of NCCL and gloo: they start slowly after a pause."""

    num_streams: Count = 1
    window_bytes: Positive = TCP_WINDOW_BYTES
    """The most that each sends in a round trip, for long."""
    mtu_bytes: Annotated[int, Field(ge=576)] = 1500
    """Largest packet, its headers included."""


class SiteLink(Part):
    """One direction of a connection between two sites.

    Loss and jitter make messages late (the cost model's `lossy_links`); only `farpipe wan` uses the queue.
    """

    source: SiteName
    target: SiteName
    latency_s: LatencySeconds
    bandwidth_bytes_per_s: BytesPerSecond
    queue_bytes: Positive | None = None
    """The most that waits for the link; None: as much as is in transit when it is busy, see `emulate.pipe`."""
    loss: Share = 0.0
    """The share of packets that is lost."""
    jitter_s: LatencySeconds = 0.0
    """The most that a packet is delayed beyond the latency."""
    congestion_control: CongestionControl = Field(default="bbr", exclude_if=lambda name: bool(name == "bbr"))
    """Congestion control of the hosts where packets are lost; farpipe takes BBR wherever it is allowed."""
    plain_tcp: PlainTcp | None = Field(default=None, exclude_if=lambda plain: plain is None)
    """What carries messages in place of farpipe's own transport, whose connections are kept warm; None: that one."""
    egress_usd_per_gb: NonNegative | None = None
    """Price of 10^9 bytes over this link; None: the price of the site that it leaves."""

    @property
    def name(self) -> str:
        """``zurich>lugano``, as in a Problem."""
        return f"{self.source}>{self.target}"


def windowed_rate(rate: float, window_bytes: float, rtt_s: float, num_streams: int = 1) -> float:
    """Bytes per second that streams with such a window get through, at most the link's `rate`.

    TCP with default buffers, and reliable RDMA, can't be faster than window / round trip, however fast the link is:
    at most one window is in flight unacknowledged in each stream. Where a switch at the source's site acknowledges in
    place of the far end, the round trip is that inside the site.
    """
    return min(rate, num_streams * window_bytes / rtt_s) if rtt_s > 0 else rate


def check_ends(site_names: Sequence[str], links: Iterable[tuple[Place, str, str]]) -> None:
    """Raise unless every site has a name of its own and every pair of different sites at most one link.

    `links` holds where each directed link is written, its source and its target.
    """
    known: set[str] = set()
    for index, name in enumerate(site_names):
        if name in known:
            raise fault(f"there is already a site called {name!r}", "sites", index, "name")
        known.add(name)
    seen: set[tuple[str, ...]] = set()
    for place, *ends in links:
        for name in ends:
            if name not in known:
                raise fault(f"there is no site {name!r}{nearest(name, site_names)}", *place)
        if ends[0] == ends[1]:
            raise fault(f"{ends[0]!r} is linked with itself", *place)
        if tuple(ends) in seen:
            raise fault(f"the link from {ends[0]!r} to {ends[1]!r} is given twice", *place)
        seen.add(tuple(ends))


class Cluster(Part):
    """The sites that may be used and the links between them; a pair of sites without a link can't talk."""

    sites: tuple[Site, ...] = Field(min_length=1)
    links: tuple[SiteLink, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [site.name for site in self.sites]
        check_ends(names, [(("links", index), link.source, link.target) for index, link in enumerate(self.links)])
        return self

    def site(self, name: str) -> Site:
        """The site called `name`; KeyError if there is none."""
        return {site.name: site for site in self.sites}[name]

    def within(self, names: Collection[str]) -> Self:
        """The cluster of these sites alone, in its own order, and of the links among them."""
        kept = set(names)
        sites = tuple(site for site in self.sites if site.name in kept)
        links = tuple(link for link in self.links if {link.source, link.target} <= kept)
        return self.model_copy(update={"sites": sites, "links": links})

    def link(self, source: str, target: str) -> SiteLink | None:
        """The link from `source` to `target`, None if there is none."""
        return next((link for link in self.links if (link.source, link.target) == (source, target)), None)

    def missing_link(self, order: Iterable[Site]) -> tuple[str, str] | None:
        """The first neighbours in `order` that can't talk in one direction, as (source, target)."""
        for one, other in pairwise(order):
            for source, target in ((one.name, other.name), (other.name, one.name)):
                if self.link(source, target) is None:
                    return source, target
        return None

    @property
    def num_devices(self) -> int:
        """Devices of all sites."""
        return sum(site.num_devices for site in self.sites)


def differing_keys(one: Site, other: Site) -> list[str]:
    """The keys in which two sites differ, each with both values, as far as one pipeline can't stand for both.

    Name and number of devices do not count, nor machines larger than all that the smaller site has.
    """
    smaller = min(one.num_devices, other.num_devices)
    pairs = {
        "device": (one.device.name, other.device.name),
        "devices_per_machine": tuple(min(site.devices_per_machine, smaller) for site in (one, other)),
        "machine_link": (_speed(one.machine_link), _speed(other.machine_link)),
        "site_link": (_speed(one.site_link), _speed(other.site_link)),
        "memory_reserve": tuple(format_bytes(site.memory_reserve_bytes) for site in (one, other)),
    }
    found = [f"{key} ({a}, {b})" for key, (a, b) in pairs.items() if a != b]
    return found or ([] if one.device == other.device else [f"the figures of device {one.device.name}"])


def _speed(link: LocalLink) -> str:
    return f"{format_rate(link.bandwidth_bytes_per_s)} after {format_seconds(link.latency_s)}"
