"""The plan of a training on chunks: layout and costs, and the first batch's step to show what is to be expected."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.simulate import simulate
from farpipe.core.spec import Job
from farpipe.core.step import Problem
from farpipe.planning.cost.chunk_profile import ChunkProfile
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.documents.batches import load_document_batches
from farpipe.planning.planner.candidates import expect_devices
from farpipe.planning.planner.engine import groups_documents
from farpipe.planning.planner.plan import Plan
from farpipe.planning.planner.refinement import predict
from farpipe.planning.workload import (
    SequencePlan,
    StepPlan,
    group_problem,
    options_of,
    plan_group_step,
    plan_sequences,
    shares,
    step_plan,
)
from farpipe.planning.workload.checkpointing import token_limit
from farpipe.planning.workload.chunk import Ints
from farpipe.planning.workload.device_groups import group_layouts
from farpipe.planning.workload.group_steps import degrees_of
from farpipe.planning.workload.layout import ChunkLayout, chunk_layout

METHOD: Final = "chunk-1f1b"
SEARCHED: Final = "chunk-search"
"""The same, or what a search beside the run finds for a step."""


@dataclass(frozen=True)
class FirstBatch:
    """The batch that a plan on chunks shows, and its chunks."""

    lengths: Ints
    longest: int
    """Tokens of the longest sequence of the text."""
    profiles: Sequence[ChunkProfile]
    layout: ChunkLayout
    costs: tuple[ChunkCosts, ...]
    """What chunks cost; in groups of devices for each size."""
    step: StepPlan
    slowest: SequencePlan | None = None
    """The plan of the replica that ends last; None in groups of devices."""
    groups: Mapping[int, int] = field(default_factory=dict)
    """Number of groups of devices by their size."""


def plan_first_batch(job: Job, profiles: Sequence[ChunkProfile] = ()) -> tuple[Plan, FirstBatch]:
    """The plan of a job with `data.packing` for the first batch of its text, which is read for it."""
    documents = load_document_batches(job.data, job.model, job.training)
    return plan_lengths(job, documents.lengths(0), documents.longest_sequence, profiles)


def plan_lengths(
    job: Job, lengths: Ints, longest: int, profiles: Sequence[ChunkProfile] = ()
) -> tuple[Plan, FirstBatch]:
    """The plan of a job with `data.packing` and a first batch of these `lengths`.

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
    parts = [lengths[mine] for mine in shares(found.costs, lengths, found.layout.data)]
    plans = [plan_sequences(found.costs, part, options_of(job.data.packing)) for part in parts]
    slowest = max(plans, key=lambda plan: plan.step_s)
    batch = FirstBatch(lengths, longest, profiles, found, (found.costs,), step_plan(slowest), slowest)
    return _plan(job, batch, batch.step.problem(found.costs)), batch


def _plan_in_groups(job: Job, lengths: Ints, longest: int, profiles: Sequence[ChunkProfile]) -> tuple[Plan, FirstBatch]:
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
    placed, step = plan_group_step(costs, lengths, site.num_devices, options)
    all_in_one = replace(layouts[-1].layout, data=1, context=site.num_devices, context_exchange="ulysses")
    found = ChunkLayout(all_in_one, layouts[-1].placements, replace(costs[-1], context=site.num_devices))
    batch = FirstBatch(lengths, longest, profiles, found, costs, step, groups=degrees_of(placed))
    return _plan(job, batch, group_problem(step, costs)), batch


def _plan(job: Job, batch: FirstBatch, problem: Problem) -> Plan:
    found, step = batch.layout, batch.step
    timeline = simulate(problem, step.schedule)
    num_tokens = int(batch.lengths.sum())
    prediction = predict(job, problem, step.schedule, timeline, found.costs.overhead_s, num_tokens)
    return Plan(
        job=job,
        layout=replace(found.layout, num_microbatches=len(step.chunks)),
        placements=found.placements,
        problem=problem,
        schedule=step.schedule,
        prediction=prediction,
    )
