"""Sentences on the first batch of a training on chunks, and on a layout that would be faster for it."""

from collections.abc import Iterator
from typing import Any, Final

from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.spec import Job
from farpipe.core.units import counted
from farpipe.planning.cost import JobCosts
from farpipe.planning.cost.trust import Trust, trust_of
from farpipe.planning.planner.batches import plan_batch
from farpipe.planning.planner.chunked import FirstBatch, plan_lengths
from farpipe.planning.planner.engine import batch_obstacle, divided
from farpipe.planning.planner.plan import Plan
from farpipe.planning.workload import BatchPlan, options_of
from farpipe.planning.workload.batch_plan import plan_whole, why_cut

_WORTH_PINNING: Final = 0.98
"""Ratio of another layout's step to the plan's up to which it is told."""


def on_batch(job: Job, batch: FirstBatch) -> Iterator[str]:
    """What the plan is of, why documents are cut or grouped, and devices that the pins leave without work."""
    assert job.data.packing is not None
    each = f"{job.training.global_batch} documents of up to {job.training.sequence_length} tokens"
    kind = " Recomputed layers keep their attention's results: all but attention is recomputed."
    yield (
        f"Each step gets its own plan: {each}. Shown is the first batch, of "
        f"{int(batch.lengths.sum()):,} tokens in {counted(len(batch.step.chunks), 'chunk')} "
        f"(data.packing = {job.data.packing!r})." + kind * batch.step.keeps_attention
    )
    if batch.slowest is None:
        groups = ", ".join(f"{counted(count, 'group')} of {degree}" for degree, count in batch.groups.items())
        yield f"Each document has its own group of devices: in the first batch {groups}."
        return
    options = options_of(job.data.packing)
    if options.num_slices is None:
        yield why_cut(batch.slowest, plan_whole(batch.layout.costs, batch.slowest, options)) + "."
    yield from _idle_devices(job, batch)


def trust_of_batch(job: Job, batch: FirstBatch) -> Trust:
    """How far the plan can be trusted; measured devices are left out."""
    known = {profile.device for profile in batch.profiles}
    sites = [job.cluster.site(placement.site) for placement in batch.layout.placements]
    modelled = [site for site in sites if site.device.name not in known]
    return trust_of(JobCosts(job.model, job.training.decided()), modelled, batch.layout.layout)


def _idle_devices(job: Job, batch: FirstBatch) -> Iterator[str]:
    """Sentence about devices that the pins leave without work."""
    found, number = batch.layout, sum(site.num_devices for _, site in job.used_sites())
    at = found.layout
    if found.num_devices < number:
        degrees = f"pipeline {at.pipeline}, data {at.data}, context {found.costs.context}"
        yield f"In use: {found.num_devices} of {counted(number, 'device')}; [layout] asks for no more ({degrees})."


def better_layout(plan: Plan, batch: FirstBatch) -> tuple[str, ...]:
    """Sentence about the fastest layout for this batch that the pins leave open and the engine can run; none where that
    is less than 2 % faster than the plan, or packing is not elastic.

    Its step under these pins is told: with profiles the cost model proposes the layout, and measured chunks time it, as
    they do the plan.
    """
    job = plan.job
    if job.data.packing != "elastic":
        return ()
    context = job.layout.context or (None if "context" in divided(job) else 1)
    pins = job.layout.model_copy(update={"context": context, "tensor": job.layout.tensor or 1})
    free = job.model_copy(update={"layout": pins, "training": job.training.decided()})
    try:
        fastest = plan_batch(free, batch.lengths)
        kinds = [one for one in (fastest, *fastest.others) if not any(batch_obstacle(job, one))]
        best = next((one for one in kinds if job.training.global_batch % one.layout.layout.data == 0), fastest)
        pinned = plan_lengths(_pinned(job, best), batch.lengths, batch.longest, batch.profiles)[0]
    except FarpipeError:
        return ()
    ratio, at = pinned.prediction.step_s / plan.prediction.step_s, best.layout.layout
    if ratio > _WORTH_PINNING:
        return ()
    across = ', replicas = "across"' if at.replica_sites else ""
    context = best.layout.costs.context
    degrees = f", data = {at.data}{across}" + (f", context = {context}" if context > 1 else "")
    sites = ", ".join(f'"{site}"' for site in best.layout.devices)
    return (
        f"Another layout takes {ratio:.2f} times as long on this batch: {best.kind}; pin [layout] pipeline = "
        f"{at.pipeline}{'' if best.places else degrees}, sites = [{sites}].",
    )


def _pinned(job: Job, best: BatchPlan) -> Job:
    """The job with the layout of `best`; InputError where its replicas can't share the documents."""
    at = best.layout.layout
    replicas = "across" if at.replica_sites else None
    pins: dict[str, Any] = {
        "pipeline": at.pipeline,
        "data": at.data,
        "replicas": replicas,
        "sites": tuple(best.layout.devices),
    }
    pins |= {"context": best.layout.costs.context}
    if best.places:
        pins |= {"data": None, "context": None}
        return job.model_copy(update={"layout": job.layout.model_copy(update=pins)})
    if job.training.global_batch % at.data:
        raise InputError(f"layout.data: {at.data} does not divide {job.training.global_batch} documents")
    return job.model_copy(update={"layout": job.layout.model_copy(update=pins)})
