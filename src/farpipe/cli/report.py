"""``farpipe report RUN_DIR...``: the page about one run, or several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.output import console


def report(
    run_dir: Annotated[
        list[Path], typer.Argument(help="Run directories; the first is the one that the page is about.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: report.html in the first.")] = None,
) -> None:
    """Put one run, or several side by side, on one HTML page, and show their step times."""
    from farpipe.cli.runs import load_run
    from farpipe.cli.shown import plan_report, step_table
    from farpipe.report import write_report

    runs = [load_run(path) for path in run_dir]
    target = output or run_dir[0] / "report.html"
    write_report(plan_report(runs[0].plan, [run.view for run in runs]), target)
    console().print(step_table([run.view for run in runs]))
    typer.echo(f"report: {target}")
