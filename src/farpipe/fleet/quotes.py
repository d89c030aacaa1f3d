"""Step times of a job on given devices of given sites: the planner's quotes, and what inter-site hops add."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, Protocol

from farpipe.errors import InfeasibleError
from farpipe.fleet.hops import Devices, PlannedHops, request_of
from farpipe.fleet.job import Kind, Placement
from farpipe.fleet.models import model_of
from farpipe.plan.quote import Quote
from farpipe.plan.service import Planner
from farpipe.spec import Cluster, Request, Site

__all__ = ["Devices", "HopQuotes", "PlannerQuotes", "Quotes", "StopCosts"]

HopQuotes = Literal["closed-form", "planner"]
"""Source of the speed of a job over several sites."""

STATE_BYTES_PER_PARAM: Final = 14.0
"""Of a checkpoint: a 16-bit weight, and master weight and two moments in float32 (ZeRO, arXiv 1910.02054)."""
RATE_STEP: Final = 0.9
"""Quotes know rates in steps of a tenth, rounded down, so that a link's last bits make no new quote."""

MACHINES_KEPT: Final = 127
"""Machines of the smallest site on which the planner is asked, less one; larger jobs take the next power of two."""


@dataclass(frozen=True)
class StopCosts:
    """Costs of stopping, moving and starting a job; the same for every policy."""

    restart_s: float = 120.0
    """Processes, connections, compilation."""
    checkpoint_bytes_per_s: float = 1e9
    """To and from storage, for each device of the job."""
    checkpoint_every_s: float = 1800.0
    """Work of at most so long is lost when a job breaks."""
    transfer_share: float = 0.5
    """Of a link's free rate, for a checkpoint that moves to another site."""


class Quotes(Protocol):
    """Speed, demand and power of jobs on devices."""

    def placement(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> Placement | None:
        """The job on `devices` with `rates` (bytes/s, by directed link) at most; None if it can't run there."""

    def state_bytes(self, kind: Kind) -> float:
        """Size of a checkpoint."""

    def needed_rate(self, kind: Kind, num_devices: int) -> float | None:
        """Bytes/s that an inter-site hop needs in each direction to never slow the job; None if it fits nowhere."""


@dataclass(frozen=True)
class _Base:
    """A quote inside one site, as far as inter-site hops need it."""

    step_s: float
    num_microbatches: int
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
        self._placed: dict[tuple[Kind, Devices, tuple[float, ...]], Placement | None] = {}
        self._params: dict[str, int] = {}
        self._needed: dict[tuple[Kind, int], float | None] = {}
        self._requests: dict[Kind, Request] = {}
        self._wholes: dict[tuple[str, int, int], Cluster] = {}

    def placement(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> Placement | None:
        """As in `Quotes`."""
        names = _links_between(devices)
        found = tuple(_stepped(rates.get(name, 0.0)) for name in names)
        if not all(found):
            return None
        key = kind, devices, found
        if key not in self._placed:
            self._placed[key] = self._quote(kind, devices, dict(zip(names, found, strict=True)))
        return self._placed[key]

    def state_bytes(self, kind: Kind) -> float:
        """As in `Quotes`."""
        if kind.model not in self._params:
            self._params[kind.model] = model_of(kind.model).num_params
        return STATE_BYTES_PER_PARAM * self._params[kind.model]

    def needed_rate(self, kind: Kind, num_devices: int) -> float | None:
        """As in `Quotes`; for the fastest devices of the cluster."""
        if (kind, num_devices) not in self._needed:
            bases = [self._base(kind, site, num_devices) for site in self._sites.values()]
            rates = [base.step_bytes / base.step_s for base in bases if base is not None]
            self._needed[kind, num_devices] = max(rates, default=None)
        return self._needed[kind, num_devices]

    def _quote(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> Placement | None:
        if rates and self._hops is not None:
            return self._hops.placement(kind, devices, rates)
        num_devices = sum(number for _, number in devices)
        bases = [(self._base(kind, self._sites[name], num_devices), number) for name, number in devices]
        if any(base is None for base, _ in bases):
            return None
        known = [(base, number) for base, number in bases if base is not None]
        step_s = num_devices / sum(number / base.step_s for base, number in known)
        slowest = max((base for base, _ in known), key=lambda base: base.step_s)
        size, count = slowest.step_bytes, slowest.num_microbatches
        step_s = max([step_s, *(size / rate for rate in rates.values())])
        step_s += sum(size / rate / count + self._latency_s[name] for name, rate in rates.items())
        power_w = {name: number * (self._sites[name].device.power_w or 0.0) for name, number in devices}
        return Placement(devices, step_s, dict.fromkeys(rates, size / step_s), power_w)

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
        except InfeasibleError:
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
    hidden = model_of(kind.model).hidden
    step_bytes = 2.0 * kind.sequence_length * kind.global_batch * hidden
    return _Base(quote.step_s, quote.layout.num_microbatches, step_bytes)


def _links_between(devices: Devices) -> list[str]:
    """The directed links that a pipeline over these sites uses, both directions of every inter-site hop."""
    return [name for (a, _), (b, _) in pairwise(devices) for name in (f"{a}>{b}", f"{b}>{a}")]


def _stepped(rate: float) -> float:
    """`rate` rounded down to a power of RATE_STEP."""
    if rate <= 0:
        return 0.0
    exponent = math.ceil(math.log(rate) / math.log(RATE_STEP) - 1e-9)
    return float(RATE_STEP**exponent)
