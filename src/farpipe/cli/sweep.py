"""``farpipe sweep JOB.toml``: the arm that wins, over a grid of the job's inputs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farpipe.cli.output import check_folder, check_picture, console, print_json, progress_bar
from farpipe.errors import UsageError

if TYPE_CHECKING:
    from farpipe.run.sweep import Player


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
    plot: Annotated[
        Path | None, typer.Option(help="Draw which arm wins over the first two axes to an .svg or .png file.")
    ] = None,
    any_training: Annotated[
        bool, typer.Option("--any-training", help="Let arms win as well whose training is not as the job says.")
    ] = False,
    local_steps: Annotated[
        int, typer.Option(min=2, help="Steps between two exchanges of the arm with local steps.")
    ] = 100,
    jobs: Annotated[int | None, typer.Option(min=1, max=1024, help="Processes at a time; default: all cores.")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="<address>", help="Use a Ray cluster: auto, HOST:PORT or ray://HOST:PORT.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all arms of all points as JSON.")] = False,
) -> None:
    """Compare the arms of a job at every point of a grid of its inputs, and show which wins where."""
    from farpipe.plan.sweep import FORMAT, grid, parse_axis
    from farpipe.report import to_rich
    from farpipe.report.sweep import draw_map, sweep_table
    from farpipe.run.sweep import run_sweep
    from farpipe.spec import load_table

    check_folder(output, plot)
    check_picture(plot)
    axes = [parse_axis(text) for text in over]
    points = grid(load_table(job), axes, local_steps)
    with progress_bar("sweeping", "points") as advance:
        results = run_sweep(points, output, _player(jobs, ray), advance)
    if plot is not None:
        draw_map(plot, axes, results, any_training)
    if as_json:
        named = [{"key": axis.key, "values": list(axis.values)} for axis in axes]
        print_json({"format": FORMAT, "axes": named, "points": [result.to_data() for result in results]})
        return
    console().print(to_rich(sweep_table(axes, results, any_training)))
    typer.echo(f"results kept in {output}")


def _player(jobs: int | None, ray: str | None) -> "Player":
    import os

    from farpipe.run.sweep import here, on_ray

    if ray is None:
        return here(jobs or len(os.sched_getaffinity(0)))
    if jobs is not None:
        raise UsageError("--jobs is for this machine; a Ray cluster uses all of its CPUs")
    return on_ray(ray)
