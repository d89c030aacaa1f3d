"""Quote: what a request would take on a cluster, or on what is left of one, as a few numbers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Literal

from farpipe.core.spec import Job
from farpipe.planning.cost import JobCosts, Layout, memory
from farpipe.planning.cost.adapters import trained_model_params
from farpipe.planning.cost.money import Money, money_of_step
from farpipe.planning.cost.transfer import narrowed_bytes, ring_bytes
from farpipe.planning.planner.candidates import Candidate
from farpipe.planning.planner.plan import Plan

Objective = Literal["time", "money", "energy", "carbon"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("time", "money", "energy", "carbon")


@dataclass(frozen=True)
class Quote:
    """Time, devices, memory, link demand and money of one training job on one site set."""

    where: str
    """The placement in words: ``a > b`` for a pipeline over both sites, ``a + b`` for replicas at each of them."""
    sites: tuple[str, ...]
    """The sites in use, in pipeline order."""
    layout: Layout
    in_v: bool
    """True if the two stages of every rank lie in a V."""
    step_s: float
    """Seconds from one step's start to the next one's."""
    exact: bool
    """True if the step was simulated; else `step_s` and `memory_bytes` are estimates from closed forms."""
    tokens_per_s: float
    devices: Mapping[str, int]
    """Devices in use by site."""
    memory_bytes: float
    """Peak of one device, on the rank that comes nearest to its limit."""
    memory_limit_bytes: float
    """Bytes of that device that a plan may fill."""
    link_bytes_per_s: Mapping[str, float]
    """Average demand on every directed link between sites (``a>b``): bytes of a step over the step time."""
    money: Money
    """Money, energy and carbon of a step; `unpriced` names the figures that the sites lack."""

    @property
    def num_devices(self) -> int:
        """Devices in use at all sites."""
        return sum(self.devices.values())

    @property
    def per_million_tokens(self) -> Money:
        """Money, energy and carbon of a million tokens."""
        return self.money.per_million_tokens(self.tokens_per_s * self.step_s)

    def figure(self, objective: Objective) -> float:
        """Figure minimized by `objective`: seconds of a step, or USD, kWh or grams of carbon per million tokens."""
        if objective == "time":
            return self.step_s
        names = {"money": "total_usd", "energy": "energy_kwh", "carbon": "carbon_g"}
        return float(getattr(self.per_million_tokens, names[objective]))


def quote_of(plan: Plan) -> Quote:
    """The quote of a plan, from its simulated step."""
    limits = [rank.memory_bytes for rank in plan.problem.ranks]
    known = [limit or site.device.memory_bytes for limit, site in zip(limits, plan.candidate.sites, strict=True)]
    used = zip(plan.prediction.peak_memory_bytes, known, strict=True)
    fullest = max(used, key=lambda pair: pair[0] / pair[1])
    found = quote_of_candidate(
        plan.job, plan.candidate, plan.prediction.step_s, fullest, plan.inter_site_bytes, exact=True
    )
    return replace(found, tokens_per_s=plan.prediction.tokens_per_s)


def quote_of_candidate(
    job: Job,
    candidate: Candidate,
    step_s: float,
    peak: tuple[float, float],
    sent: Mapping[str, float],
    *,
    exact: bool,
) -> Quote:
    """The quote of a candidate; `peak`: (bytes, limit) of the fullest rank, `sent`: bytes of a step by link."""
    return Quote(
        where=candidate.where,
        sites=candidate.order,
        layout=candidate.layout,
        in_v=candidate.in_v,
        step_s=step_s,
        exact=exact,
        tokens_per_s=job.training.tokens_per_step / step_s,
        devices=candidate.devices,
        memory_bytes=peak[0],
        memory_limit_bytes=peak[1],
        link_bytes_per_s={name: size / step_s for name, size in sent.items()},
        money=money_of_step(job.cluster, candidate.devices, step_s, sent),
    )


def money_data(plan: Plan) -> dict[str, Any]:
    """Money, energy and carbon of a plan, per step and per million tokens, for machines."""
    quote = quote_of(plan)
    return {"per_step": quote.money.to_data(), "per_million_tokens": quote.per_million_tokens.to_data()}


def inter_site_bytes(costs: JobCosts, candidate: Candidate) -> dict[str, float]:
    """Bytes of a step over every directed link between sites, all replicas together, without a Problem."""
    layout = candidate.layout
    if layout.replica_sites:
        training, homes = costs.training, layout.replica_sites
        num_params = trained_model_params(costs.model, training)
        size = ring_bytes("all-reduce", num_params * memory.gradient_bytes(training), len(homes))
        if training.zero1:
            size = size / 2 + ring_bytes("all-gather", num_params * memory.gathered_weight_bytes(training), len(homes))
        return {f"{a}>{b}": size for a, b in zip(homes, (*homes[1:], homes[0]), strict=True)}
    names = [candidate.sites[rank].name for rank in candidate.ranks]
    size = layout.data * narrowed_bytes(memory.boundary_bytes(costs.model, costs.training, layout), costs.training)
    directed = Counter(ends for a, b in pairwise(names) if a != b for ends in ((a, b), (b, a)))
    return {f"{a}>{b}": number * layout.num_microbatches * size for (a, b), number in directed.items()}
