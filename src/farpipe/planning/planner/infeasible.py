"""Jobs of which no layout works: the candidate that came nearest, and the smallest change that helps."""

import math
from collections.abc import Callable, Iterator
from typing import Final

from farpipe.core.errors import FarpipeError
from farpipe.core.spec import Job, Site
from farpipe.core.units import format_bytes
from farpipe.planning.cost import JobCosts
from farpipe.planning.planner.candidates import near_batches, with_pins, with_training
from farpipe.planning.planner.evaluate import Rejected, describe_shortfall
from farpipe.planning.planner.in_flight import minimum_in_flight
from farpipe.planning.planner.lattice import Lattice
from farpipe.planning.planner.orders import AUTO
from farpipe.planning.planner.partition import missing_bytes
from farpipe.planning.planner.search import search, small

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
        return bool(search(changed, _costs(changed, costs), small()).evaluated)
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
