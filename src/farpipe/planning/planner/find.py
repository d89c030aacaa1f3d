"""Plans of a job: search its layouts under a budget and refine the best. What is found explains the plan later."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from farpipe.core.arguments import expect_kind, expect_list
from farpipe.core.errors import InfeasibleError, InputError, UsageError
from farpipe.core.spec import Job
from farpipe.planning.cost import JobCosts, Layout, Profile
from farpipe.planning.cost.chunk_profile import ChunkProfile
from farpipe.planning.planner.candidates import expect_devices, largest_sites
from farpipe.planning.planner.evaluate import Evaluated
from farpipe.planning.planner.infeasible import explain_infeasible
from farpipe.planning.planner.orders import AUTO, best_order, expect_known, find_order
from farpipe.planning.planner.plan import Plan
from farpipe.planning.planner.refinement import (
    best_refined,
    expected,
    predict,
    predicted,
    rank_robustly,
)
from farpipe.planning.planner.search import Advance, Found, search_job
from farpipe.planning.planner.site_sets import alike_at_identical_sites
from farpipe.planning.search import SEARCHES, FoundOrder, Progress

if TYPE_CHECKING:
    from farpipe.planning.cost.chunks import ChunkCosts
    from farpipe.planning.planner.chunked import FirstBatch

MeasuredDevices = Sequence[Profile | ChunkProfile]
"""Profile of every measured device; ChunkProfile for a job with `data.packing`."""


@dataclass(frozen=True)
class Planned:
    """A plan, and what was found beside it: an explanation, and more plans, are made of that."""

    plan: Plan
    found: Found
    """The plan's own candidate first, then the others, the fastest first; none with `data.packing`."""
    num_sites: int
    """Sites of the job before those that compute least were left out."""
    profiles: MeasuredDevices = ()
    named: Evaluated | None = None
    """The plan's candidate in the best named order, which a short search may have made faster."""
    batch: "FirstBatch | None" = None
    """The batch that was planned with `data.packing`."""

    @property
    def costs(self) -> JobCosts:
        """The costs that the plan was made with."""
        return self.found.costs

    @property
    def chunk_costs(self) -> "tuple[ChunkCosts, ...]":
        """What chunks cost, in groups of devices for each size; none without `data.packing`."""
        return self.batch.costs if self.batch is not None else ()

    @cached_property
    def ranked(self) -> list[Evaluated]:
        """The candidates with their mean steps, and with equal steps at identical sites, the plan's own one first."""
        job = self.found.job
        every = [expected(job, one) for one in self.found.evaluated]
        return [*every[:1], *(one for one in alike_at_identical_sites(job, every) if one is not every[0])]


def plan(job: Job, profiles: MeasuredDevices = (), progress: Advance | None = None) -> Plan:
    """The plan with the shortest predicted step.

    Estimates guide the search, see `search`. With `data.packing` the plan is of the first batch of the job's text,
    which is read for it. Raises InputError for an unknown schedule, InfeasibleError,
    with the binding constraint and the smallest change that would help, when no candidate works.
    """
    return find(job, profiles, progress)[0].plan


def find(
    job: Job,
    profiles: MeasuredDevices = (),
    progress: Advance | None = None,
    num_plans: int = 1,
    costs: JobCosts | None = None,
) -> list[Planned]:
    """The plan of `plan`, and after it up to `num_plans` - 1 of the next best layouts, each as good as it gets.

    The bound that leaves candidates out may leave fewer than were asked for. Explanations come later, by
    `farpipe.planning.explain`: a person waits for the plan first. `costs` of an earlier plan of the same model with the
    same profiles spare computing those of stages again. Errors as for `plan`.
    """
    expect_kind("plan: job", job, Job, "a Job, such as farpipe.load_job(FILE) reads")
    expect_list("plan: profiles", profiles, (Profile, ChunkProfile), "a profile, such as Profile.load(FILE) reads")
    _expect_kind(job, profiles)
    if job.data.packing is not None:
        from farpipe.planning.planner.chunked import plan_first_batch  # here, as other jobs need none of it

        first, batch = plan_first_batch(job, cast("Sequence[ChunkProfile]", profiles))
        nothing = Found(job, JobCosts(job.model, job.training), [], [])
        return [Planned(first, nothing, len(job.cluster.sites), profiles, batch=batch)]
    _expect_known_schedule(job)
    known = _by_device(job, cast("Sequence[Profile]", profiles))
    found = search_job(largest_sites(job), known, progress, costs)
    if not found.evaluated:
        raise InfeasibleError(explain_infeasible(found.job, found.rejected, found.costs))
    # A single plan lets the next best compete for it, see `best_refined`. Of several each is refined for itself: a
    # rival that beat the first would come a second time, as the plan that it is.
    ranked, plans = rank_robustly(found.job, found.evaluated), list[Planned]()
    for one in ranked[:num_plans]:
        others = [one, *(other for other in ranked if other is not one)]
        named, best = best_refined(found.job, others if num_plans == 1 else others[:1], found.costs)
        mine = [best, *(other for other in others if other.candidate is not best.candidate)]
        made = as_plan(found.job, best)
        made = reorder(made, job.schedule) if job.schedule in SEARCHES else made
        plans.append(Planned(made, found._replace(evaluated=mine), len(job.cluster.sites), profiles, named))
    return sorted(plans, key=lambda made: made.plan.prediction.step_s)


def as_plan(job: Job, best: Evaluated) -> Plan:
    """The plan of an evaluated candidate."""
    return Plan(
        job=job,
        layout=best.candidate.layout,
        placements=best.placements,
        problem=best.problem,
        schedule=best.schedule,
        prediction=predicted(job, best),
    )


def _expect_kind(job: Job, profiles: MeasuredDevices) -> None:
    """InputError for profiles of chunks where microbatches are planned, or the other way round."""
    wanted = Profile if job.data.packing is None else ChunkProfile
    for profile in profiles:
        if not isinstance(profile, wanted):
            one, other = ("chunks", "microbatches") if wanted is Profile else ("microbatches", "chunks")
            raise InputError(
                f"the profile of {profile.device} is of {one}, and the job is planned on {other} (data.packing); "
                f"measure it with `farpipe profile`"
            )


def _expect_known_schedule(job: Job) -> None:
    try:
        expect_known(job.schedule or AUTO)
    except UsageError as error:
        raise InputError(f"schedule.method: {error}") from None


def _by_device(job: Job, profiles: Sequence[Profile]) -> dict[str, Profile]:
    expect_devices(job, profiles)
    for profile in profiles:
        _expect_same_job(job, profile)
    return {profile.device: profile for profile in profiles}


def _expect_same_job(job: Job, profile: Profile) -> None:
    """InputError where the profile is of another model, precision or length, whatever the layout."""
    device = next(site.device for site in job.cluster.sites if site.device.name == profile.device)
    training, tensor = job.training, job.layout.tensor or 1
    if training.recompute == "auto":  # then the planner chooses among the modes in the profile
        training = training.model_copy(update={"recompute": profile.recompute})
    layout = Layout(pipeline=1, data=1, tensor=tensor, virtual=1, microbatch_size=1, num_microbatches=1)
    profile.expect(job.model, training, layout, device)


def reorder(plan: Plan, method: str) -> Plan:
    """The same layout, placement and partition with the order of another method; errors as for `best_order`."""
    schedule, timeline = best_order(plan.problem, method)
    prediction = predict(plan.job, plan.problem, schedule, timeline, plan.prediction.overhead_s, plan.num_tokens)
    return plan.model_copy(update={"schedule": schedule, "prediction": prediction})


def refine(
    plan: Plan, time_limit_s: float, on_progress: Callable[[Progress], None] = lambda progress: None
) -> tuple[Plan, FoundOrder]:
    """(the same plan with the best order that a search of `time_limit_s` seconds finds, or `plan` itself if that is no
    faster, what the search found)."""
    found = find_order(plan.problem, time_limit_s=time_limit_s, on_progress=on_progress)
    overhead_s, num_tokens = plan.prediction.overhead_s, plan.num_tokens
    prediction = predict(plan.job, plan.problem, found.schedule, found.timeline, overhead_s, num_tokens)
    if prediction.step_s >= plan.prediction.step_s:
        return plan, found
    return plan.model_copy(update={"schedule": found.schedule, "prediction": prediction}), found
