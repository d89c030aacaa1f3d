"""Plans of groups of replicas that are not alike, from what the job pins or from a search."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from farpipe.cost import JobCosts, StepCost
from farpipe.cost.groups import ReplicaGroup, group_reduces
from farpipe.errors import InfeasibleError
from farpipe.plan.bandwidth import link_bytes
from farpipe.plan.candidates import MICROBATCH_SIZES
from farpipe.plan.groups import PlayedGroup, PlayedGroups, best_pinned
from farpipe.plan.plan import Plan, PlanGroup, Prediction
from farpipe.plan.trust import trust
from farpipe.plan.unlike import find_unlike
from farpipe.schedule import peak_memory_bytes
from farpipe.simulate import simulate
from farpipe.spec import Job
from farpipe.step import Schedule
from farpipe.units import format_percent

LEFT_OUT: Final = (
    "Groups of replicas that differ: their sum of gradients comes after the last backward of all, beside nothing; what "
    "else the groups send over the links of that sum is not counted against it."
)


def plan_pinned_groups(job: Job, costs: JobCosts) -> Plan:
    """The plan of the groups that the job pins; errors as for `best_pinned`."""
    size = job.training.microbatch_size
    return plan_of_groups(job, costs, best_pinned(job, costs, [size] if size else MICROBATCH_SIZES))


def add_unlike(job: Job, costs: JobCosts, usual: Sequence[Plan], obstacle: InfeasibleError | None = None) -> list[Plan]:
    """`usual`, the best plans of replicas that are alike, with the best of groups that differ put first if faster.

    `obstacle`: why there are no usual ones; raised where no groups fit either.
    """
    try:
        found = find_unlike(job, costs)
    except InfeasibleError:
        if obstacle is not None:
            raise obstacle from None
        return [_told(usual[0], "No groups of replicas that differ fit the sites and the batch."), *usual[1:]]
    looked = f"{found.num_spreads:,} spreads of replicas that differ were looked at"
    if usual and usual[0].prediction.step_s <= found.played.step_s:
        told = f"{looked}: none that was simulated is faster{_tell_gap(found.gap_of(usual[0].prediction.step_s))}."
        return [_told(usual[0], told), *usual[1:]]
    if usual:
        gain = format_percent(1 - found.played.step_s / usual[0].prediction.step_s)
        looked += f": this takes {gain} less time than the best plan of replicas that are alike"
    told = f"{looked}{_tell_gap(found.gap)}."
    return [_told(plan_of_groups(job, costs, found.played), told), *usual]


def _tell_gap(gap: float) -> str:
    """The most that another spread could gain; empty where none can."""
    return f"; no other can gain more than {format_percent(gap)}" if gap > 0 else ""


def _told(plan: Plan, line: str) -> Plan:
    return plan.model_copy(update={"advice": (*plan.advice, line)})


def plan_of_groups(job: Job, costs: JobCosts, played: PlayedGroups) -> Plan:
    """The simulated groups as a plan: the first group's layout, and the others beside it."""
    first, *others = played.groups
    used = {p.site for one in played.groups for p in one.group.placements}
    residual, unmeasured = trust(costs, [site for site in job.cluster.sites if site.name in used])
    return Plan(
        job=job,
        layout=first.group.layout,
        placements=first.group.placements,
        problem=first.step.problem,
        schedule=first.schedule,
        prediction=_prediction(job, played),
        advice=(LEFT_OUT,) if others else (),
        residual=residual,
        unmeasured=unmeasured,
        groups=tuple(map(_plan_group, others)),
    )


def _plan_group(played: PlayedGroup) -> PlanGroup:
    return PlanGroup(
        layout=played.group.layout,
        placements=played.group.placements,
        problem=played.step.problem,
        schedule=played.schedule,
        peak_memory_bytes=_peak(played),
    )


def _peak(played: PlayedGroup) -> tuple[float, ...]:
    return tuple(peak_memory_bytes(played.step.problem, played.schedule))


def _prediction(job: Job, played: PlayedGroups) -> Prediction:
    """Waits are means over the ranks of all groups."""
    exposed = np.concatenate([one.timeline.exposed_s for one in played.groups])
    inter_site_s, intra_site_s = exposed.mean(axis=0)
    sent: Counter[str] = Counter()
    for one in played.groups:
        sent.update(link_bytes(one.step.problem, one.timeline))
    for reduce in played.reduces:
        sent.update(dict.fromkeys(reduce.links, reduce.bytes))
    return Prediction(
        step_s=played.step_s,
        makespan_s=played.makespan_s,
        overhead_s=played.overhead_s,
        bubble_ratio=played.bubble_ratio,
        tokens_per_s=job.training.tokens_per_step / played.step_s,
        exposed_inter_site_s=float(inter_site_s),
        exposed_intra_site_s=float(intra_site_s),
        peak_memory_bytes=_peak(played.groups[0]),
        link_bytes=dict(sent),
    )


def replay(plan: Plan, schedule: Schedule) -> PlayedGroups:
    """The step of a plan with groups, played again from its Problems and orders, with `schedule` for the first."""
    parts: Sequence[Plan | PlanGroup] = (plan, *plan.groups)
    groups = [ReplicaGroup(*one) for one in plan.all_groups]
    costs = JobCosts(plan.job.model, plan.job.training)
    orders = [schedule, *(group.schedule for group in plan.groups)]
    played = tuple(
        PlayedGroup(group, StepCost(part.problem, plan.prediction.overhead_s), own, simulate(part.problem, own))
        for group, part, own in zip(groups, parts, orders, strict=True)
    )
    return PlayedGroups(played, tuple(group_reduces(costs, groups, plan.job.cluster)))
