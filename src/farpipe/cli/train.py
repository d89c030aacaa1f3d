"""``farpipe train JOB|PLAN``: train it, here with an emulated WAN, or under torchrun on real sites."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from farpipe.cli.output import console, print_json, status
from farpipe.errors import RunInterruptedError

if TYPE_CHECKING:
    from farpipe.plan import Plan

TORCHRUN = """ready. On every site, with this directory copied to each of them:

    torchrun --nnodes {num_sites} --nproc-per-node RANKS_PER_SITE --node-rank SITE_NUMBER \\
        --master-addr ADDRESS_OF_SITE_0 --master-port 29500 \\
        -m farpipe.runtime.rank_main {run_dir} --host ADDRESS_OF_THIS_SITE --allow-plaintext
"""


def train(
    job: Annotated[Path, typer.Argument(help="A job (.toml) or a plan.")],
    run_dir: Annotated[Path, typer.Option(help="Where everything about the run goes.")] = Path("runs/last"),
    schedule: Annotated[str | None, typer.Option(help="Another order than the plan's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default: the job's.")] = None,
    device: Annotated[
        Literal["cpu", "cuda", "sleep"], typer.Option(help="What to compute on; sleep rehearses without computing.")
    ] = "cpu",
    profile: Annotated[list[Path] | None, typer.Option(help="Measured times, for a job.")] = None,
    streams: Annotated[int, typer.Option(min=1, help="TCP connections per channel.")] = 4,
    timeout_s: Annotated[
        float | None,
        typer.Option(min=0.1, max=1e6, help="Longest wait for one message; default: a minute, or ten predicted steps."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on which the ranks meet; 0: any that is free.")] = 0,
    emulate: Annotated[bool, typer.Option(help="Delay messages between sites as the links would.")] = True,
    prepare: Annotated[bool, typer.Option("--prepare", help="Only write the run directory, for torchrun.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train: here, with an emulated WAN between the sites, or under torchrun on real ones."""
    from farpipe.cli.runs import run_spec_of, summary_json, write_inputs, write_results
    from farpipe.cli.shown import step_table
    from farpipe.runtime.metrics import RUN_NAME
    from farpipe.runtime.run import refuse_results, run

    refuse_results(run_dir)
    plan = _load_plan(job, profile or [], schedule)
    transport = {"streams": streams, "timeout_s": timeout_s or max(60.0, 10 * plan.prediction.step_s)}
    num_steps = steps or plan.job.training.num_steps
    local = emulate and not prepare
    spec = run_spec_of(plan, num_steps=num_steps, device=device, emulate_links=local, transport=transport)
    write_inputs(plan, run_dir)
    if prepare:
        spec.save(run_dir / RUN_NAME)
        typer.echo(TORCHRUN.format(num_sites=len(set(plan.sites)), run_dir=run_dir))
        return
    try:
        with _progress(plan.schedule.method, num_steps) as on_step:
            run(spec, run_dir, on_step=on_step, master_port=port)
    except KeyboardInterrupt:
        raise RunInterruptedError(f"interrupted; all ranks have ended, {run_dir} holds no whole run") from None
    shown = write_results(run_dir)
    if as_json:
        print_json(summary_json(run_dir))
        return
    console().print(step_table([shown.view]))
    typer.echo(f"report: {run_dir / 'report.html'}   trace for ui.perfetto.dev: {run_dir / 'trace.json'}")


def _load_plan(path: Path, profiles: list[Path], schedule: str | None) -> "Plan":
    """The plan in a file, or one made for the job in it; `schedule` replaces its order."""
    from farpipe.cost import Profile
    from farpipe.plan import Plan, make_plan
    from farpipe.plan.planner import reorder
    from farpipe.spec import load_job

    if path.suffix != ".toml":
        plan = Plan.load(path)
        return plan if schedule is None else reorder(plan, schedule)
    job = load_job(path)
    only_pipeline = {"data": job.layout.data or 1, "tensor": job.layout.tensor or 1}  # what the engine can run
    pinned = {"layout": job.layout.model_copy(update=only_pipeline), "schedule": schedule or job.schedule}
    with status("planning"):
        return make_plan(job.model_copy(update=pinned), [Profile.load(p) for p in profiles])


@contextmanager
def _progress(what: str, num_steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar on stderr with the loss of the last step."""
    import sys

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, {task.fields[loss]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=shown, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(f"training, {what}", total=num_steps, loss="starting")

        def on_step(line: dict[str, Any]) -> None:
            loss = line.get("loss")
            bar.update(task, advance=1, loss="rehearsing" if loss is None else f"loss {loss:.3f}")

        yield on_step
