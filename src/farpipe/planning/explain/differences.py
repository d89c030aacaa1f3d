"""What two plans differ in, and what each difference is worth: changes are made one by one, and each is planned."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from farpipe.core.errors import FarpipeError
from farpipe.core.spec import Job
from farpipe.core.spec.part import Part
from farpipe.planning.planner.find import find
from farpipe.planning.planner.objective import pinned_to
from farpipe.planning.planner.plan import Plan
from farpipe.planning.planner.quote import quote_of

LAYOUT: Final = "layout"
ORDER: Final = "order and division of layers"
"""Last difference: what is left when the jobs and their layouts are equal."""
_OF_THE_LAYOUT: Final = ("microbatch_size",)
"""Keys of [training] that the planner chooses with the layout."""


@dataclass(frozen=True)
class Difference:
    """One thing in which two plans differ, and the step with all differences up to it."""

    what: str
    before: str
    after: str
    step_s: float | None
    """None where no layout works with this change and without the next one."""
    memory_bytes: float | None
    """Peak of the rank that holds most; None likewise."""


@dataclass(frozen=True)
class _Change:
    what: str
    before: str
    after: str
    made: Callable[[Job], Job]


def differences(first: Plan, second: Plan, progress: Callable[[int, int], None] | None = None) -> list[Difference]:
    """The differences from `first` to `second`: the model, sites and links, the training, the layout, the order.

    Each job on the way is planned with its layout pinned, so that the sum of what the differences are worth is that of
    the whole; what one is worth depends on those before it. Times that only a profile had are those of the catalogue.
    """
    job, target = _pinned(first), _pinned(second)
    changes = [*_changes(job, target, first, second)]
    found, plan = list[Difference](), first
    for number, change in enumerate(changes):
        job = change.made(job)
        priced: tuple[float, float] | tuple[None, None] = (None, None)
        with suppress(FarpipeError):
            plan = find(job)[0].plan
            priced = plan.prediction.step_s, _most_memory(plan)
        found.append(Difference(change.what, change.before, change.after, *priced))
        if progress is not None:
            progress(number + 1, len(changes))
    if (plan.schedule, plan.partition, plan.recompute) != (second.schedule, second.partition, second.recompute):
        methods = plan.schedule.method, second.schedule.method
        found.append(Difference(ORDER, *methods, second.prediction.step_s, _most_memory(second)))
    return found


def _most_memory(plan: Plan) -> float:
    return max(plan.prediction.peak_memory_bytes)


def _pinned(plan: Plan) -> Job:
    """The plan's job with its layout pinned."""
    return pinned_to(plan.job, quote_of(plan))


def _changes(job: Job, target: Job, first: Plan, second: Plan) -> Iterator[_Change]:
    if job.model != target.model:
        yield _Change("model", job.model.name, target.model.name, _with(model=target.model))
    yield from _of_cluster(job, target)
    for name in type(job.training).model_fields:
        before, after = getattr(job.training, name), getattr(target.training, name)
        if before != after and name not in _OF_THE_LAYOUT:
            yield _Change(f"training.{name}", _text(before), _text(after), _of_training(**{name: after}))
    if job.data != target.data:
        yield _Change("data", _text(job.data.source), _text(target.data.source), _with(data=target.data))
    if _names(job) == _names(target) and _to_layout(target)(job) != job:
        before, after = (f"{plan.where}: {plan.candidate.degrees}" for plan in (first, second))
        yield _Change(LAYOUT, before, after, _to_layout(target))
    if job.schedule != target.schedule:
        yield _Change("schedule", job.schedule or "auto", target.schedule or "auto", _with(schedule=target.schedule))


def _of_cluster(job: Job, target: Job) -> Iterator[_Change]:
    """Changes of sites and links, one by one where both jobs have the same."""
    before, after = job.cluster, target.cluster
    if before == after:
        return
    if _names(job) != _names(target):  # a layout names sites, so it comes with them
        to_cluster, to_layout = _with(cluster=after), _to_layout(target)
        yield _Change("sites and layout", _sites(job), _sites(target), lambda here: to_layout(to_cluster(here)))
        return
    for key in ("sites", "links"):
        for index, (old, new) in enumerate(zip(getattr(before, key), getattr(after, key), strict=True)):
            for name in type(old).model_fields:
                if (a := getattr(old, name)) != (b := getattr(new, name)):
                    yield _Change(f"{old.name}: {name}", _text(a), _text(b), _of_entry(key, index, name, b))


def _names(job: Job) -> list[str]:
    return [*(site.name for site in job.cluster.sites), *(link.name for link in job.cluster.links)]


def _sites(job: Job) -> str:
    return ", ".join(f"{site.name} {site.num_devices}x{site.device.name}" for site in job.cluster.sites)


def _to_layout(target: Job) -> Callable[[Job], Job]:
    sizes = {name: getattr(target.training, name) for name in _OF_THE_LAYOUT}
    return lambda job: _of_training(**sizes)(job.model_copy(update={"layout": target.layout}))


def _of_entry(key: str, index: int, name: str, value: Any) -> Callable[[Job], Job]:
    def made(job: Job) -> Job:
        entries = list(getattr(job.cluster, key))
        entries[index] = entries[index].model_copy(update={name: value})
        return job.model_copy(update={"cluster": job.cluster.model_copy(update={key: tuple(entries)})})

    return made


def _with(**update: Any) -> Callable[[Job], Job]:
    return lambda job: job.model_copy(update=update)


def _of_training(**update: Any) -> Callable[[Job], Job]:
    return lambda job: job.model_copy(update={"training": job.training.model_copy(update=update)})


def _text(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Part):
        return str(getattr(value, "name", None) or value)
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
