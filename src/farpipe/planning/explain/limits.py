"""Limits of a plan: the parts of its step, the links that bound it, and the range of its prediction."""

import math
from collections.abc import Mapping
from typing import Any, Final

from farpipe.core.schedule.library import ORDERS
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.spec import Cluster, Job
from farpipe.core.step import Hop, Problem, Schedule, Sync, Transfer
from farpipe.core.units import format_change, format_rate, format_seconds
from farpipe.planning.cost import JobCosts, StepCost, step_cost
from farpipe.planning.cost.trust import Trust, likely_ratios, links_range
from farpipe.planning.planner.bandwidth import link_bounds, with_bandwidth
from farpipe.planning.planner.evaluate import Evaluated, staggered_like
from farpipe.planning.planner.orders import Outcome, try_quickly
from farpipe.planning.planner.step_samples import StepSamples

BANDWIDTH_FACTORS: Final = {0.5: "half", 2.0: "double", math.inf: "unlimited"}
WORTH_NAMING: Final = 0.05
"""Share of the step below which a part does not limit it."""
BETWEEN_SITES: Final = "for the links between sites"
_LIMITS: Final = {
    "for the links inside sites": "links inside sites",
    "for the optimizer and other overhead": "optimizer and other overhead",
}


def breakdown_s(problem: Problem, schedule: Schedule, timeline: Timeline, overhead_s: float) -> dict[str, float]:
    """The step taken apart: computing (mean over ranks), what links cost, idle in the pipeline, overhead.

    What links cost is how much faster the same order would be if they cost nothing: waits that one rank passes on to
    the next count where they come from, not as idle time of the next.
    """
    busy_s = float(timeline.busy_s.mean())
    near_s, free_s = (_without_links_s(problem, schedule, keep_inside) for keep_inside in (True, False))
    return {
        "computing": busy_s,
        BETWEEN_SITES: timeline.makespan_s - near_s,
        "for the links inside sites": near_s - free_s,
        "idle in the pipeline": free_s - busy_s,
        "for the optimizer and other overhead": overhead_s,
    }


def parts_of(found: Evaluated) -> dict[str, float]:
    """The same of a candidate's step."""
    return breakdown_s(found.problem, found.schedule, found.timeline, found.overhead_s)


def _without_links_s(problem: Problem, schedule: Schedule, keep_inside: bool) -> float:
    """The makespan of the same order if links (or only those between sites) cost nothing."""

    def stays(transfer: Transfer | None) -> Transfer | None:
        names = () if transfer is None else (transfer.link,) if isinstance(transfer.link, str) else transfer.link
        return transfer if keep_inside and not any(map(problem.between_sites.__getitem__, names)) else None

    hops = [hop and Hop(forward=stays(hop.forward), backward=stays(hop.backward)) for hop in problem.hops]
    sync = [s and Sync(gather=stays(s.gather), reduce=stays(s.reduce)) for s in problem.sync or ()]
    exchanges = tuple(exchange for exchange in problem.exchanges if stays(exchange))
    free = problem.model_copy(update={"hops": tuple(hops), "sync": tuple(sync) or None, "exchanges": exchanges})
    return simulate(free, schedule, checked=True).makespan_s


def limit_of(found: Evaluated, costs: JobCosts, cluster: Cluster, parts: Mapping[str, float] | None = None) -> str:
    """The longest part of the step besides computing: a link's bandwidth or latency, the pipeline, or overhead.

    ``computing`` where nothing else takes WORTH_NAMING of the step. `parts` are those of the step if they are known.
    """
    parts = parts or parts_of(found)
    name = max((part for part in parts if part != "computing"), key=lambda part: parts[part])
    if parts[name] < WORTH_NAMING * found.step_s:
        return "computing"
    if name == "idle in the pipeline":
        busy_s = found.timeline.busy_s
        is_uneven = busy_s.max() - busy_s.mean() > parts[name] / 2
        return "uneven stages" if is_uneven else "filling and draining the pipeline"
    if name != BETWEEN_SITES:
        return _LIMITS[name]
    return _link_limit(found, costs, cluster, parts[name])


def _link_limit(found: Evaluated, costs: JobCosts, cluster: Cluster, links_s: float) -> str:
    """Bandwidth where a microbatch takes longer on a link than on the slowest rank, or where endless bandwidth would
    take away most of what links cost; else latency."""
    bounds = sorted(link_bounds(found.problem, found.timeline), key=lambda bound: -bound.message_s)
    if bounds:
        return f"bandwidth of {bounds[0].link}"
    busy = found.timeline.link_busy_ratio()
    busiest = max((name for name in busy if found.problem.between_sites[name]), key=lambda name: busy[name])
    endless = _over(with_bandwidth(cluster, math.inf), found, costs).problem
    endless_s = simulate(endless, found.schedule, checked=True).makespan_s
    kind = "bandwidth" if found.timeline.makespan_s - endless_s > links_s / 2 else "latency"
    return f"{kind} of {busiest}"


def _over(cluster: Cluster, found: Evaluated, costs: JobCosts) -> StepCost:
    """The step with other links, computed anew: what of an exchange is hidden and what losses cost depend on them."""
    return staggered_like(found, step_cost(costs, found.candidate.layout, found.placements, cluster), costs)


def limits_in_words(job: Job, best: Evaluated, costs: JobCosts) -> list[str]:
    """Sentences on the links that bound the step, and what other bandwidth would change."""
    return [*_link_bounds(best), *_bandwidth_sensitivity(job, best, costs), *_stagger(best)]


def _link_bounds(best: Evaluated) -> list[str]:
    """One sentence for all of them: the slowest is told in figures."""
    found = sorted(link_bounds(best.problem, best.timeline), key=lambda bound: -bound.message_s)
    if not found:
        return []
    first, names = found[0], ", ".join(sorted(bound.link for bound in found))
    return [
        f"Link-bound by {names}: one microbatch takes {format_seconds(first.message_s)} on {first.link}, the slowest "
        f"rank computes {format_seconds(first.pace_s)}; with {format_rate(first.enough_bytes_per_s)} it would not be."
    ]


def _bandwidth_sensitivity(job: Job, best: Evaluated, costs: JobCosts) -> list[str]:
    """Effect of half, twice and unlimited bandwidth between sites on the step; named orders are made anew for each."""
    if not any(best.problem.between_sites.values()):
        return []
    changed, now_s = [], _mean_s(job, best.problem, best.schedule, best.step_s, best.overhead_s)
    for factor, name in BANDWIDTH_FACTORS.items():
        other = job.model_copy(update={"cluster": with_bandwidth(job.cluster, factor)})
        step, method = _over(other.cluster, best, costs), best.schedule.method
        if method in ORDERS:
            played = try_quickly(method, step.problem)
        else:
            played = Outcome.played(method, step.problem, best.schedule)
        if played.schedule is None:  # it does not fit memory there
            continue
        step_s = played.makespan_s + step.overhead_s
        step_s = _mean_s(other, step.problem, played.schedule, step_s, step.overhead_s)
        changed.append(f"{name} -> {format_seconds(step_s)} ({format_change(step_s / now_s - 1)})")
    about = "Effect of inter-site bandwidth on this layout, without replanning"
    return [f"{about}: {', '.join(changed)}."] if changed else []


def _mean_s(job: Job, problem: Problem, schedule: Schedule, step_s: float, overhead_s: float) -> float:
    """The mean step over samples where links lose packets or jitter, else `step_s`."""
    samples = StepSamples(job, problem)
    return samples.spread(schedule, overhead_s).mean_s if samples.differ else step_s


def _stagger(best: Evaluated) -> list[str]:
    traffic = best.problem.traffic
    if traffic.num_staggered == 1:
        return []
    return [
        f"The {traffic.num_staggered} replicas are staggered by {format_seconds(traffic.stagger_s)} so that they do "
        "not collide on the links between sites."
    ]


def how_sure(trusted: Trust, problem: Problem, links_s: float, step_s: float) -> dict[str, Any]:
    """Fields of an Explanation that say how far a plan can be trusted; `links_s`: of the step, for those between sites.

    Links have a line of their own where they cost anything; their part of the step has their error.
    """
    found, share = trusted.errors, max(links_s, 0.0) / step_s
    latencies = [link.latency_s for name, link in problem.links.items() if problem.between_sites[name]]
    longest_s = max(latencies, default=0.0)
    links = links_range(longest_s)
    low, high = likely_ratios(found, share, longest_s)
    return {
        "residual": 0.0 if found is None else found.mean_error,
        "unmeasured": trusted.unmeasured,
        "uncompared": trusted.uncompared,
        "such_jobs": "" if found is None else found.such_jobs,
        "step_ratio_range": (low, high),
        "links_s": share * step_s,
        "links_range_s": (links_s * links.low, links_s * links.high) if share else (0.0, 0.0),
    }
