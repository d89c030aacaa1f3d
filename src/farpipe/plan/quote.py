"""Quote: what a request would take on a cluster, or on what is left of one, as a few numbers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from farpipe.cost import Layout
from farpipe.plan.plan import Plan
from farpipe.spec import Cluster
from farpipe.step import is_inter_site


@dataclass(frozen=True)
class Quote:
    """Time, devices, memory, link demand, power and money of one training job on one use of sites."""

    where: str
    """The placement in words: ``a > b`` for a pipeline over both sites, ``a + b`` for replicas at each of them."""
    sites: tuple[str, ...]
    """The sites in use, in pipeline order."""
    layout: Layout
    step_s: float
    """From one step's start to the next one's."""
    tokens_per_s: float
    devices: Mapping[str, int]
    """Devices in use by site."""
    memory_bytes: float
    """Peak of one device, on the rank that comes nearest to its limit."""
    memory_limit_bytes: float
    """What a plan may fill of that device."""
    link_bytes_per_s: Mapping[str, float]
    """Average demand on every directed link between sites (``a>b``): bytes of a step over the step time."""
    power_w: Mapping[str, float]
    """Board power of the devices in use, by site; a site whose device has no stated power is missing."""
    money_per_step: Mapping[str, float] = field(default_factory=dict)
    """USD by kind (rent, electricity, egress); a kind for which there is no price is missing."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Keys of [training] that the planner chose where the request left them open."""
    exact: bool = False
    """Whether the step was simulated; else `step_s` and `memory_bytes` are estimates from closed forms."""

    @property
    def num_devices(self) -> int:
        """Devices in use at all sites."""
        return sum(self.devices.values())

    @property
    def device_s(self) -> float:
        """Device-seconds of one step."""
        return self.num_devices * self.step_s


def quote_of(plan: Plan) -> Quote:
    """The quote of a plan: what its simulated step says."""
    at, expected, cluster = plan.layout, plan.prediction, plan.job.cluster
    devices = _devices(plan)
    fullest = max(range(at.pipeline), key=lambda rank: expected.peak_memory_bytes[rank] / _limit_bytes(plan, rank))
    return Quote(
        where=plan.where,
        sites=at.replica_sites or tuple(dict.fromkeys(plan.sites)),
        layout=at,
        step_s=expected.step_s,
        tokens_per_s=expected.tokens_per_s,
        devices=devices,
        memory_bytes=expected.peak_memory_bytes[fullest],
        memory_limit_bytes=_limit_bytes(plan, fullest),
        link_bytes_per_s={
            name: size / expected.step_s for name, size in expected.link_bytes.items() if is_inter_site(name)
        },
        power_w=power_w(cluster, devices),
        exact=True,
    )


def _devices(plan: Plan) -> dict[str, int]:
    at = plan.layout
    if at.replica_sites:
        return dict.fromkeys(at.replica_sites, at.pipeline * at.devices_per_rank)
    return {name: ranks * at.devices_per_rank for name, ranks in Counter(plan.sites).items()}


def _limit_bytes(plan: Plan, rank: int) -> float:
    limit = plan.problem.ranks[rank].memory_bytes
    return plan.job.cluster.site(plan.sites[rank]).device.memory_bytes if limit is None else limit


def power_w(cluster: Cluster, devices: Mapping[str, int]) -> dict[str, float]:
    """Board power by site of so many devices; sites whose device has no stated power are left out."""
    rated = {name: cluster.site(name).device.power_w for name in devices}
    return {name: count * rate for name, count in devices.items() if (rate := rated[name]) is not None}
