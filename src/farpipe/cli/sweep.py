"""``farpipe sweep JOB.toml``: the strategy that wins, over a grid of the job's inputs."""

import os
from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.options import AsJson, Plot, Processes, refuse
from farpipe.cli.output import check_folder, check_picture, console, print_json, progress_bar


def sweep(
    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")],
    over: Annotated[
        list[str],
        typer.Option(
            metavar="<key=a,b>",
            help="A key of the job and its values, such as 'cluster.links.latency=1 ms,30 ms'; once for every axis.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File of the results, looked up when the sweep is run again.")
    ] = Path("sweep.jsonl"),
    lengths: Annotated[
        Path | None,
        typer.Option(help="Plan a batch of documents at every point: lengths, tokens or texts as `farpipe lengths`."),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="With --lengths: documents that are drawn from the file; else all.")
    ] = None,
    processes: Processes = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compare strategies at every point of a grid of the job's inputs, and show which wins where."""
    from farpipe.plan.job_grid import FORMAT, Result, job_points, name_of, parse_axis, row_of
    from farpipe.report import to_rich
    from farpipe.report.sweeps import draw_map, sweep_table
    from farpipe.run.grid import RowFile, here, play_grid
    from farpipe.spec import load_table

    if lengths is None:
        refuse(["--sample"] if sample is not None else [], "is of the documents of --lengths: give that too")
    check_folder(output, plot, keeping=(job, lengths))
    check_picture(plot)
    axes = [parse_axis(text) for text in over]
    points = job_points(load_table(job), axes, () if lengths is None else _documents(job, lengths, sample))
    file = RowFile(output, name_of, {"format": FORMAT})
    with progress_bar("sweeping", "points") as advance:
        player = here(processes or len(os.sched_getaffinity(0)))
        rows = play_grid(points, [point.name for point in points], row_of, file, player, advance)
    results = [Result.from_data(row, point.values) for row, point in zip(rows, points, strict=True)]
    if plot is not None:
        draw_map(plot, axes, results)
    if as_json:
        named = [{"key": axis.key, "values": list(axis.values)} for axis in axes]
        print_json({"format": FORMAT, "axes": named, "points": [result.to_data() for result in results]})
        return
    console().print(to_rich(sweep_table(axes, results)))
    typer.echo(f"results kept in {output}")


def _documents(job: Path, path: Path, sample: int | None) -> list[int]:
    """Lengths of the batch, of texts by the job's tokenizer."""
    from farpipe.cli.corpus import read_corpus
    from farpipe.sequences import sample_lengths
    from farpipe.spec import load_job

    found = read_corpus(path, None, load_job(job).data).lengths
    documents: list[int] = (found if sample is None else sample_lengths(found, sample, 0)).tolist()
    return documents
