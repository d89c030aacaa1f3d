"""Advice: reasons why candidates lost, and facts that a user should know about the one that won."""

import math
from collections.abc import Mapping
from typing import Final

from farpipe.cost import memory
from farpipe.cost.transfer import narrowed_bytes
from farpipe.plan.bandwidth import bandwidth_sensitivity, link_bounds, link_bytes, replayed
from farpipe.plan.candidates import why_no_replicas
from farpipe.plan.evaluate import Evaluated
from farpipe.schedule.library import ORDERS
from farpipe.simulate import simulate
from farpipe.spec import Job
from farpipe.step import Hop, Sync, Transfer
from farpipe.units import format_bytes, format_change, format_rate, format_seconds

BANDWIDTH_FACTORS: Final = (0.5, 2.0, math.inf)


def breakdown_s(result: Evaluated) -> dict[str, float]:
    """The step taken apart: computing (mean over ranks), what links cost, idle in the pipeline, overhead.

    What links cost is how much faster the same order would be if they cost nothing: waits that one rank passes on to
    the next count where they come from, not as idle time of the next.
    """
    busy_s = float(result.timeline.busy_s.mean())
    near_s, free_s = (_without_links_s(result, keep_inside) for keep_inside in (True, False))
    return {
        "computing": busy_s,
        "for the links between sites": result.timeline.makespan_s - near_s,
        "for the links inside sites": near_s - free_s,
        "idle in the pipeline": free_s - busy_s,
        "for the optimizer and other overhead": result.overhead_s,
    }


def _without_links_s(result: Evaluated, keep_inside: bool) -> float:
    """The makespan of the same order if links (or only those between sites) cost nothing."""

    def stays(transfer: Transfer | None) -> Transfer | None:
        names = () if transfer is None else (transfer.link,) if isinstance(transfer.link, str) else transfer.link
        return transfer if keep_inside and not any(map(problem.between_sites.__getitem__, names)) else None

    problem = result.problem
    hops = [hop and Hop(forward=stays(hop.forward), backward=stays(hop.backward)) for hop in problem.hops]
    sync = [s and Sync(gather=stays(s.gather), reduce=stays(s.reduce)) for s in problem.sync or ()]
    exchanges = tuple(exchange for exchange in problem.exchanges if stays(exchange))
    free = problem.model_copy(update={"hops": tuple(hops), "sync": tuple(sync) or None, "exchanges": exchanges})
    return simulate(free, result.schedule, checked=True).makespan_s


def reason(best: Evaluated, mine: Mapping[str, float], other: Evaluated) -> str:
    """Reason why `other` is slower than `best`, with parts `mine`: the largest part of the difference."""
    theirs = breakdown_s(other)
    name = max(mine, key=lambda part: theirs[part] - mine[part])
    percent = other.step_s / best.step_s - 1
    if percent < 0.0005:
        return "as fast; the first one found was taken"
    return f"{format_change(percent)}: {format_seconds(theirs[name] - mine[name])} more {name}"


def advice(job: Job, best: Evaluated, evaluated: list[Evaluated]) -> list[str]:
    """Advice before renting anything: the use of more sites, the links that bound the step, the costs left out."""
    sites = [*_second_site(best, evaluated), *_unlinked(job), *_other_use(job, best, evaluated)]
    return [*sites, *_link_bounds(best), *_bandwidth_sensitivity(best), *_stagger(best), *_traffic(job, best)]


def _millions(number: float) -> str:
    return f"{number / 1e6:.3g} M"


def _unlinked(job: Job) -> list[str]:
    """Sites that no other can talk with, both ways: they can only be used alone."""
    names = [site.name for _, site in job.used_sites()]
    directed = {(link.source, link.target) for link in job.cluster.links}
    linked = {source for source, target in directed if (target, source) in directed}
    alone = [name for name in names if name not in linked]
    if not alone or len(names) == 1:
        return []
    are, their = ("has", "its") if len(alone) == 1 else ("have", "their")
    return [f"{', '.join(alone)} {are} no link both ways to another site, so {their} devices can only be used alone."]


def _second_site(best: Evaluated, evaluated: list[Evaluated]) -> list[str]:
    alone = [e for e in evaluated if len(e.candidate.order) == 1]
    if not alone:
        return []
    if len(best.candidate.order) == 1:
        several = [e for e in evaluated if len(e.candidate.order) > 1]
        if not several:
            return []
        other = several[0]
        return [
            f"A second site does not help: {other.candidate.where} would take at most {format_seconds(other.step_s)} a "
            f"step, {best.candidate.order[0]} alone takes {format_seconds(best.step_s)}."
        ]
    single = alone[0]
    gain = single.step_s / best.step_s
    more = best.candidate.num_devices / single.candidate.num_devices
    return [
        f"{len(best.candidate.order)} sites are {gain:.2f} times as fast as {single.candidate.order[0]} alone, with "
        f"{more:.2f} times its devices."
    ]


def _other_use(job: Job, best: Evaluated, evaluated: list[Evaluated]) -> list[str]:
    """Several sites share a pipeline, or each has whole ones: what the use that was not chosen would take."""
    several = [e for e in evaluated if len(e.candidate.order) > 1]
    across, over = ([e for e in several if bool(e.candidate.layout.replica_sites) == is_it] for is_it in (True, False))
    told = []
    if across and across[0] is not best:
        told.append(
            f"A replica at each of {', '.join(across[0].candidate.order)} instead, {_would_take(across[0], best)}"
        )
    if over and best.candidate.layout.replica_sites:
        told.append(f"A pipeline over {over[0].candidate.where} instead, {_would_take(over[0], best)}")
    obstacle = why_no_replicas(job) if not across and len(list(job.used_sites())) > 1 else ""
    return told + [f"{obstacle[0].upper()}{obstacle[1:]}." for _ in (1,) if obstacle]


def _would_take(other: Evaluated, best: Evaluated) -> str:
    what = "exchanging gradients" if other.candidate.layout.replica_sites else "exchanging activations"
    relation = format_change(other.step_s / best.step_s - 1)
    busiest = max(
        size for name, size in link_bytes(other.problem, other.timeline).items() if other.problem.between_sites[name]
    )
    seconds, size = format_seconds(other.step_s), format_bytes(busiest)
    return f"{what}, would take at most {seconds} a step ({relation}): {size} over the busiest link."


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


def _bandwidth_sensitivity(best: Evaluated) -> list[str]:
    """Effect of half, twice and unlimited bandwidth between sites on the step."""
    if not any(best.problem.between_sites.values()):
        return []
    if best.schedule.method in ORDERS:
        curve = bandwidth_sensitivity(best.problem, BANDWIDTH_FACTORS, best.schedule.method)
    else:
        curve = [replayed(best.problem, best.schedule, factor) for factor in BANDWIDTH_FACTORS]
    words = {0.5: "half", 2.0: "double", math.inf: "unlimited"}
    told = [
        f"{words[point.factor]} -> {format_seconds(point.makespan_s + best.overhead_s)} "
        f"({format_change((point.makespan_s + best.overhead_s) / best.step_s - 1)})"
        for point in curve
    ]
    return [f"Effect of the inter-site bandwidth: {', '.join(told)}."] if told else []


def _stagger(best: Evaluated) -> list[str]:
    traffic = best.problem.traffic
    if traffic.num_staggered == 1:
        return []
    return [
        f"The {traffic.num_staggered} replicas are staggered by {format_seconds(traffic.stagger_s)} so that they do "
        "not collide on the links between sites."
    ]


def _traffic(job: Job, best: Evaluated) -> list[str]:
    """A pipeline sends less than replicas while a step has fewer tokens than parameters per hidden unit, times the
    bytes that a parameter puts on a link over those of an activation."""
    if len(best.candidate.order) == 1:
        return []
    precision, tokens = job.training.precision, job.training.tokens_per_step
    size, gradient = memory.element_bytes(precision), memory.gradient_bytes(precision)
    message = memory.boundary_bytes(job.model, job.training, best.candidate.layout)
    sent = size * narrowed_bytes(message, job.training) / message
    ratio = ((gradient + size) / 2 if job.training.zero1 else gradient) / sent
    enough = ratio * job.model.num_params / job.model.hidden
    return [
        f"Inter-site traffic: below {_millions(enough)} tokens per step ({ratio:.3g} x parameters / hidden) a pipeline "
        f"sends less than replicas; you have {_millions(tokens)}."
    ]
