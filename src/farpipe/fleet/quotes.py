"""Speeds of a job on given devices: the planner's quotes inside a site and over several, and a formula for hops."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Final, Literal, Protocol

from pydantic import ValidationError

from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Cluster, Prices, Request, Site
from farpipe.fleet.job import JobPlacement, Kind
from farpipe.fleet.requests import model_of, request_of
from farpipe.planning.cost import Layout
from farpipe.planning.cost.memory import element_bytes, optimizer_bytes
from farpipe.planning.cost.transfer import narrowed_bytes
from farpipe.planning.planner.quote import Quote
from farpipe.planning.planner.quotes import Planner

Devices = tuple[tuple[str, int], ...]
"""(site, number of devices) in pipeline order."""


class PlannedHops:
    """Quotes of `Planner.quote` over several sites: layout, microbatches and the sites' order are the planner's choice.

    One takes some 10 ms. Sites that are identical but for their names and prices share them. If a quote leaves a site
    idle, the job still reserves the devices of that site.
    """

    def __init__(self, cluster: Cluster, planner: Planner) -> None:
        self._cluster, self._planner = cluster, planner
        self._place = {site.name: index for index, site in enumerate(cluster.sites)}
        self._links = {(link.source, link.target): link for link in cluster.links}
        self._requests: dict[Kind, Request] = {}
        self._numbered: dict[tuple[str, ...], Cluster] = {}
        self._alike: dict[str, Cluster] = {}
        self._quotes: dict[tuple[object, ...], Quote | None] = {}

    def placement(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> JobPlacement | None:
        """The job on `devices`, which may use no links but those of `rates` (bytes/s); None if it can't run there."""
        counts = dict(sorted(devices, key=lambda part: self._place[part[0]]))
        number = {site: str(index) for index, site in enumerate(counts)}
        links = {name: ">".join(number[site] for site in name.split(">")) for name in rates}
        free = {links[name]: rate for name, rate in rates.items()}
        cluster = self._numbered_cluster(tuple(counts))
        quote = self._quote(kind, cluster, tuple(counts.values()), free)
        if quote is None:
            return None
        power_w = {site: count * (self._cluster.site(site).device.power_w or 0.0) for site, count in devices}
        sent = {name: quote.link_bytes_per_s.get(links[name], 0.0) for name in rates}
        return JobPlacement(devices, quote.step_s, sent, power_w, layout=quote.layout)

    def _quote(self, kind: Kind, cluster: Cluster, counts: tuple[int, ...], free: Mapping[str, float]) -> Quote | None:
        key = kind, id(cluster), counts, tuple(sorted(free.items()))
        if key not in self._quotes:
            request = self._requests.setdefault(kind, request_of(kind))  # the planner keeps what it knows by identity
            devices = {str(index): count for index, count in enumerate(counts)}
            rates = {link.name: free.get(link.name, 0.0) for link in cluster.links}
            try:
                self._quotes[key] = self._planner.quote(request, cluster, devices=devices, bytes_per_s=rates)
            except (InfeasibleError, ValidationError):  # it fits no device, or no device can do what it asks for
                self._quotes[key] = None
        return self._quotes[key]

    def _numbered_cluster(self, names: tuple[str, ...]) -> Cluster:
        """The cluster of these sites, called 0, 1, ... and without prices; one object for all that are alike."""
        if names not in self._numbered:
            number = {name: str(index) for index, name in enumerate(names)}
            sites = tuple(
                self._cluster.site(name).model_copy(update={"name": number[name], "prices": Prices()}) for name in names
            )
            links = tuple(
                link.model_copy(update={"source": number[a], "target": number[b], "egress_usd_per_gb": None})
                for a, b in permutations(names, 2)
                if (link := self._links.get((a, b))) is not None
            )
            whole = self._cluster.model_copy(update={"sites": sites, "links": links})
            self._numbered[names] = self._alike.setdefault(whole.model_dump_json(), whole)
        return self._numbered[names]


HopQuotes = Literal["closed-form", "planner"]
"""Source of the speed of a job over several sites."""

RATE_STEP: Final = 0.9
"""Quotes know rates in steps of a tenth, rounded down, so that a link's last bits make no new quote."""

MACHINES_KEPT: Final = 127
"""Machines of the smallest site on which the planner is asked, less one; larger jobs take the next power of two."""


@dataclass(frozen=True)
class StopCosts:
    """Costs of stopping, moving and starting a job; the same for every policy."""

    restart_s: float = 120.0
    """Seconds for processes, connections and compilation."""
    checkpoint_bytes_per_s: float = 1e9
    """Rate to and from storage, for each device of the job."""
    checkpoint_every_s: float = 1800.0
    """Longest work, in seconds, that is lost when a job breaks."""
    transfer_share: float = 0.5
    """Share of a link's free rate that a checkpoint takes which moves to another site."""
    stop_s: float = 0.0
    """Seconds from the order to stop until nothing runs, beside writing the checkpoint; devices are held for both. 0:
    they are free at once."""
    copy_every_s: float = 0.0
    """Seconds over which a running job sends a checkpoint to another site before it sends the next one; 0: it sends
    none."""
    start_limit_s: float = 1800.0
    """Seconds beyond its expected end after which a start that nobody confirms has failed."""
    stop_limit_s: float = 900.0
    """Seconds beyond its expected end after which a stop that nobody confirms counts as over."""
    first_pause_s: float = 60.0
    """Pause after the second failure in a row, twice as long after every further one; the first has none."""
    longest_pause_s: float = 900.0
    max_failures: int = 1000
    """Failures in a row, within one hundredth of its steps, after which a job is given up."""

    @property
    def holds(self) -> bool:
        """True if jobs that are told to stop hold their devices until they have."""
        return self.stop_s > 0

    def checkpoint_s(self, state_bytes: float, num_devices: int) -> float:
        """Seconds in which the devices of a job write its checkpoint, or read it."""
        return state_bytes / (self.checkpoint_bytes_per_s * num_devices)

    def pause_s(self, num_failures: int) -> float:
        """Seconds before the next start after so many failures in a row."""
        doubled = self.first_pause_s * 2.0 ** min(num_failures - 2, 60) if num_failures > 1 else 0.0
        return min(doubled, self.longest_pause_s)


class Quotes(Protocol):
    """Speed, demand and power of jobs on devices."""

    def placement(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> JobPlacement | None:
        """The job on `devices` with `rates` (bytes/s, by directed link) at most; None if it can't run there."""

    def state_bytes(self, kind: Kind) -> float:
        """Size of a checkpoint."""

    def needed_rate(self, kind: Kind, num_devices: int) -> float | None:
        """Bytes/s that an inter-site hop needs in each direction to never slow the job; None if it fits nowhere."""


@dataclass(frozen=True)
class _Base:
    """A quote inside one site, as far as inter-site hops need it."""

    step_s: float
    layout: Layout
    step_bytes: float
    """That cross a boundary of the pipeline in each direction in one step."""


class PlannerQuotes:
    """Quotes of `Planner`, for devices of one site and of several.

    With `hop_quotes = "closed-form"` those over several sites keep the layout of one: a boundary carries tokens x
    hidden x 2 bytes a step in each direction, whatever the number of replicas; a link that takes less time for a step's
    bytes than the step itself costs its latency and one message's time, there and back, and a slower one sets the pace
    (arXiv 2510.12064). Devices of several kinds work in proportion to their speed then.
    """

    def __init__(self, cluster: Cluster, planner: Planner | None = None, hop_quotes: HopQuotes = "planner") -> None:
        self._sites = {site.name: site for site in cluster.sites}
        self._latency_s = {link.name: link.latency_s for link in cluster.links}
        self._planner = planner or Planner()
        self._hops = PlannedHops(cluster, self._planner) if hop_quotes == "planner" else None
        self._inside: dict[tuple[Kind, str, int], _Base | None] = {}
        self._placed: dict[tuple[Kind, Devices, tuple[float, ...]], JobPlacement | None] = {}
        self._state: dict[Kind, float] = {}
        self._needed: dict[tuple[Kind, int], float | None] = {}
        self._requests: dict[Kind, Request] = {}
        self._wholes: dict[tuple[str, int, int], Cluster] = {}

    def placement(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> JobPlacement | None:
        if kind.num_devices:
            return self._timed(kind, devices)
        names = _links_between(devices)
        found = tuple(_stepped(rates.get(name, 0.0)) for name in names)
        if not all(found):
            return None
        key = kind, devices, found
        if key not in self._placed:
            self._placed[key] = self._quote(kind, devices, dict(zip(names, found, strict=True)))
        return self._placed[key]

    def state_bytes(self, kind: Kind) -> float:
        if kind.num_devices:
            return 0.0
        if kind not in self._state:  # a checkpoint has the weights and the optimizer's state
            request = request_of(kind)
            width = element_bytes(request.training.precision) + optimizer_bytes(request.training.precision)
            self._state[kind] = float(width) * request.model.num_params
        return self._state[kind]

    def needed_rate(self, kind: Kind, num_devices: int) -> float | None:
        """Rate that `Quotes` asks for, on the fastest devices of the cluster."""
        if kind.num_devices:
            return None
        if (kind, num_devices) not in self._needed:
            bases = [self._base(kind, site, num_devices) for site in self._sites.values()]
            rates = [base.step_bytes / base.step_s for base in bases if base is not None]
            self._needed[kind, num_devices] = max(rates, default=None)
        return self._needed[kind, num_devices]

    def _timed(self, kind: Kind, devices: Devices) -> JobPlacement | None:
        """A job known by its duration: at one site, as fast on every kind of device, in proportion to their number.

        What it would send between sites and the size of its checkpoint are not known: the first forbids several sites,
        the second counts as nothing.
        """
        (site, number), *others = devices
        power_w = {site: number * (self._sites[site].device.power_w or 0.0)}
        return None if others else JobPlacement(devices, kind.num_devices / number, {}, power_w)

    def _quote(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> JobPlacement | None:
        if rates and self._hops is not None:
            return self._hops.placement(kind, devices, rates)
        num_devices = sum(number for _, number in devices)
        bases = [(self._base(kind, self._sites[name], num_devices), number) for name, number in devices]
        if any(base is None for base, _ in bases):
            return None
        known = [(base, number) for base, number in bases if base is not None]
        step_s = num_devices / sum(number / base.step_s for base, number in known)
        slowest = max((base for base, _ in known), key=lambda base: base.step_s)
        size, count = slowest.step_bytes, slowest.layout.num_microbatches
        step_s = max([step_s, *(size / rate for rate in rates.values())])
        step_s += sum(size / rate / count + self._latency_s[name] for name, rate in rates.items())
        power_w = {name: number * (self._sites[name].device.power_w or 0.0) for name, number in devices}
        return JobPlacement(devices, step_s, dict.fromkeys(rates, size / step_s), power_w, layout=slowest.layout)

    def _base(self, kind: Kind, site: Site, num_devices: int) -> _Base | None:
        key = kind, site.device.name, num_devices
        if key not in self._inside:
            self._inside[key] = self._ask(kind, site, num_devices)
        return self._inside[key]

    def _ask(self, kind: Kind, site: Site, num_devices: int) -> _Base | None:
        whole = self._whole_site(site, num_devices)
        request = self._requests.setdefault(kind, request_of(kind))
        try:
            quote = self._planner.quote(request, whole, devices={whole.sites[0].name: num_devices})
        except (InfeasibleError, ValidationError):
            return None
        return _base_of(kind, quote)

    def _whole_site(self, site: Site, num_devices: int) -> Cluster:
        """A site with at least so many devices like those of `site`, of which a quote uses a part.

        The planner keeps what it knows of a request on a cluster, so all sizes of a kind share a few sites.
        """
        machine, room = min(site.devices_per_machine, num_devices), num_devices
        if num_devices % machine:
            machine = 1
        elif machine > 1 and site.devices_per_machine % machine == 0:
            machine = site.devices_per_machine
            room = machine << max(MACHINES_KEPT, (num_devices - 1) // machine).bit_length()
        key = site.device.name, machine, room
        if key not in self._wholes:
            alone = site.model_copy(update={"num_devices": room, "devices_per_machine": machine})
            self._wholes[key] = Cluster.model_construct(sites=(alone,), links=())
        return self._wholes[key]


def _base_of(kind: Kind, quote: Quote) -> _Base:
    training, numbers = request_of(kind).training, kind.sequence_length * kind.global_batch * model_of(kind).hidden
    step_bytes = narrowed_bytes(float(numbers * element_bytes(training.precision)), training)
    return _Base(quote.step_s, quote.layout, step_bytes)


def _links_between(devices: Devices) -> list[str]:
    """The directed links that a pipeline over these sites uses, both directions of every inter-site hop."""
    return [name for (a, _), (b, _) in pairwise(devices) for name in (f"{a}>{b}", f"{b}>{a}")]


def _stepped(rate: float) -> float:
    """`rate` rounded down to a power of RATE_STEP."""
    if rate <= 0:
        return 0.0
    exponent = math.ceil(math.log(rate) / math.log(RATE_STEP) - 1e-9)
    return float(RATE_STEP**exponent)
