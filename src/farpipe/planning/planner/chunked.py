"""The plan of a training on chunks: layout and costs, and the first batch's step to show what is to be expected."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import FarpipeError, InfeasibleError, InputError
from farpipe.core.simulate import simulate
from farpipe.core.spec import Job
from farpipe.core.step import Problem
from farpipe.core.units import counted
from farpipe.planning.cost import JobCosts, busy_notes
from farpipe.planning.cost.chunk_profile import ChunkProfile
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.documents.batches import load_document_batches
from farpipe.planning.planner.candidates import expect_devices
from farpipe.planning.planner.engine import batch_obstacle, divided, groups_documents
from farpipe.planning.planner.limits import trust_of
from farpipe.planning.planner.plan import Plan
from farpipe.planning.planner.refinement import predict
from farpipe.planning.workload import (
    BatchPlan,
    StepPlan,
    group_problem,
    options_of,
    plan_batch,
    plan_group_step,
    plan_sequences,
    shares,
    step_plan,
)
from farpipe.planning.workload.batch_plan import plan_whole, why_cut
from farpipe.planning.workload.checkpointing import token_limit
from farpipe.planning.workload.device_groups import group_layouts
from farpipe.planning.workload.layout import ChunkLayout, chunk_layout

METHOD: Final = "chunk-1f1b"
SEARCHED: Final = "chunk-search"
"""The same, or what a search beside the run finds for a step."""
_WORTH_PINNING: Final = 0.98
"""Ratio of another layout's step to the plan's up to which it is told."""


def plan_documents(
    job: Job, profiles: Sequence[ChunkProfile] = ()
) -> tuple[Plan, tuple[ChunkCosts, ...], Callable[[], tuple[str, ...]]]:
    """The plan of a job with `data.packing` for the first batch of its text, what chunks cost, and `better_layout` of
    that batch, not called yet: it takes a search."""
    documents = load_document_batches(job.data, job.model, job.training)
    lengths, longest = documents.lengths(0), documents.longest_sequence
    plan, costs = plan_on_chunks(job, lengths, longest, profiles)
    return plan, costs, partial(better_layout, plan, lengths, longest, profiles)


def plan_on_chunks(
    job: Job, lengths: NDArray[np.int64], longest: int, profiles: Sequence[ChunkProfile] = ()
) -> tuple[Plan, tuple[ChunkCosts, ...]]:
    """(plan, what chunks cost; in groups of devices, for each size) of a job with `data.packing` and a first batch of
    these `lengths`.

    Problem and schedule are those of the replica with most to do. InfeasibleError when a sequence of `longest` tokens,
    the longest of the text, fits in no number of slices, or there are too few devices.
    """
    assert job.data.packing is not None
    if job.schedule not in (None, METHOD, SEARCHED):
        raise InputError(
            f"schedule: chunks of sequences have an order of their own, not {job.schedule!r}; leave it out, or take "
            f"{SEARCHED!r} for faster ones that are sought beside the run"
        )
    expect_devices(job, profiles)
    known = {profile.device: profile for profile in profiles}
    if groups_documents(job):
        return _plan_in_groups(job, lengths, longest, profiles)
    found = chunk_layout(job, max(longest, 2), job.layout.context or 1, known)
    token_limit(found.costs, longest)
    options = options_of(job.data.packing)
    parts = [lengths[mine] for mine in shares(found.costs, lengths, found.layout.data)]
    plans = [plan_sequences(found.costs, part, options) for part in parts]
    slowest = max(plans, key=lambda plan: plan.step_s)
    step = step_plan(slowest)
    plan = _plan(job, found, step, step.problem(found.costs), int(lengths.sum()), known)
    reason = (why_cut(slowest, plan_whole(found.costs, slowest, options)) + ".",) if options.num_slices is None else ()
    advice = (*busy_notes(profiles), *plan.advice, *reason, *_idle_devices(job, found))
    return plan.model_copy(update={"advice": advice}), (found.costs,)


def _idle_devices(job: Job, found: ChunkLayout) -> Iterator[str]:
    """Sentence about devices that the pins leave without work."""
    number, at = sum(site.num_devices for _, site in job.used_sites()), found.layout
    if found.num_devices < number:
        degrees = f"pipeline {at.pipeline}, data {at.data}, context {found.costs.context}"
        yield f"In use: {found.num_devices} of {counted(number, 'device')}; [layout] asks for no more ({degrees})."


def better_layout(
    plan: Plan, lengths: NDArray[np.int64], longest: int, profiles: Sequence[ChunkProfile] = ()
) -> tuple[str, ...]:
    """Sentence about the fastest layout for this batch that the pins leave open and the engine can run; none where that
    is less than 2 % faster than the plan, or packing is not elastic.

    `longest` and `profiles` as of `plan_on_chunks`, whose step under these pins is told: with profiles the cost model
    proposes the layout, and measured chunks time it, as they do the plan.
    """
    job = plan.job
    if job.data.packing != "elastic":
        return ()
    context = job.layout.context or (None if "context" in divided(job) else 1)
    pins = job.layout.model_copy(update={"context": context, "tensor": job.layout.tensor or 1})
    free = job.model_copy(update={"layout": pins, "training": job.training.decided()})
    try:
        fastest = plan_batch(free, lengths)
        kinds = [one for one in (fastest, *fastest.others) if not any(batch_obstacle(job, one))]
        best = next((one for one in kinds if job.training.global_batch % one.layout.layout.data == 0), fastest)
        pinned = plan_on_chunks(_pinned(job, best), lengths, longest, profiles)[0]
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


def _plan_in_groups(
    job: Job, lengths: NDArray[np.int64], longest: int, profiles: Sequence[ChunkProfile]
) -> tuple[Plan, tuple[ChunkCosts, ...]]:
    """The same where the devices of the one stage share each document in groups; the Problem is that of the device that
    is done last."""
    (site,) = (site for _, site in job.used_sites())
    pins = {"data": site.num_devices, "tensor": 1, "sites": (site.name,), "replicas": "inside"}
    settled = {"layout": job.layout.model_copy(update=pins), "training": job.training.decided()}
    known = {profile.device: profile for profile in profiles}
    layouts = list(group_layouts(job.model_copy(update=settled), max(longest, 2), known))
    if not layouts:
        raise InfeasibleError("no number of devices can share documents in one stage; pin layout.context and data")
    costs, options = tuple(one.costs for one in layouts), options_of("elastic")
    plan_group_step(costs, np.array([longest]), site.num_devices, options)
    step = plan_group_step(costs, lengths, site.num_devices, options)
    all_in_one = replace(layouts[-1].layout, data=1)
    found = ChunkLayout(all_in_one, layouts[-1].placements, replace(costs[-1], context=site.num_devices))
    plan = _plan(job, found, step.plan, group_problem(step.plan, costs), int(lengths.sum()), known)
    groups = ", ".join(f"{counted(count, 'group')} of {degree}" for degree, count in step.degrees.items())
    told = f"Each document has a group of devices of its own: in the first batch {groups}."
    return plan.model_copy(update={"advice": (*busy_notes(profiles), *plan.advice, told)}), costs


def _plan(
    job: Job, found: ChunkLayout, step: StepPlan, problem: Problem, num_tokens: int, known: Collection[str]
) -> Plan:
    """`known`: devices whose times were measured."""
    timeline = simulate(problem, step.schedule)
    prediction = predict(job, problem, step.schedule, timeline, found.costs.overhead_s, num_tokens)
    each = f"{job.training.global_batch} documents of up to {job.training.sequence_length} tokens"
    chunks = counted(len(step.chunks), "chunk")
    kind = " Recomputed layers keep their attention's results: all but attention is recomputed."
    sites = [job.cluster.site(placement.site) for placement in found.placements]
    modelled = [site for site in sites if site.device.name not in known]
    trust = trust_of(JobCosts(job.model, job.training.decided()), modelled, found.layout)
    plan = Plan(
        job=job,
        layout=replace(
            found.layout,
            num_microbatches=len(step.chunks),
            context=found.costs.context,
            context_exchange="ring" if found.costs.context == 1 else "ulysses",
        ),
        placements=found.placements,
        problem=problem,
        schedule=step.schedule,
        prediction=prediction,
        advice=(
            f"Every step is planned for itself: {each}. What is told here is the first batch, of {num_tokens:,} tokens "
            f"in {chunks} (data.packing = {job.data.packing!r})." + kind * step.keeps_attention,
        ),
    )
    return plan.model_copy(update=trust)
