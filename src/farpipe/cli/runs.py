"""From a plan to a run and from a run directory back to what can be shown."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farpipe.errors import InputError, UsageError
from farpipe.strict import read_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farpipe.plan import Plan
    from farpipe.report import RunView
    from farpipe.runtime.run_spec import RunSpec

PLAN_NAME = "plan.json"
JOB_NAME = "job.toml"
DEFAULT_RUN_DIR = Path("runs/last")
PAGE_NAME = "report.html"
TRACE_NAME = "trace.json"


@dataclass(frozen=True)
class LoadedRun:
    """A run directory: the plan that it ran, and what it shows."""

    plan: "Plan"
    view: "RunView"
    broken_off: str = ""
    """Of a run that has no end: how far it came and the last that its ranks said; it shows what there is."""


def load_run(run_dir: Path) -> LoadedRun:
    """Read a run directory, whole or broken off; InputError when it is none, or something is damaged."""
    from farpipe.plan import Plan
    from farpipe.report import RunView
    from farpipe.runtime.figures.metrics import METRICS_NAME, SUMMARY_NAME, TIMELINE_NAME, read_metrics
    from farpipe.simulate import Timeline, simulate

    if not (run_dir / PLAN_NAME).is_file():
        raise no_run(run_dir)
    plan = Plan.load(run_dir / PLAN_NAME)
    metrics = read_metrics(run_dir / METRICS_NAME) if (run_dir / METRICS_NAME).exists() else []
    view = RunView(
        name=plan.schedule.method,
        problem=plan.problem,
        predicted=simulate(plan.problem, plan.schedule, checked=True),
        measured=Timeline.load(run_dir / TIMELINE_NAME) if (run_dir / TIMELINE_NAME).exists() else None,
        metrics=metrics,
        step_overhead_s=overhead_s(plan, run_dir),
        sites=plan.sites,
    )
    whole = (run_dir / SUMMARY_NAME).exists()
    return LoadedRun(plan, view, "" if whole else _how_it_ended(run_dir, len(metrics)))


def no_run(folder: Path) -> InputError:
    """What to say of a folder in which nothing was ever trained."""
    return InputError(f"{folder}: not a run directory: it has no {PLAN_NAME}; `farpipe train` makes one")


def overhead_s(plan: "Plan", run_dir: Path) -> float:
    """What a step of this run takes besides the pipeline; a rehearsal has no optimizer."""
    from farpipe.runtime.figures.metrics import RUN_NAME
    from farpipe.runtime.run_spec import RunSpec

    rehearsed = (run_dir / RUN_NAME).exists() and RunSpec.load(run_dir / RUN_NAME).device == "sleep"
    return 0.0 if rehearsed else plan.prediction.overhead_s


def _how_it_ended(run_dir: Path, num_steps: int) -> str:
    """How far a run without an end came, and the last line of each of its logs, the earliest first."""
    from farpipe.run.run import LOGS_NAME

    logs = sorted((run_dir / LOGS_NAME).glob("rank-*.log"), key=lambda log: log.stat().st_mtime)
    lines = [(log, log.read_text(encoding="utf-8", errors="replace").strip().splitlines()) for log in logs]
    said = [f"\n  {log}: {text[-1][:500]}" for log, text in lines if text]
    last = " The last that its ranks said:" + "".join(said) if said else ""
    return f"{run_dir}: not a whole run: {num_steps} steps are recorded.{last}"


@dataclass(frozen=True)
class RunPlace:
    """Where a run goes, and what it goes on from."""

    run_dir: Path
    resume: str | None = None
    """Another directory with the checkpoints to go on from."""
    in_place: bool = False
    """Whether it goes on in the directory that it has."""


def prepare_run_dir(run_dir: Path | None, resume: Path | None) -> RunPlace:
    """What ``--run-dir`` and ``--resume`` ask for.

    InputError when the directory has results of another run, or there is nothing to go on from; UsageError when the
    new directory has to be named.
    """
    from farpipe.run.run import refuse_results
    from farpipe.runtime.checkpoint.folders import CHECKPOINTS_NAME, MANIFEST_NAME, whole_checkpoints

    is_checkpoint = resume is not None and (resume / MANIFEST_NAME).exists()
    if is_checkpoint and run_dir is None:
        raise UsageError("--resume with one checkpoint: give --run-dir another directory, for a run of its own")
    if resume is not None and not is_checkpoint and not whole_checkpoints(resume / CHECKPOINTS_NAME):
        raise InputError(f"{resume}: there is no whole checkpoint in its {CHECKPOINTS_NAME}")
    place = run_dir or resume or DEFAULT_RUN_DIR
    if resume is not None and place.resolve() == resume.resolve():
        return RunPlace(place, in_place=True)
    refuse_results(place)
    return RunPlace(place, None if resume is None else str(resume.absolute()))


def run_spec_of(plan: "Plan", **settings: Any) -> "RunSpec":
    """What the ranks have to know to run `plan`; `settings` are further fields of RunSpec.

    InputError for what the engine can't run yet: tensor-parallel plans, mixtures of experts, dropout.
    """
    from farpipe.cost import settle
    from farpipe.plan.engine import engine_obstacle, training_obstacle
    from farpipe.runtime.run_spec import RunSpec

    layout = plan.layout
    if obstacle := engine_obstacle(layout):
        raise InputError(
            f"the engine does not divide layers over devices as yet, and the plan has {obstacle}; plan "
            "again with layout.tensor = 1"
        )
    training = settle(plan.job.training, layout)
    if obstacle := training_obstacle(plan.job.model, training):
        raise InputError(f"the engine can't train this yet, only plan it: {obstacle}")
    return RunSpec(
        problem=plan.problem,
        schedule=plan.schedule,
        sites=plan.sites,
        model=plan.job.model,
        training=training.model_copy(update={"microbatch_size": layout.microbatch_size}),
        data=plan.job.data,
        partition=tuple((p.first_layer, p.end_layer) for p in plan.placements),
        recompute=plan.recompute,
        replicas=plan.replicas,
        peak_flops_per_s=_peak_flops_per_s(plan, settings.get("device")),
        **settings,
    )


def _peak_flops_per_s(plan: "Plan", device: str | None) -> float | None:
    """What all devices of the plan could do together; None where the run computes on others than planned."""
    by_name = {site.name: site.device for site in plan.job.cluster.sites}
    devices = [by_name[site] for site in plan.sites]
    if device != "cuda" and any(planned.name != device for planned in devices):
        return None
    return sum(planned.peak_flops[plan.job.training.precision] for planned in devices) * plan.layout.data


def write_inputs(plan: "Plan", run_dir: Path) -> None:
    """Put the plan, and the job as the user wrote it, into a run directory."""
    from farpipe.strict import write_text

    plan.save(run_dir / PLAN_NAME)
    if plan.job.text:
        write_text(run_dir / JOB_NAME, plan.job.text)


def write_results(run_dir: Path) -> LoadedRun:
    """Make the trace and the report page of a run in its directory."""
    run = load_run(run_dir)
    write_pages([run], run_dir / PAGE_NAME, run_dir / TRACE_NAME)
    return run


def write_pages(runs: "Sequence[LoadedRun]", page: Path, trace: Path) -> None:
    """Write the page about `runs` and the trace of the first."""
    from farpipe.cli.shown import plan_report
    from farpipe.report import write_report, write_trace

    first = runs[0].view
    timelines = {"predicted": first.predicted} | ({"measured": first.measured} if first.measured else {})
    write_trace(timelines, trace)
    notices = tuple(run.broken_off for run in runs if run.broken_off)
    write_report(plan_report(runs[0].plan, [run.view for run in runs], notices), page)


def summary_json(run_dir: Path) -> dict[str, Any]:
    """``summary.json`` of a finished run, with the prediction beside it."""
    from farpipe.plan import Plan
    from farpipe.runtime.figures.metrics import SUMMARY_NAME

    plan = Plan.load(run_dir / PLAN_NAME)
    summary: dict[str, Any] = json.loads(read_text(run_dir / SUMMARY_NAME))
    makespan_s = plan.prediction.makespan_s
    return summary | {
        "predicted_makespan_s": makespan_s,
        "predicted_step_s": makespan_s + overhead_s(plan, run_dir),
    }
