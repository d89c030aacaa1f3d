"""Links and times learned from a run's directory for the next plan: ``farpipe plan --learned-from RUN``."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from farpipe.core.errors import InputError
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.spec import Job
from farpipe.core.step import stagger
from farpipe.core.units import format_change, format_rate, format_seconds
from farpipe.engine.control.learned import Learned, RunOfPlan, learn, with_figures
from farpipe.engine.figures.metrics import METRICS_NAME, NUM_SKIPPED_STEPS, PLAN_NAME, TIMELINE_NAME, read_metrics
from farpipe.planning import Plan
from farpipe.planning.cost import JobCosts, step_cost


def learned_from(run_dir: Path) -> tuple[Learned, tuple[str, ...]]:
    """Lessons of the run in a directory, and how well they explain that run, in sentences.

    InputError where the directory is not of a whole run of a plan, or layers were divided over devices.
    """
    for name in (PLAN_NAME, TIMELINE_NAME, METRICS_NAME):
        if not (run_dir / name).is_file():
            raise InputError(f"{run_dir}: no complete run of a plan: there is no {name}")
    plan = Plan.load(run_dir / PLAN_NAME)
    steps = list(read_metrics(run_dir / METRICS_NAME))
    settled = steps[NUM_SKIPPED_STEPS:] or steps
    timeline = Timeline.load(run_dir / TIMELINE_NAME)
    if timeline.source != "measured" or not settled:
        raise InputError(f"{run_dir}: its {TIMELINE_NAME} is not measured")
    run = RunOfPlan(
        model=plan.job.model,
        training=plan.job.training,
        cluster=plan.job.cluster,
        layout=plan.layout,
        placements=plan.placements,
        problem=plan.problem,
        timeline=timeline,
        overhead_s=median(step["step_s"] - step["makespan_s"] for step in settled if step["makespan_s"] is not None),
        cpu_share=median(step.get("cpu_share") or 1.0 for step in settled),
    )
    try:
        learned = learn(run)
    except InputError as error:
        raise InputError(f"{run_dir}: {error}") from None
    return learned, tuple(_sentences(run_dir, plan, learned, median(step["step_s"] for step in settled)))


def with_links(job: Job, learned: Learned) -> Job:
    """The job with the learned figures on the links of the same names."""
    return job.model_copy(update={"cluster": with_figures(job.cluster, learned.links), "text": ""})


def _sentences(run_dir: Path, plan: Plan, learned: Learned, measured_s: float) -> Iterator[str]:
    """The run's step as it was predicted, measured, and predicted again with what was learned; then the figures."""
    again_s = _predicted_again_s(plan, learned)
    before = format_change(plan.prediction.step_s / measured_s - 1)
    yield (
        f"Learned from {run_dir}: its step was predicted as {format_seconds(plan.prediction.step_s)} and took "
        f"{format_seconds(measured_s)} ({before}); with what was learned it is predicted as {format_seconds(again_s)} "
        f"({format_change(again_s / measured_s - 1)})."
    )
    for profile in learned.profiles:
        part = profile.layer
        times = ", ".join(format_seconds(s) for s in (part.forward_s, part.input_grad_s, part.weight_grad_s))
        yield f"Learned of {profile.device}: a layer takes {times} (F, I, W) for {profile.microbatch_size} sequences."
    for name, link in learned.links.items():
        rate = format_rate(link.bandwidth_bytes_per_s)
        yield f"Learned of {name}: {format_seconds(link.latency_s)} and {rate}."


def _predicted_again_s(plan: Plan, learned: Learned) -> float:
    """The run's own order, with what was learned."""
    costs = JobCosts(plan.job.model, plan.job.training, {profile.device: profile for profile in learned.profiles})
    step = step_cost(costs, plan.layout, plan.placements, with_figures(plan.job.cluster, learned.links))
    staggered = plan.problem.traffic.num_staggered > 1
    problem = stagger(step.problem, plan.layout.data) if staggered else step.problem
    return simulate(problem, plan.schedule).makespan_s + step.overhead_s
