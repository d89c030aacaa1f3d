"""``farpipe sweep JOB.toml``: the strategy that wins, over a grid of the job's inputs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.options import AsJson, Csv, JobKeys, Plot, Processes, changes, job_with, refuse, with_groups
from farpipe.cli.output import check_folder, check_picture, console, print_json, progress_bar
from farpipe.core.strict import write_text
from farpipe.report.tables import csv_text, to_rich

if TYPE_CHECKING:
    from farpipe.planning.explain.job_grid import Axis, Result


@dataclass(frozen=True)
class SweepOptions:
    """A job, the grid of its inputs, and where the results go."""

    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")]
    over: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=A,B",
            help="A key of the job and its values, such as 'cluster.links.latency=1 ms,30 ms'; once for every axis.",
        ),
    ]
    given: JobKeys = None
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File of the results, looked up when the sweep is run again.")
    ] = Path("sweep.jsonl")
    lengths: Annotated[
        Path | None,
        typer.Option(help="Plan a batch of documents at every point: lengths, tokens or texts as `farpipe lengths`."),
    ] = None
    sample: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --lengths: number of documents drawn from the file, by training.seed; default: all."
        ),
    ] = None
    processes: Processes = None
    plot: Plot = None
    csv: Csv = None
    as_json: AsJson = False

    @cached_property
    def table(self) -> dict[str, Any]:
        """The job's table with the keys of `--set`; the points are checked one by one."""
        from farpipe.core.spec.load import load_table, put

        found = load_table(self.job)
        for key, value in changes(self.given).items():
            put(found, key, value, f"{self.job} with --set {key}")
        return found


@with_groups
def sweep(options: SweepOptions) -> None:
    """Compare strategies at every point of a grid of the job's inputs, and show which wins where.

    A key is dotted as in the file, such as cluster.links.latency or cluster.sites.zurich.num_devices; in a list, all
    entries change unless one is named. Results are kept in the output file: an interrupted sweep continues. With
    --lengths every point plans one batch of documents.
    """
    from farpipe.engine.launch.grid import RowFile, here, play_grid
    from farpipe.planning.explain.job_grid import FORMAT, Result, job_points, name_of, parse_axis, row_of
    from farpipe.report.sweeps import draw_map, sweep_rows

    if options.lengths is None and options.sample is not None:
        refuse(["--sample"], "needs --lengths")
    check_folder(options.output, options.plot, options.csv, keeping=(options.job, options.lengths))
    check_picture(options.plot)
    axes = [parse_axis(text) for text in options.over]
    points = job_points(options.table, axes, _documents(options))
    file = RowFile(options.output, name_of, {"format": FORMAT})
    with progress_bar("sweeping", "point") as advance:
        player = here(options.processes or len(os.sched_getaffinity(0)))
        rows = play_grid(points, [point.name for point in points], row_of, file, player, advance)
    results = [Result.from_data(row, point.values) for row, point in zip(rows, points, strict=True)]
    if options.plot is not None:
        draw_map(options.plot, axes, results)
    if options.csv is not None:
        write_text(options.csv, csv_text(sweep_rows(axes, results)))
    _show(axes, results, options)


def _show(axes: "Sequence[Axis]", results: "Sequence[Result]", options: SweepOptions) -> None:
    from farpipe.planning.explain.job_grid import FORMAT
    from farpipe.report.sweeps import sweep_table

    if options.as_json:
        named = [{"key": axis.key, "values": list(axis.values)} for axis in axes]
        data = {"format": FORMAT, "axes": named, "points": [result.to_data() for result in results]}
        print_json(data | ({"model_guessed": True} if _is_guessed(options) else {}))
        return
    console().print(to_rich(sweep_table(axes, results)))
    if _is_guessed(options):
        typer.echo("~ of a guessed model (model.guess): times may be off by any factor")
    typer.echo(f"results kept in {options.output}")


def _is_guessed(options: SweepOptions) -> bool:
    model = options.table.get("model")
    return isinstance(model, dict) and model.get("guess") is True


def _documents(options: SweepOptions) -> "Sequence[int]":
    """Lengths of the batch, of texts by the job's tokenizer; none without --lengths."""
    from farpipe.cli.corpus import read_corpus
    from farpipe.planning.workload import sample_lengths

    if options.lengths is None:
        return ()
    job = job_with(options.job, options.given)
    found = read_corpus(options.lengths, None, job.data).lengths
    found = found if options.sample is None else sample_lengths(found, options.sample, job.training.seed)
    documents: list[int] = found.tolist()
    return documents
