"""``farpipe report RUN_DIR...``: the page about one run, or several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.output import check_folder, console


def report(
    run_dir: Annotated[
        list[Path],
        typer.Argument(help="Run directories; the page is about the first."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the page; default: report.html in the first.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            help="Write the first run's trace for ui.perfetto.dev here; default: trace.json in it, or NAME.trace.json "
            "beside the page NAME.html."
        ),
    ] = None,
) -> None:
    """Put runs side by side on one HTML page, write the trace of the first, and show their step times.

    `farpipe train` writes both by itself; a run under torchrun gets them here. A run that broke off shows what there is
    of it.
    """
    from farpipe.cli.runs import PAGE_NAME, TRACE_NAME, load_runs, write_pages
    from farpipe.engine.launch.directory import WRITTEN
    from farpipe.report.shown import link_event_tables, step_table

    read, page = [folder / name for folder in run_dir for name in WRITTEN], output or run_dir[0] / PAGE_NAME
    check_folder(output, perfetto, keeping=read)
    runs = load_runs(run_dir)
    trace = perfetto or (run_dir[0] / TRACE_NAME if output is None else page.with_suffix(".trace.json"))
    check_folder(page, trace, keeping=read)
    write_pages(runs, page, trace)
    for run in (run for run in runs if run.broken_off):
        typer.echo(run.broken_off, err=True)
    console().print(step_table([run.view for run in runs]))
    for table in link_event_tables([run.view for run in runs]):
        console().print(table)
    typer.echo(f"report: {page}   trace for ui.perfetto.dev: {trace}")
