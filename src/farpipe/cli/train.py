"""``farpipe train JOB|PLAN``: train it here, with an emulated WAN between the sites."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from farpipe.cli.options import AllowPlaintext, AsJson, need_torch, with_groups
from farpipe.cli.output import console, log, print_json
from farpipe.cli.run_options import RunOptions, show_planned
from farpipe.core.errors import DivergedError, InputError, RunError, RunInterruptedError, RunStoppedError, UsageError

if TYPE_CHECKING:
    from farpipe.core.step import LightPaths
    from farpipe.engine.launch.runs import Run
    from farpipe.planning import Plan, PlanDocument


@with_groups
def train(
    options: RunOptions,
    wan: Annotated[
        bool, typer.Option("--wan", help="Run each site in a network namespace, with kernel links between them (root).")
    ] = False,
    allow_plaintext: AllowPlaintext = False,
    light_paths: Annotated[Path | None, typer.Option(help="Light paths of `farpipe optical simulate`.")] = None,
    on_lost_site: Annotated[
        Literal["replan", "wait", "end"],
        typer.Option(help="If a site is lost: continue without it until it returns, wait, or end."),
    ] = "end",
    as_json: AsJson = False,
) -> None:
    """Train here, one process per rank, with an emulated WAN between the sites.

    Needs PyTorch. Given a job, it plans first. Without --device it computes on what the sites have; a job for
    GPUs trains on a CPU only with --device cpu, and --device sleep rehearses everything but the computing. --wan runs
    over the kernel's network, with TLS. metrics.jsonl is always written. A rank that fails ends them all; --resume
    continues from the last checkpoint. Each rank gets its share of the cores as OMP_NUM_THREADS, unless that is set.
    """
    from farpipe.cli.wan import wan_for

    if allow_plaintext and not wan:
        raise UsageError("--allow-plaintext needs --wan; under torchrun, give it to the ranks")
    need_torch("farpipe train")
    place = options.place()
    document, of_run = options.load_plan(computes_here=True)
    plan = document.plan
    show_planned(plan, options.device_for(plan.job), to_stderr=True)
    emulated = plan.job.run.emulate and not wan
    paths = _load_light_paths(light_paths, plan, emulated=emulated)
    settings = options.settings(plan) | of_run
    settings |= {"emulate_links": emulated, "light_paths": paths}
    settings |= {"resume": options.resume, "on_lost_site": on_lost_site}
    launching = {"allow_plaintext": allow_plaintext}
    with wan_for(plan.job.cluster, wanted=wan) as between:
        run = _train(document, place.run_dir, launching | {"wan": between}, settings)
    _show_results(run, as_json=as_json)


def _load_light_paths(path: Path | None, plan: "Plan", *, emulated: bool) -> "LightPaths | None":
    """The light paths in a file; InputError where they are not of the plan's step and order."""
    from farpipe.core.step import LightPaths

    if path is None:
        return None
    if not emulated:
        raise UsageError("--light-paths is for emulated links; leave out --wan and run.emulate = false")
    paths = LightPaths.load(path)
    paths.expect_fit(plan.problem, str(path))
    if paths.schedule.ranks != plan.schedule.ranks:
        raise InputError(
            f"{path}: its order is {paths.schedule.method}, the plan's {plan.schedule.method}; simulate the light "
            "paths of the plan in its own order"
        )
    return paths


def _show_results(run: "Run", *, as_json: bool) -> None:
    """Write the report and the trace, and show the run's figures."""
    from farpipe.cli.runs import PAGE_NAME, TRACE_NAME, summary_json, view_of, write_pages
    from farpipe.report.shown import step_table

    shown, run_dir = view_of(run), run.run_dir
    write_pages([shown], run_dir / PAGE_NAME, run_dir / TRACE_NAME)
    if as_json:
        print_json(summary_json(shown))
        return
    console().print(step_table([shown.view]))
    typer.echo(f"report: {run_dir / PAGE_NAME}   trace for ui.perfetto.dev: {run_dir / TRACE_NAME}")


def _train(document: "PlanDocument", run_dir: Path, launching: dict[str, Any], settings: dict[str, Any]) -> "Run":
    """Train on this machine, with a progress bar; `launching` are options of `run`, `settings` those of the run."""
    from farpipe.engine.launch.directory import what_is_left
    from farpipe.engine.launch.runs import train

    plan, err = document.plan, console(stderr=True)
    launching |= {
        "on_notice": err.print,
        "on_restart": lambda reason: err.print(f"the run broke and restarts: {reason}"),
    }
    try:
        with _progress(plan.schedule.method, settings["num_steps"], plan.job.metrics.log_every_steps) as on_step:
            return train(document, run_dir, on_step=on_step, launching=launching, **settings)
    except KeyboardInterrupt:
        raise RunInterruptedError(f"interrupted {what_is_left(run_dir)}") from None
    except RunStoppedError as error:
        how = "" if "--resume" in str(error) else f" with --resume {run_dir}"
        raise RunStoppedError(f"{error}{how}") from None
    except RunError as error:
        if isinstance(error, DivergedError):
            raise
        raise RunError(f"{error}\nThe run ended {what_is_left(run_dir)}") from None


def _shown_loss(line: dict[str, Any]) -> str:
    """The loss of a step and, of an elastic run, the sites that computed it."""
    loss = "rehearsing" if line.get("loss") is None else f"loss {line['loss']:.3f}"
    return f"{loss}, {' + '.join(line['sites'])}" if "sites" in line else loss


@contextmanager
def _progress(what: str, num_steps: int, log_every: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar on stderr with the loss of the last step; where it is no terminal, a line every `log_every` steps."""
    import sys

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from farpipe.engine.figures.metrics import event_sentence, is_logged, log_line, mirrored_text
    from farpipe.engine.outer.record import EVENTS, site_event_text

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
            for warning in line.get("warnings", ()):
                shown.print(f"warning: {warning}")
            for event in line.get("link_events", ()):
                shown.print(f"step {line['step']}: {event_sentence(event)}")
            for event in line.get(EVENTS, ()):
                shown.print(f"site {event['site']}: {site_event_text(event)}")
            mirrored = f", {mirrored_text(line['mirrored'])}" if line.get("mirrored") else ""
            bar.update(task, completed=line["step"] + 1, loss=_shown_loss(line) + mirrored)
            if not is_terminal and is_logged(line["step"], num_steps, log_every):
                log(log_line(line, num_steps))

        yield on_step
