"""Quote: what a request would take on a cluster, or on what is left of one, as a few numbers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from farpipe.cost import JobCosts, Layout
from farpipe.cost.money import money_of_step
from farpipe.plan.candidates import Candidate
from farpipe.plan.inter_site_traffic import inter_site_bytes
from farpipe.plan.plan import Plan
from farpipe.spec import Cluster, Job, Training

CHOSEN_SETTINGS: Final = ("zero", "sequence_parallel")


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
    """Bytes of that device that a plan may fill."""
    link_bytes_per_s: Mapping[str, float]
    """Average demand on every directed link between sites (``a>b``): bytes of a step over the step time."""
    power_w: Mapping[str, float]
    """Board power of the devices in use, by site; a site whose device has no stated power is missing."""
    money_per_step: Mapping[str, float] = field(default_factory=dict)
    """USD by kind (rent, electricity, egress); a kind for which there is no price is missing."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Keys of [training] that the planner chose where the request left them open."""
    in_v: bool = False
    """True if the two stages of every rank lie in a V."""
    exact: bool = False
    """True if the step was simulated; else `step_s` and `memory_bytes` are estimates from closed forms."""

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
    between = {name: size for name, size in expected.link_bytes.items() if plan.problem.between_sites[name]}
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
        link_bytes_per_s={name: size / expected.step_s for name, size in between.items()},
        power_w=power_w(cluster, devices),
        money_per_step=money_by_kind(cluster, devices, expected.step_s, between),
        settings=settings_of(plan.job.training),
        in_v="in a V" in plan.shape,
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


def money_data(plan: Plan) -> dict[str, Any]:
    """Money, energy and carbon of a plan, per step and per million tokens, for machines."""
    between = {name: size for name, size in plan.prediction.link_bytes.items() if plan.problem.between_sites[name]}
    step = money_of_step(plan.job.cluster, _devices(plan), plan.prediction.step_s, between)
    tokens = plan.job.training.tokens_per_step
    return {"per_step": step.to_data(), "per_million_tokens": step.per_million_tokens(tokens).to_data()}


def estimated_quote(job: Job, candidate: Candidate, costs: JobCosts, step_s: float, peak: tuple[float, float]) -> Quote:
    """The quote of a candidate by closed forms: `step_s` and the fullest rank's (bytes, limit) are estimates."""
    at, cluster, devices = candidate.layout, job.cluster, candidate.devices
    sent = inter_site_bytes(costs, candidate)
    return Quote(
        where=candidate.where,
        sites=candidate.order,
        layout=at,
        step_s=step_s,
        tokens_per_s=job.training.tokens_per_step / step_s,
        devices=devices,
        memory_bytes=peak[0],
        memory_limit_bytes=peak[1],
        link_bytes_per_s={name: size / step_s for name, size in sent.items()},
        power_w=power_w(cluster, devices),
        money_per_step=money_by_kind(cluster, devices, step_s, sent),
        settings=settings_of(job.training),
        in_v=candidate.in_v,
    )


def settings_of(training: Training) -> dict[str, object]:
    """The keys of [training] that the planner may choose."""
    return {name: getattr(training, name) for name in CHOSEN_SETTINGS}


def money_by_kind(
    cluster: Cluster, devices: Mapping[str, int], step_s: float, link_bytes: Mapping[str, float]
) -> dict[str, float]:
    """USD of a step for rent, electricity and egress; a kind that lacks a price at a site or link in use is missing."""
    found = money_of_step(cluster, devices, step_s, link_bytes)
    unpriced = {missing.split()[0].replace("power", "electricity") for missing in found.unpriced}
    by_kind = {"rent": found.rent_usd, "electricity": found.electricity_usd, "egress": found.egress_usd}
    return {kind: usd for kind, usd in by_kind.items() if kind not in unpriced}


def power_w(cluster: Cluster, devices: Mapping[str, int]) -> dict[str, float]:
    """Board power by site of so many devices; sites whose device has no stated power are left out."""
    rated = {name: cluster.site(name).device.power_w for name in devices}
    return {name: count * rate for name, count in devices.items() if (rate := rated[name]) is not None}
