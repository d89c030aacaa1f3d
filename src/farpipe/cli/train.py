"""``farpipe train JOB|PLAN``: train it, here with an emulated WAN, or under torchrun on real sites."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from farpipe.cli.extras import need_torch
from farpipe.cli.options import refuse, typed
from farpipe.cli.output import console, log, print_json, status
from farpipe.errors import DivergedError, InputError, RunError, RunInterruptedError, RunStoppedError, UsageError

if TYPE_CHECKING:
    from farpipe.cost.chunks import ChunkCosts
    from farpipe.plan import Plan
    from farpipe.run.directory import RunPlace
    from farpipe.runtime.run_spec import RunSpec
    from farpipe.spec import Job, Training
    from farpipe.step import LightPaths


def train(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(help="A job (.toml) or a plan.")],
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run; default: that of --resume, or runs/last.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="A named schedule instead of the plan's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default: the job's.")] = None,
    device: Annotated[
        Literal["cpu", "cuda", "sleep"], typer.Option(help="Device to compute on; sleep rehearses without computing.")
    ] = "cpu",
    profile: Annotated[list[Path] | None, typer.Option(metavar="<path>", help="Measured times, for a job.")] = None,
    streams: Annotated[
        int | None, typer.Option(min=1, max=1024, help="TCP connections per channel; default: as the links ask for.")
    ] = None,
    outage_s: Annotated[float, typer.Option(min=0.1, help="Longest interruption of a connection to survive.")] = 60.0,
    timeout_s: Annotated[
        float | None,
        typer.Option(min=0.1, max=1e6, help="Longest wait for one message; default: a minute, or ten predicted steps."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Rendezvous port; 0 picks a free one.")] = 0,
    emulate: Annotated[bool, typer.Option(help="Delay messages between sites as the links would.")] = True,
    wan: Annotated[
        bool, typer.Option("--wan", help="Run each site in a network namespace, with kernel links between them (root).")
    ] = False,
    allow_plaintext: Annotated[
        bool, typer.Option("--allow-plaintext", help="With --wan: messages between sites go unencrypted.")
    ] = False,
    light_paths: Annotated[Path | None, typer.Option(help="Light paths of `farpipe optical simulate`.")] = None,
    wire_type: Annotated[
        Literal["none", "bf16", "fp8", "int8"] | None,
        typer.Option(help="Round activations and gradients between sites; default: the job's training.wire_type."),
    ] = None,
    replan: Annotated[
        bool, typer.Option("--replan", help="Search for a faster schedule while the run goes on, and switch to it.")
    ] = False,
    prepare: Annotated[bool, typer.Option("--prepare", help="Only write the run directory, for torchrun.")] = False,
    launch_format: Annotated[
        Literal["torchrun", "sbatch"], typer.Option("--format", help="With --prepare: commands, or scripts for Slurm.")
    ] = "torchrun",
    hostfile: Annotated[
        Path | None,
        typer.Option(metavar="<path>", help="With --prepare: machines, as lines ADDRESS site=NAME [slots=N]."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on from the newest good checkpoint of this run, or from this one.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Start again from the newest checkpoint, so many times, when the run breaks.")
    ] = 0,
    log_every: Annotated[
        int, typer.Option(min=0, help="Steps between two lines of rank 0's log, and of stderr where it is no terminal.")
    ] = 10,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write metrics for TensorBoard as well.")] = False,
    prometheus_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve metrics to Prometheus on this port of the loopback.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train: here, with an emulated WAN between the sites, or under torchrun on real ones."""
    from farpipe.cli.prepare import check_text, show_how_to_start, show_plan
    from farpipe.cli.wan import wan_for
    from farpipe.run.directory import choose_run_dir
    from farpipe.run.spec_of_plan import run_spec_of
    from farpipe.spec.replanning import ReplanSettings

    _refuse_what_is_not_used(context, prepare=prepare, rehearsal=device == "sleep", wan=wan)
    if not prepare:
        need_torch("farpipe train")
    place = choose_run_dir(run_dir, resume)
    plan, costs = _load_plan(job, profile or [], method, wire_type, replan=replan)
    check_text(plan, device)
    show_plan(plan, device, to_stderr=not prepare)
    num_steps = steps or plan.job.training.num_steps
    spec = run_spec_of(
        plan,
        num_steps=num_steps,
        device=device,
        replan=ReplanSettings() if replan else None,
        chunk_costs=costs,
        emulate_links=emulate and not prepare and not wan,
        transport={
            "streams": streams,
            "timeout_s": timeout_s or max(60.0, 10 * plan.prediction.step_s),
            "outage_s": outage_s,
        },
        metrics={"log_every_steps": log_every, "tensorboard": tensorboard, "prometheus_port": prometheus_port},
        resume=place.resume,
        light_paths=_load_light_paths(light_paths, plan, emulated=emulate and not prepare and not wan),
    )
    _write_run_dir(plan, spec, place)
    if prepare:
        show_how_to_start(plan, spec, place.run_dir, max_restarts, launch_format, hostfile)
        return
    with wan_for(plan.job.cluster, wanted=wan) as between:
        settings = {"wan": between, "allow_plaintext": allow_plaintext}
        _run_here(plan, spec, place, master_port=port, max_restarts=max_restarts, **settings)
    _show_results(place.run_dir, as_json=as_json)


def _load_light_paths(path: Path | None, plan: "Plan", *, emulated: bool) -> "LightPaths | None":
    """The light paths in a file; InputError where they are not of the plan's step and order."""
    from farpipe.step import LightPaths

    if path is None:
        return None
    if not emulated:
        raise UsageError("--light-paths is for emulated links; leave out --wan, --no-emulate and --prepare")
    paths = LightPaths.load(path)
    paths.expect_fit(plan.problem, str(path))
    if paths.schedule.ranks != plan.schedule.ranks:
        raise InputError(
            f"{path}: its order is {paths.schedule.method}, the plan's {plan.schedule.method}; simulate the light "
            "paths of the plan in its own order (without --order)"
        )
    return paths


def _write_run_dir(plan: "Plan", spec: "RunSpec", place: "RunPlace") -> None:
    """All that the ranks read, the tokenized text included."""
    from farpipe.run.directory import open_run_dir, write_inputs
    from farpipe.runtime.data.tokens import load_tokens

    open_run_dir(spec, place.run_dir, resume=place.in_place)
    write_inputs(plan, place.run_dir)
    if spec.device != "sleep":
        with status("reading the text"):  # tokenized once, here, and not by ranks for which the others wait
            load_tokens(plan.job.data)


def _show_results(run_dir: Path, *, as_json: bool) -> None:
    """Write the report and the trace, and show the run's figures."""
    from farpipe.cli.runs import summary_json, write_results
    from farpipe.cli.shown import step_table

    shown = write_results(run_dir)
    if as_json:
        print_json(summary_json(run_dir))
        return
    console().print(step_table([shown.view]))
    typer.echo(f"report: {run_dir / 'report.html'}   trace for ui.perfetto.dev: {run_dir / 'trace.json'}")


def _refuse_what_is_not_used(context: typer.Context, *, prepare: bool, rehearsal: bool, wan: bool) -> None:
    """UsageError for options that say nothing beside others."""
    if prepare:
        of_a_run_here = typed(context, wan="--wan", emulate="--emulate", port="--port", as_json="--json")
        refuse(of_a_run_here, "is for a run that starts here, and --prepare starts none; leave out one of them")
    else:
        refuse(typed(context, launch_format="--format", hostfile="--hostfile"), "is for --prepare")
    if rehearsal:
        refuse(typed(context, resume="--resume"), "has nothing to go on from: a rehearsal trains nothing")
    if not wan:
        refuse(typed(context, allow_plaintext="--allow-plaintext"), "is for --wan; under torchrun it is the ranks' own")


def _run_here(plan: "Plan", spec: "RunSpec", place: "RunPlace", **settings: Any) -> None:
    """Run on this machine, with a progress bar; `settings` are those of `run`."""
    from farpipe.run.directory import what_is_left
    from farpipe.run.run import run

    run_dir = place.run_dir
    try:
        with _progress(plan.schedule.method, spec.num_steps, spec.metrics.log_every_steps) as on_step:
            run(
                spec,
                run_dir,
                on_step=on_step,
                is_open=True,
                on_restart=lambda reason: console(stderr=True).print(f"the run broke, and starts again: {reason}"),
                **settings,
            )
    except KeyboardInterrupt:
        raise RunInterruptedError(f"interrupted {what_is_left(run_dir)}") from None
    except RunStoppedError as error:
        raise RunStoppedError(f"{error} with --resume {run_dir}") from None
    except RunError as error:
        if isinstance(error, DivergedError):
            raise
        raise RunError(f"{error}\nThe run ended {what_is_left(run_dir)}") from None


def _load_plan(
    path: Path, profiles: list[Path], method: str | None, wire_type: str | None, *, replan: bool
) -> "tuple[Plan, ChunkCosts | None]":
    """The plan in a file, or one made for the job in it, with what chunks cost where it trains on them.

    `method` names another schedule.

    UsageError for what a plan that is made can't take any more: a profile, or another `wire_type`.
    """
    from farpipe.cli.shown import plan_of
    from farpipe.cost import Profile
    from farpipe.plan import Plan
    from farpipe.plan.engine import within_engine
    from farpipe.plan.orders import expect_known
    from farpipe.plan.planner import reorder
    from farpipe.spec import load_job

    if method is not None:
        expect_known(method)
    if path.suffix != ".toml":
        plan = Plan.load(path)
        if profiles:
            raise UsageError(f"--profile: {path} is made already; give the job, to plan anew")
        if wire_type not in (None, plan.job.training.wire_type):
            raise UsageError(
                f"--wire-type: {path} is made for {plan.job.training.wire_type!r}; give the job, to plan anew"
            )
        if plan.job.data.packing is not None:
            raise UsageError(f"{path}: with data.packing every step is planned for itself; give the job")
        return plan if method is None else reorder(plan, method), None
    job = load_job(path)
    runnable, told = within_engine(job)
    if told and any(site.devices_per_machine > 1 for _, site in job.used_sites()):
        typer.echo(f"planning for farpipe's engine: {told}", err=True)
    if job.data.packing is not None:
        return _plan_chunks(job, path, profiles, method, wire_type, replan=replan)
    pinned: dict[str, Any] = {"layout": runnable.layout, "schedule": method or job.schedule}
    if wire_type is not None:
        pinned["training"] = _narrowed(job, wire_type)
    with status("planning"):
        return plan_of(job.model_copy(update=pinned), path, [Profile.load(p) for p in profiles]), None


def _plan_chunks(
    job: "Job", path: Path, profiles: list[Path], method: str | None, wire_type: str | None, *, replan: bool
) -> "tuple[Plan, ChunkCosts]":
    """The same for a job with `data.packing`; UsageError for options that say nothing there."""
    from farpipe.cli.shown import plan_of_chunks

    given = {"--method": method is not None, "--replan": replan}
    refuse([name for name, is_given in given.items() if is_given], "is not for data.packing: every step is planned")
    narrowed = {} if wire_type is None else {"training": _narrowed(job, wire_type)}
    with status("planning the first batch"):
        return plan_of_chunks(job.model_copy(update=narrowed), path, profiles)


def _narrowed(job: "Job", wire_type: str) -> "Training":
    """The job's training with another wire type; InputError when that is no narrower."""
    from farpipe.spec import Training
    from farpipe.strict import validate

    return validate(Training, job.training.model_dump() | {"wire_type": wire_type}, "--wire-type", "training")


@contextmanager
def _progress(what: str, num_steps: int, log_every: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar on stderr with the loss of the last step; where it is no terminal, a line every `log_every` steps."""
    import sys

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from farpipe.runtime.figures.log_line import is_logged, log_line
    from farpipe.transport.link_events import event_sentence

    shown, is_terminal = console(stderr=True), sys.stderr.isatty()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, {task.fields[loss]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=shown, disable=not is_terminal) as bar:
        task = bar.add_task(f"training, {what}", total=num_steps, loss="starting")

        def on_step(line: dict[str, Any]) -> None:
            loss = line.get("loss")
            for warning in line.get("warnings", ()):
                shown.print(f"warning: {warning}")
            for event in line.get("link_events", ()):
                shown.print(f"step {line['step']}: {event_sentence(event)}")
            bar.update(task, completed=line["step"] + 1, loss="rehearsing" if loss is None else f"loss {loss:.3f}")
            if not is_terminal and is_logged(line["step"], num_steps, log_every):
                log(log_line(line, num_steps))

        yield on_step
