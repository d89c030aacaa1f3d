"""State that a framework divides over replicas, and bytes that it sends between sites, beside those of a plan."""

from dataclasses import replace
from typing import TYPE_CHECKING

from farpipe.planning.cost import JobCosts, settle, step_cost
from farpipe.planning.cost.memory import gathered_weight_bytes, gradient_bytes

if TYPE_CHECKING:
    from farpipe.planning import Plan


def more_bytes(plan: "Plan") -> list[float]:
    """Bytes on a device of each rank that ZeRO-1 over the replicas of one site takes more than the plan."""
    at = replace(plan.layout, data=plan.layout.data_inside, replica_sites=())
    changes = {"zero": 1, "global_batch": at.data * at.num_microbatches * at.microbatch_size}
    training = settle(plan.job.training, plan.layout).model_copy(update=changes)
    whole = step_cost(JobCosts(plan.job.model, training), at, plan.placements, plan.job.cluster).problem
    return [w.static_bytes - p.static_bytes for w, p in zip(whole.ranks, plan.problem.ranks, strict=True)]


def has_whole_optimizers(plan: "Plan") -> bool:
    """True if the replicas of one site alone can divide the optimizer's state: there are several, and memory for it."""
    if not plan.layout.replica_sites or plan.layout.data_inside == 1:
        return False
    ranks = zip(plan.problem.ranks, plan.prediction.peak_memory_bytes, more_bytes(plan), strict=True)
    return all(rank.memory_bytes is None or peak + more <= rank.memory_bytes for rank, peak, more in ranks)


def more_between_sites(
    plan: "Plan", framework: str, *, is_flat: bool, divides: bool, sums_per_step: int = 1
) -> list[str]:
    """Comment on gradients of replicas at several sites where more bytes of them cross than planned.

    The plan sums inside every site first, once a step. `is_flat`: one ring goes over all replicas; `divides`: each
    keeps a part of the sums, and gathers weights.
    """
    at, training = plan.layout, settle(plan.job.training, plan.layout)
    if not at.replica_sites:
        return []
    num_sites = len(at.replica_sites)
    num_members = at.data if is_flat else num_sites
    whole, parts = 2 * gradient_bytes(training), gradient_bytes(training) + gathered_weight_bytes(training)
    planned = (1 - 1 / num_sites) * (parts if training.zero == 1 else whole)
    sent = sums_per_step * (1 - 1 / num_members) * (parts if divides else whole)
    if sent < 1.01 * planned:
        return []
    return [f"# Not as planned: {framework} sends {sent / planned:.2g} times as many bytes between sites."]
