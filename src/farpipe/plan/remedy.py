"""What to tell a user whose job can't be done: the binding constraint and the smallest change that helps."""

from collections.abc import Callable, Iterator, Mapping

from farpipe.cost import Profile
from farpipe.errors import FarpipeError
from farpipe.plan.candidates import candidates
from farpipe.plan.evaluate import Evaluated, Rejected, describe_shortfall, evaluate
from farpipe.spec import Job, Site
from farpipe.units import format_bytes

MAX_CANDIDATES = 200
"""Of a changed job; enough to find one that fits without searching everything again."""

Change = tuple[str, Job]
"""A change in words, and the job after it."""


def explain_infeasible(job: Job, rejected: list[Rejected], profiles: Mapping[str, Profile]) -> str:
    """The candidate that came nearest, what it lacks, and the first change, from small to large, that works."""
    nearest = min(rejected, key=lambda r: r.missing_bytes or float("inf"))
    remedy = next((name for name, changed in changes(job) if _works(changed, profiles)), None)
    advice = f"smallest change that works: {remedy}" if remedy else "no single change of training or pins helps"
    return f"no layout of this job works; nearest: {describe_shortfall(job, nearest)}\n{advice}"


def changes(job: Job) -> Iterator[Change]:
    """Changes of a job that lower what it needs, from those that cost little to those that cost much."""
    yield from _lighter_training(job)
    yield from _fewer_pins(job)
    freed = _pins(job, **dict.fromkeys(type(job.layout).model_fields))
    lightest = _training(freed, recompute="full", zero1=True)
    yield 'training.recompute = "full" and training.zero1 = true, without pins in layout', lightest
    for factor in (2, 4, 8, 16):
        yield f"{factor} times the devices at every site", _more_devices(job, factor)
    least = min(site.device.memory_bytes for site in job.cluster.sites)
    for times in (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0):
        yield f"devices with {format_bytes(least * times)} of memory", _more_memory(job, least * times)


def _lighter_training(job: Job) -> Iterator[Change]:
    training = job.training
    for recompute in {"none": ("selective", "full"), "selective": ("full",)}.get(training.recompute, ()):
        yield f'training.recompute = "{recompute}"', _training(job, recompute=recompute)
    if not training.zero1:
        yield "training.zero1 = true", _training(job, zero1=True)
    if training.microbatch_size not in (None, 1):
        yield "training.microbatch_size = 1", _training(job, microbatch_size=1)


def _fewer_pins(job: Job) -> Iterator[Change]:
    if job.schedule not in (None, "1f1b"):
        yield 'schedule.method = "1f1b"', job.model_copy(update={"schedule": "1f1b"})
    for name in ("layers", "tensor", "data", "pipeline", "num_microbatches", "virtual"):
        if getattr(job.layout, name) is not None:
            yield f"no pin layout.{name}", _pins(job, **{name: None})
    yield "no pins in layout", _pins(job, **dict.fromkeys(type(job.layout).model_fields))


def _works(changed: Job, profiles: Mapping[str, Profile]) -> bool:
    try:
        return any(isinstance(evaluate(changed, c, profiles), Evaluated) for c in candidates(changed)[:MAX_CANDIDATES])
    except FarpipeError:
        return False


def _training(job: Job, **update: object) -> Job:
    return job.model_copy(update={"training": job.training.model_copy(update=update)})


def _pins(job: Job, **update: object) -> Job:
    return job.model_copy(update={"layout": job.layout.model_copy(update=update)})


def _sites(job: Job, change: Callable[[Site], Site]) -> Job:
    sites = tuple(map(change, job.cluster.sites))
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"sites": sites})})


def _more_memory(job: Job, memory_bytes: float) -> Job:
    def change(site: Site) -> Site:
        more = {"memory_bytes": max(memory_bytes, site.device.memory_bytes)}
        return site.model_copy(update={"device": site.device.model_copy(update=more)})

    return _sites(job, change)


def _more_devices(job: Job, factor: int) -> Job:
    changed = _sites(job, lambda site: site.model_copy(update={"num_devices": site.num_devices * factor}))
    return _pins(changed, pipeline=job.layout.pipeline and job.layout.pipeline * factor, layers=None)
