"""Suggested changes for a job that can't be done: the binding constraint and the smallest change that helps."""

import math
from collections.abc import Callable, Iterator
from typing import Final

from farpipe.cost import JobCosts
from farpipe.errors import FarpipeError
from farpipe.plan.candidates import Candidate, candidates
from farpipe.plan.evaluate import Evaluated, Rejected, describe_shortfall, evaluate
from farpipe.plan.guided import placed
from farpipe.plan.in_flight import minimum_in_flight
from farpipe.plan.lattice import Lattice
from farpipe.plan.stage_modes import fastest_possible_s, missing_bytes
from farpipe.spec import Job, Site
from farpipe.units import format_bytes

MAX_TRIES: Final = 20
"""Candidates of a changed job that are looked into, of those whose memory is enough; nearly always the first works."""
MAX_SITES_IN_FULL: Final = 3
MAX_DEVICES_IN_FULL: Final = 64
"""Of clusters up to this size all candidates are looked at."""
MOST_DEVICES: Final = 64
MOST_MEMORY: Final = 64.0
"""Largest factor by which a figure of the job is changed."""

Change = tuple[str, Job]
"""A change in words, and the job after it."""


def explain_infeasible(job: Job, rejected: list[Rejected], costs: JobCosts) -> str:
    """The candidate that came nearest, what it lacks, and the first change, from small to large, that works."""
    nearest = min(rejected, key=lambda r: r.missing_bytes or math.inf)
    suggestion = next((name for name, changed in changes(job, costs) if _works(changed, costs)), None)
    advice = f"smallest change that works: {suggestion}" if suggestion else "no single change of training or pins helps"
    return f"no layout of this job works; nearest: {describe_shortfall(nearest)}\n{advice}"


def changes(job: Job, costs: JobCosts) -> Iterator[Change]:
    """Changes of a job that lower what it needs, from those that cost little to those that cost much.

    Of devices and memory it is the least that is enough by memory alone, which a binary search finds.
    """
    yield from _lighter_training(job)
    yield from _fewer_pins(job)
    freed = _pins(job, **dict.fromkeys(type(job.layout).model_fields))
    lightest = _training(freed, recompute="full", zero=1)
    yield 'training.recompute = "full" and training.zero = 1, without pins in layout', lightest
    most = min(MOST_DEVICES, job.model.num_layers // (job.layout.pipeline or 1))  # a pinned pipeline grows with them
    factor = _least(lambda times: _fits(_more_devices(job, times), costs), most)
    if factor is not None:
        changed = _more_devices(job, factor)
        yield f"{factor} times the devices at every site{_new_pins(job, changed)}", changed
    gib = min(site.device.memory_bytes for site in job.cluster.sites) / 2**30
    sizes = [math.ceil(gib) + more for more in range(math.ceil(gib * (MOST_MEMORY - 1)))]
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
    """True if one of the candidates that have enough memory can be ordered and simulated."""
    costs = _costs(changed, costs)
    try:
        fitting = sorted(_fitting(changed, costs), key=lambda candidate: fastest_possible_s(costs, candidate))
        return any(isinstance(evaluate(changed, c, costs), Evaluated) for c in fitting[:MAX_TRIES])
    except FarpipeError:
        return False


def _fits(changed: Job, costs: JobCosts) -> bool:
    """True if memory is enough for a candidate, its order and time left aside."""
    try:
        return next(_fitting(changed, _costs(changed, costs)), None) is not None
    except FarpipeError:
        return False


def _fitting(job: Job, costs: JobCosts) -> Iterator[Candidate]:
    """All candidates whose memory is enough; of a large cluster the promising ones."""
    if len(list(job.used_sites())) > MAX_SITES_IN_FULL or job.cluster.num_devices > MAX_DEVICES_IN_FULL:
        lattice = Lattice(job, costs)
        promises = [one for found in lattice.promises(lattice.whole, MAX_TRIES) for one in found]
        for one in sorted(promises, key=lambda promise: promise.step_s):
            candidate = placed(job, [lattice.sites[index] for index in one.use.order], one.layout, one.in_v)
            if candidate is not None:
                yield candidate
        return
    yield from (c for c in candidates(job) if not missing_bytes(costs, c, minimum_in_flight(c)))


def _costs(changed: Job, costs: JobCosts) -> JobCosts:
    return JobCosts(changed.model, changed.training, costs.profiles)


def _lighter_training(job: Job) -> Iterator[Change]:
    training = job.training
    if training.recompute not in ("auto", "full"):
        yield 'training.recompute = "auto"', _training(job, recompute="auto")
    if not training.zero1:
        yield "training.zero = 1", _training(job, zero=1)
    if training.microbatch_size not in (None, 1):
        yield "training.microbatch_size = 1", _training(job, microbatch_size=1)


def _fewer_pins(job: Job) -> Iterator[Change]:
    if job.schedule not in (None, "1f1b"):
        yield 'schedule.method = "1f1b"', job.model_copy(update={"schedule": "1f1b"})
    for name in ("layers", "tensor", "data", "pipeline", "num_microbatches", "virtual", "replicas"):
        if getattr(job.layout, name) is not None:
            yield f"no pin layout.{name}", _pins(job, **{name: None})
    yield "no pins in layout", _pins(job, **dict.fromkeys(type(job.layout).model_fields))


def _training(job: Job, **update: object) -> Job:
    return job.model_copy(update={"training": job.training.model_copy(update=update)})


def _pins(job: Job, **update: object) -> Job:
    return job.model_copy(update={"layout": job.layout.model_copy(update=update)})


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
    return _pins(changed, pipeline=job.layout.pipeline and job.layout.pipeline * factor, layers=None)
