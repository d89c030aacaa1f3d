"""Train a plan in a run directory, and read the run back: ``train(plan, run_dir)``, ``Run.load(run_dir)``."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Any, Self

from pydantic import ValidationError

from farpipe.core.arguments import expect_kind
from farpipe.core.errors import InputError
from farpipe.core.simulate import Timeline
from farpipe.core.spec import Job
from farpipe.core.spec.run_keys import ReplanSettings
from farpipe.core.strict import explain, nearest
from farpipe.engine.bare_plan import BarePlan
from farpipe.engine.checkpoint.bucket import brought
from farpipe.engine.figures.metrics import (
    METRICS_NAME,
    PLAN_NAME,
    RUN_NAME,
    SUMMARY_NAME,
    TIMELINE_NAME,
    Summary,
    read_metrics,
)
from farpipe.engine.launch.directory import choose_run_dir
from farpipe.engine.launch.lost_sites import OnLostSite, Start, run_over_sites
from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import DeviceKind, RunSettings
from farpipe.engine.run_spec import RunSpec
from farpipe.planning import Plan, PlanDocument, find
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.cost.speed import peak_flops_per_s
from farpipe.planning.explain import explained
from farpipe.planning.explain.by_site import PlansBySite, plans_by_site
from farpipe.planning.planner.chunked import SEARCHED
from farpipe.planning.planner.engine import groups_documents, plan_obstacle, within_engine


@dataclass(frozen=True)
class Run:
    """A run directory: the plan, the settings it ran with, and what was measured."""

    run_dir: Path
    document: PlanDocument
    """The plan with its explanation."""
    settings: RunSettings | None
    """None for the run of a user's own pipeline, which has no ``run.json``."""
    timeline: Timeline | None
    """The measured step; None while the run has not ended."""
    metrics: tuple[dict[str, Any], ...]
    """The lines of ``metrics.jsonl``, a step each."""
    summary: Summary | None
    """None while the run has not ended."""

    @property
    def plan(self) -> Plan:
        """The plan that ran."""
        return self.document.plan

    @classmethod
    def load(cls, run_dir: Path | str) -> Self:
        """Read a run directory, whole or broken off; InputError when it is none, or a file is damaged."""
        expect_kind("Run.load: run_dir", run_dir, (str, Path), "the path of a run directory")
        run_dir = Path(run_dir)
        if not (run_dir / PLAN_NAME).is_file():
            raise no_run(run_dir)
        document = PlanDocument.load(run_dir / PLAN_NAME)

        timeline, metrics, summary = (run_dir / name for name in (TIMELINE_NAME, METRICS_NAME, SUMMARY_NAME))
        return cls(
            run_dir,
            document,
            settings=RunSpec.load(run_dir / RUN_NAME, document.plan) if (run_dir / RUN_NAME).exists() else None,
            timeline=Timeline.load(timeline) if timeline.exists() else None,
            metrics=tuple(read_metrics(metrics)) if metrics.exists() else (),
            summary=Summary.load(summary) if summary.exists() else None,
        )


def no_run(folder: Path) -> InputError:
    """Error for a folder in which nothing was ever trained."""
    return InputError(f"{folder}: not a run directory: it has no {PLAN_NAME}; `farpipe train` makes one")


def train(
    plan: Plan | PlanDocument | Job,
    run_dir: Path | str | None = None,
    *,
    resume: Path | str | None = None,
    launching: dict[str, Any] | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    on_lost_site: OnLostSite = "end",
    **settings: Any,
) -> Run:
    """Train `plan` on this machine, one process per rank; the results go to `run_dir` (default: ``runs/last``).

    `resume` continues another run, or this one, from its newest checkpoint, or continues from one checkpoint. `on_step`
    gets every line of ``metrics.jsonl`` soon after it is written. `settings` are those of RunSettings: without
    `num_steps` the job's steps, without `device` that of its sites, and otherwise what the job's ``[run]`` says.
    `on_lost_site`: what to do when a site is lost with its disk, see `run_over_sites`; it needs `training.mirror`.
    `launching` has further options of `run`. A job is planned first, within what the engine can run; where that decides
    something that the job leaves open, a UserWarning says so. One with `data.packing` has to be given as a job, because
    each of its steps is planned. Raises what `run` raises, and InputError for a plan that the engine can't run, and for
    anything that is neither a plan nor a job.
    """
    for name, path in (("run_dir", run_dir), ("resume", resume)):
        expect_kind(f"train: {name}", path, (str, Path, NoneType), "the path of a run directory")
    if unknown := sorted({*(launching or {})} - {*signature(run).parameters}):
        raise InputError(
            f"train: launching: run has no option {unknown[0]!r}{nearest(unknown[0], signature(run).parameters)}"
        )
    document, chunks = _planned(plan)
    place = choose_run_dir(None if run_dir is None else Path(run_dir), brought(resume, run_dir))
    spec = run_spec_of(document.plan, resume=place.resume, **(chunks | settings))
    if change := place.change_of(document.plan):
        (launching or {}).get("on_notice", partial(warnings.warn, stacklevel=2))(change)
    launching = {"max_restarts": document.plan.job.run.max_restarts} | (launching or {})
    run_over_sites(
        Start(document, spec),
        place.run_dir,
        on_lost_site,
        lambda other, of_chunks: run_spec_of(other.plan, resume=place.resume, **(settings | of_chunks)),
        resume=place.in_place,
        on_step=on_step,
        **launching,
    )
    return Run.load(place.run_dir)


def _planned(plan: Plan | PlanDocument | Job) -> tuple[PlanDocument, dict[str, Any]]:
    """The plan that is to be trained, and the settings of a run on chunks or of unlike sites that follow from it."""
    expect_kind("train: plan", plan, (Plan, PlanDocument, Job), "a Plan or a Job, such as farpipe.load_job(FILE) reads")
    if not isinstance(plan, Job):
        return plan if isinstance(plan, PlanDocument) else PlanDocument(plan=plan), {}
    if (by_site := plans_by_site(plan)) is not None:
        return by_site.document, site_settings(by_site)
    job, note = within_engine(plan) if plan.data.packing is None else (plan, "")
    if note:
        warnings.warn(f"farpipe.train: planned for farpipe's engine, with {note}", stacklevel=3)
    found = find(job)[0]
    return explained(found), chunk_settings(plan, found.chunk_costs)


def site_settings(by_site: PlansBySite) -> dict[str, Any]:
    """The settings of a run whose sites have plans of their own."""
    return {"site_plans": tuple(BarePlan.of(plan) for plan in by_site.plans)}


def chunk_settings(job: Job, costs: tuple[ChunkCosts, ...]) -> dict[str, Any]:
    """The settings of a run on chunks: what they cost, and where groups of devices share them, in each group."""
    return {"chunk_costs": costs[-1] if costs else None, "group_costs": costs if groups_documents(job) else ()}


def run_spec_of(plan: Plan, **settings: Any) -> RunSpec:
    """The run of `plan` with these settings; by default the job's steps and ``[run]``, and the device of its sites.

    InputError names what the engine can't run, and what to change in the job.
    """
    device = settings.pop("device", None) or device_of(plan.job)
    obstacle, change = ("", "") if settings.get("site_plans") else plan_obstacle(plan)
    if obstacle:
        instead = f"plan again with {change}" if change else "give the job in place of its plan"
        raise InputError(f"the engine can't run this yet, only plan it: {obstacle}; {instead}")
    if plan.job.data.packing is not None and settings.get("chunk_costs") is None:
        raise InputError("with data.packing every step is planned separately: give the job instead of its plan")
    if device == "sleep" and settings.get("group_costs"):
        raise InputError("--device sleep: a rehearsal has one process for all of a stage; pin layout.context and data")
    of_job = plan.job.run
    defaults: dict[str, Any] = {
        "num_steps": plan.job.training.num_steps,
        "metrics": plan.job.metrics,
        "publish": plan.job.publish,
        "emulate_links": of_job.emulate,
        "replan": ReplanSettings() if of_job.replan else None,
        "transport": {
            "timeout_s": of_job.timeout_s or max(60.0, 10 * plan.prediction.step_s),
            "outage_s": of_job.outage_s,
        },
        "seeks_orders": plan.job.schedule == SEARCHED,
        "peak_flops_per_s": _peak_flops_per_s(plan, device),
    }
    try:
        return RunSpec(plan=plan, device=device, **(defaults | settings))
    except ValidationError as error:
        raise InputError(explain(RunSpec, error, "the run's settings")) from None


def device_of(job: "Job") -> DeviceKind:
    """The kind of device of the sites that a run may use, on which it computes by default. InputError where they have
    both kinds."""
    by_kind = {site.device.is_cpu: f"{site.name} has {site.device.name}" for _, site in job.used_sites()}
    if len(by_kind) > 1:
        raise InputError(
            f"a run computes on one kind of device, and {', '.join(by_kind.values())}: say --device cuda or --device "
            "cpu, or leave one of them out with layout.sites"
        )
    return "cpu" if True in by_kind else "cuda"


def _peak_flops_per_s(plan: Plan, device: str | None) -> float | None:
    """Peak FLOP/s of all devices of the plan together; None if the run computes on others than planned."""
    by_name = {site.name: site.device for site in plan.job.cluster.sites}
    devices = [by_name[site] for site in plan.sites]
    if device != "cuda" and any(planned.name != device for planned in devices):
        return None
    of_ranks = sum(peak_flops_per_s(planned, plan.job.training) for planned in devices)
    return of_ranks * plan.layout.data * plan.layout.tensor * plan.layout.context
