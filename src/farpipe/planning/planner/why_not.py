"""Reasons against layouts: sites to use, why others lost; without a plan the smallest change that works."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from farpipe.core.errors import FarpipeError
from farpipe.core.spec import Job, Site
from farpipe.core.units import format_bytes, format_change, format_large, format_seconds
from farpipe.planning.cost import JobCosts
from farpipe.planning.planner.changes import near_batches, with_pins, with_training
from farpipe.planning.planner.evaluate import Evaluated, Rejected, describe_shortfall
from farpipe.planning.planner.in_flight import minimum_in_flight
from farpipe.planning.planner.lattice import Lattice
from farpipe.planning.planner.limits import breakdown_s
from farpipe.planning.planner.no_layout import why_no_replicas
from farpipe.planning.planner.orders import AUTO
from farpipe.planning.planner.partition import missing_bytes
from farpipe.planning.planner.plan import RunnerUp
from farpipe.planning.planner.search import quick_search

MAX_RUNNERS_UP: Final = 8
"""Largest number of runners-up, besides the first of every order of sites."""


def runners_up(best: Evaluated, evaluated: list[Evaluated], rejected: list[Rejected]) -> list[RunnerUp]:
    """The next best, at least one of every order of sites, and the rejected that came nearest to fitting."""
    others: list[Evaluated] = []
    wheres, known = {best.candidate.where}, {_likeness(best)}
    for other in evaluated[1:]:
        wanted = len(others) < MAX_RUNNERS_UP or other.candidate.where not in wheres
        if wanted and _likeness(other) not in known:
            others.append(other)
            wheres.add(other.candidate.where)
            known.add(_likeness(other))
    mine = breakdown_s(best) if others else {}
    choices = [
        RunnerUp(what=str(o), method=o.schedule.method, step_s=o.step_s, reason=reason(best, mine, o)) for o in others
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
    theirs = breakdown_s(other)
    name = max(mine, key=lambda part: theirs[part] - mine[part])
    percent = other.step_s / best.step_s - 1
    if percent < 0.0005:
        return "as fast; the first one found was taken"
    return f"{format_change(percent)}: {format_seconds(theirs[name] - mine[name])} more {name}"


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


MAX_SITES_IN_FULL: Final = 3
MAX_DEVICES_IN_FULL: Final = 64
"""Largest cluster all of whose candidates are tried for memory; for larger ones the lattice's estimate is taken."""
MAX_DEVICES: Final = 64
"""Largest factor by which the number of devices is changed."""
MAX_MEMORY: Final = 64.0
"""Largest factor by which the memory of a device is changed."""
_NONE_WORKS: Final = (
    "none of the changes that were tried works alone: recomputation, ZeRO, microbatches, the batch, the schedule, each "
    f"pin and all of them, {MAX_DEVICES} times the devices, {MAX_MEMORY:.0f} times the memory"
)


def explain_infeasible(job: Job, rejected: list[Rejected], costs: JobCosts) -> str:
    """The candidate that came nearest, what it lacks, and the first change, from small to large, that works."""
    nearest = min(rejected, key=lambda r: r.missing_bytes or math.inf)
    suggestion = next((name for name, changed in smallest_changes(job, costs) if _works(changed, costs)), None)
    advice = f"smallest change that works: {suggestion}" if suggestion else _NONE_WORKS
    return f"no layout of this job works; nearest: {describe_shortfall(nearest)}\n{advice}"


def smallest_changes(job: Job, costs: JobCosts) -> Iterator[tuple[str, Job]]:
    """Changes of a job in words, and the job after each, from those that cost little to those that cost much.

    Of devices and memory it is the least that is enough by memory alone, which a binary search finds.
    """
    yield from _lighter_training(job)
    yield from _fewer_pins(job)
    freed = with_pins(job, **dict.fromkeys(type(job.layout).model_fields))
    lightest = with_training(freed, recompute="full", zero=1)
    yield 'training.recompute = "full" and training.zero = 1, without pins in layout', lightest
    most = min(MAX_DEVICES, job.model.num_layers // (job.layout.pipeline or 1))  # a pinned pipeline grows with them
    factor = _least(lambda times: _fits(_more_devices(job, times), costs), most)
    if factor is not None:
        changed = _more_devices(job, factor)
        yield f"{factor} times the devices at every site{_new_pins(job, changed)}", changed
    gib = min(site.device.memory_bytes for site in job.cluster.sites) / 2**30
    sizes = [math.ceil(gib) + more for more in range(math.ceil(gib * (MAX_MEMORY - 1)))]
    index = _least(lambda number: _fits(_more_memory(job, sizes[number - 1] * 2.0**30), costs), len(sizes))
    for size in sizes[index - 1 :][:3] if index is not None else []:
        yield f"devices with {format_bytes(size * 2.0**30)} of memory", _more_memory(job, size * 2.0**30)


def _least(works: Callable[[int], bool], most: int) -> int | None:
    """The least number from 1 to `most` that works, if more always works as well; None: none does."""
    if not most or not works(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _works(changed: Job, costs: JobCosts) -> bool:
    """True if a quick search finds a layout that can be ordered and simulated."""
    try:
        return bool(quick_search(changed, _costs(changed, costs)))
    except FarpipeError:
        return False


def _fits(changed: Job, costs: JobCosts) -> bool:
    """True if memory is enough for a candidate, its order and time left aside."""
    costs = _costs(changed, costs)
    lattice = Lattice(changed, costs)
    try:
        if changed.cluster.num_devices > MAX_DEVICES_IN_FULL or len(lattice.sites) > MAX_SITES_IN_FULL:
            return bool(lattice.estimates(lattice.whole, 1))
        every = lattice.candidates()
        return any(not missing_bytes(costs, one, minimum_in_flight(one)) for one in every)
    except FarpipeError:
        return False


def _costs(changed: Job, costs: JobCosts) -> JobCosts:
    return JobCosts(changed.model, changed.training, costs.profiles)


def _lighter_training(job: Job) -> Iterator[tuple[str, Job]]:
    training = job.training
    if training.recompute not in ("auto", "full"):
        yield 'training.recompute = "auto"', with_training(job, recompute="auto")
    if not training.zero1:
        yield "training.zero = 1", with_training(job, zero=1)
    if training.microbatch_size not in (None, 1):
        yield "training.microbatch_size = 1", with_training(job, microbatch_size=1)
    for batch in near_batches(job):
        yield f"training.global_batch = {batch}", with_training(job, global_batch=batch)


def _fewer_pins(job: Job) -> Iterator[tuple[str, Job]]:
    if job.schedule not in (None, "1f1b"):
        yield 'schedule.method = "1f1b"', job.model_copy(update={"schedule": "1f1b"})
    if job.schedule not in (None, AUTO):
        yield f'schedule.method = "{AUTO}"', job.model_copy(update={"schedule": None})
    for name in (
        "layers",
        "expert",
        "context",
        *("tensor", "data", "pipeline", "num_microbatches", "virtual", "replicas"),
    ):
        if getattr(job.layout, name) is not None:
            yield f"no pin layout.{name}", with_pins(job, **{name: None})
    yield "no pins in layout", with_pins(job, **dict.fromkeys(type(job.layout).model_fields))


def _sites(job: Job, change: Callable[[Site], Site]) -> Job:
    sites = tuple(map(change, job.cluster.sites))
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"sites": sites})})


def _new_pins(job: Job, changed: Job) -> str:
    """The pins that change with the number of devices, in words."""
    words = f" and layout.pipeline = {changed.layout.pipeline}" if job.layout.pipeline else ""
    return words + (" and no pin layout.layers" if job.layout.layers else "")


def _more_memory(job: Job, memory_bytes: float) -> Job:
    def change(site: Site) -> Site:
        more = {"memory_bytes": max(memory_bytes, site.device.memory_bytes)}
        given = {name: getattr(site, name) for name in site.model_fields_set}  # a usual reserve grows with the memory
        return Site(**given | {"device": site.device.model_copy(update=more)})

    return _sites(job, change)


def _more_devices(job: Job, factor: int) -> Job:
    changed = _sites(job, lambda site: site.model_copy(update={"num_devices": site.num_devices * factor}))
    return with_pins(changed, pipeline=job.layout.pipeline and job.layout.pipeline * factor, layers=None)
