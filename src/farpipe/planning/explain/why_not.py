"""Reasons against layouts: sites to use, why others lost; without a plan the smallest change that works."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from farpipe.core.schedule import peak_memory_bytes
from farpipe.core.spec import Job
from farpipe.core.units import counted, format_bytes, format_change, format_large, format_percent, format_seconds
from farpipe.planning.cost.trust import DEGREES, ORDERS, links_range, tie_within
from farpipe.planning.explain.limits import parts_of
from farpipe.planning.planner.candidates import Candidate
from farpipe.planning.planner.evaluate import Evaluated, Rejected
from farpipe.planning.planner.no_layout import why_no_replicas
from farpipe.planning.planner.plan import RunnerUp

MAX_RUNNERS_UP: Final = 8
"""Largest number of runners-up, besides the first of every order of sites."""


def runners_up(
    best: Evaluated, mine: Mapping[str, float], evaluated: list[Evaluated], rejected: list[Rejected]
) -> list[RunnerUp]:
    """The next best, at least one of every order of sites, and the rejected that came nearest to fitting.

    `mine` are the parts of the best one's step.
    """
    others: list[Evaluated] = []
    wheres, known = {best.candidate.where}, {_likeness(best)}
    for other in evaluated[1:]:
        wanted = len(others) < MAX_RUNNERS_UP or other.candidate.where not in wheres
        if wanted and _likeness(other) not in known:
            others.append(other)
            wheres.add(other.candidate.where)
            known.add(_likeness(other))
    choices = [
        RunnerUp(
            what=str(o),
            method=o.schedule.method,
            step_s=o.step_s,
            reason=reason(best, mine, o),
            peak_memory_bytes=max(peak_memory_bytes(o.problem, o.schedule)),
        )
        for o in others
    ]
    short = [r for r in rejected if r.missing_bytes]  # others can't be: two stages a rank in the order of 1F1B
    nearest = sorted(short, key=lambda r: r.missing_bytes)[: max(0, MAX_RUNNERS_UP - len(choices))]
    return choices + [RunnerUp(what=str(r.candidate), method="", step_s=0.0, reason=r.reason) for r in nearest]


def _likeness(result: Evaluated) -> tuple[object, ...]:
    """Equal for candidates that differ only in the direction in which they visit equal sites."""
    candidate = result.candidate
    layout = replace(candidate.layout, replica_sites=())
    return layout, candidate.in_v, frozenset(candidate.order), f"{result.step_s:.4g}"


def reason(best: Evaluated, mine: Mapping[str, float], other: Evaluated) -> str:
    """Reason why `other` is slower than `best`, with parts `mine`: the largest part of the difference."""
    theirs = parts_of(other)
    name = max(mine, key=lambda part: theirs[part] - mine[part])
    percent = other.step_s / best.step_s - 1
    if percent < 0.0005:
        return "as fast; the first one found was taken"
    return f"{format_change(percent)}: {format_seconds(theirs[name] - mine[name])} more {name}"


def ties(best: Evaluated, evaluated: Sequence[Evaluated], links_s: float) -> dict[str, Any]:
    """Fields of an Explanation about layouts that can't be told from the best one by their steps.

    Of two layouts the errors have much in common, so that their difference is better known than either. Where they use
    other sites, the error of `links_s`, what the best one's links between sites cost, comes on top.
    """
    latencies = [link.latency_s for name, link in best.problem.links.items() if best.problem.between_sites[name]]
    links = links_range(max(latencies, default=0.0))
    more = (links.high - 1) * max(links_s, 0.0) / best.step_s

    def within(other: Evaluated) -> float:
        at, mine = other.candidate, best.candidate
        least = tie_within(ORDERS if _degrees(at) == _degrees(mine) else DEGREES)
        return least if at.where == mine.where else math.hypot(least, more)

    tied, known = list[Evaluated](), {_likeness(best)}
    for other in evaluated[1:]:
        if other.step_s <= best.step_s * (1 + within(other)) and _likeness(other) not in known:
            tied.append(other)
            known.add(_likeness(other))
    if not tied:
        return {}
    widest = max(map(within, tied))
    return {"tie_within": widest, "tied": tuple(map(str, tied)), "decides": _decides(best, tied, widest)}


def _degrees(candidate: Candidate) -> tuple[object, ...]:
    at = candidate.layout
    return candidate.where, at.pipeline, at.data, at.tensor, at.context, at.expert


NOTABLY: Final = 0.95
"""Ratio of memory or traffic up to which one layout has notably less than another."""


def _decides(best: Evaluated, tied: Sequence[Evaluated], widest: float) -> str:
    """Sentence on which of the tied layouts has less memory or traffic, or is simpler, than the plan."""
    peaks = {id(one): max(peak_memory_bytes(one.problem, one.schedule)) for one in (best, *tied)}
    sent = {id(one): sum(one.inter_site_bytes.values()) for one in (best, *tied)}
    reasons: dict[str, list[str]] = {}
    for name, sizes in (("memory", peaks), ("traffic", sent)):
        least = min(tied, key=lambda one: sizes[id(one)])
        if sizes[id(least)] < NOTABLY * sizes[id(best)]:
            figures = f"{name} ({format_bytes(sizes[id(least)])}, this plan {format_bytes(sizes[id(best)])})"
            reasons.setdefault(_short(least), []).append(figures)
    simplest = min(tied, key=_complexity)
    if _complexity(simplest) < _complexity(best):
        reasons.setdefault(_short(simplest), []).append("simplicity")
    others = "; ".join(f"{' and '.join(why)}: {name}" for name, why in reasons.items())
    within = format_percent(widest, 0)
    told = f"A tie with {counted(len(tied), 'other layout')}: steps within {within} can't be told apart."
    return f"{told} What decides: {others or 'nothing, this plan is also the smallest and simplest'}."


def _complexity(one: Evaluated) -> tuple[int, int, int]:
    """Sites, kinds of parallelism and stages per rank."""
    at = one.candidate.layout
    kinds = sum(degree > 1 for degree in (at.pipeline, at.data, at.tensor, at.context, at.expert))
    return len(one.candidate.devices), kinds, at.virtual


def _short(one: Evaluated) -> str:
    """Its sites and degrees, without microbatches."""
    return str(one.candidate).rpartition(", ")[0]


def use_of_sites(job: Job, best: Evaluated, evaluated: Sequence[Evaluated]) -> str:
    """Verdict on the sites of a job: whether to use more than one, and how much faster that is."""
    alone, several = ([e for e in evaluated if (len(e.candidate.order) == 1) is one] for one in (True, False))
    if len(best.candidate.order) > 1:
        return f"Use {_counted_sites(job, best)}{_against(best, alone[0]) if alone else ''}."
    alone_in = (
        f"Use {best.candidate.order[0]} alone" if len(list(job.used_sites())) > 1 else f"Use {best.candidate.where}"
    )
    if not several:
        return f"{alone_in}."
    other = several[0]
    return (
        f"{alone_in}: a second site does not help, {other.candidate.where} would take at most "
        f"{format_seconds(other.step_s)} a step ({format_change(other.step_s / best.step_s - 1)})."
    )


def _counted_sites(job: Job, best: Evaluated) -> str:
    """``both sites``, ``all 3 sites`` or ``2 of the 3 sites``, and how they are used."""
    used, known = len(best.candidate.order), len(list(job.used_sites()))
    sites = f"{used} of the {known} sites" if used < known else "both sites" if used == 2 else f"all {used} sites"
    kind = "replicas at" if best.candidate.layout.replica_sites else "a pipeline over"
    return f"{sites}, {kind} {best.candidate.where}"


def _against(best: Evaluated, alone: Evaluated) -> str:
    more = best.candidate.num_devices / alone.candidate.num_devices
    gain = f"{alone.step_s / best.step_s:.2f} times as fast as {alone.candidate.order[0]} alone"
    return f": {gain}, with {more:.2f} times its devices"


def other_sites(job: Job, best: Evaluated, evaluated: Sequence[Evaluated]) -> list[str]:
    """Sentences on sites that can't be used together, and on what another use of several sites would take."""
    return [*_unlinked(job), *_other_use(job, best, evaluated)]


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


def _other_use(job: Job, best: Evaluated, evaluated: Sequence[Evaluated]) -> list[str]:
    """Several sites share a pipeline, or each has whole ones: what the use that was not chosen would take."""
    several = [e for e in evaluated if len(e.candidate.order) > 1]
    across, over = ([e for e in several if bool(e.candidate.layout.replica_sites) == is_it] for is_it in (True, False))
    told = []
    if across and not best.candidate.layout.replica_sites:
        told.append(f"Data parallelism across {across[0].candidate.where}: {_would_take(job, across[0], best)}")
    if over and best.candidate.layout.replica_sites:
        told.append(f"A pipeline over {over[0].candidate.where}: {_would_take(job, over[0], best)}")
    obstacle = why_no_replicas(job) if not across and len(list(job.used_sites())) > 1 else ""
    return told + [f"{obstacle[0].upper()}{obstacle[1:]}." for _ in (1,) if obstacle]


def _would_take(job: Job, other: Evaluated, best: Evaluated) -> str:
    """The step and the traffic of the `other` use of the sites, and what the plan sends, as counted for each.

    A pipeline's bytes grow with the tokens of a step, those of gradients do not: somewhere they are equal.
    """
    relation = format_change(other.step_s / best.step_s - 1)
    taken = f"at most {format_seconds(other.step_s)} a step ({relation}); it sends {_sent(other)} between sites"
    if len(best.candidate.order) == 1:
        return f"{taken}."
    sent = {bool(one.candidate.layout.replica_sites): sum(one.inter_site_bytes.values()) for one in (other, best)}
    even = job.training.tokens_per_step * sent[True] / sent[False]
    return f"{taken}, the plan {_sent(best)} (equal at {format_large(float(f'{even:.3g}'))} tokens a step)."


def _sent(one: Evaluated) -> str:
    return format_bytes(sum(one.inter_site_bytes.values()))
