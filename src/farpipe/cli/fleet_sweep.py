"""``farpipe fleet sweep``: a grid of simulations on all cores, kept line by line."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.output import check_folder, check_picture, console, print_json, status

if TYPE_CHECKING:
    from farpipe.fleet.job import FleetJob
    from farpipe.fleet.quotes import PlannerQuotes
    from farpipe.fleet.scenario import Scenario
    from farpipe.fleet.sweep import Point
    from farpipe.report import FittedTable

Row = dict[str, Any]


def sweep(
    path: Annotated[Path, typer.Argument(metavar="FLEET.toml", help="Sites, links, prices and failures.")],
    jobs: Annotated[Path, typer.Option("--jobs", help="The trace: JOBS.csv.")],
    policies: Annotated[
        str, typer.Option(help="Names with commas between them; all: every one.")
    ] = "easy,bace,farpipe",
    loads: Annotated[str | None, typer.Option(help="Offered loads, such as 0.6,0.9; else the trace as it is.")] = None,
    bandwidths: Annotated[str, typer.Option(help="Factors for every link's rate.")] = "1",
    seeds: Annotated[int, typer.Option(min=1, help="So many orders of the jobs; the first is the trace's.")] = 1,
    rows: Annotated[Path, typer.Option(help="Keep rows here; what is there is not computed again.")] = Path(
        "fleet-sweep.jsonl"
    ),
    processes: Annotated[int | None, typer.Option(min=1, help="At once; all cores if not said.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw times and money over the load to this PNG or SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every row as JSON.")] = False,
) -> None:
    """Simulate a trace over a grid of loads, link rates, policies and orders; an interrupted sweep goes on."""
    from farpipe import __version__
    from farpipe.fleet.policies import POLICIES
    from farpipe.fleet.sweep import grid, key_of

    check_picture(plot)
    check_folder(rows, plot, keeping=(path, jobs))
    names = list(POLICIES) if policies == "all" else [name.strip() for name in policies.split(",")]
    points = grid(names, _numbers(loads or "", "--loads"), _numbers(bandwidths, "--bandwidths"), range(seeds))
    scenario, trace, _ = _case(path, jobs)
    key = key_of(scenario, trace, __version__)
    known = {_point(row): row for row in _read(rows) if row.get("key") == key}
    missing = [point for point in points if tuple(point) not in known]
    _end_last_line(rows)
    with status(f"simulating {len(missing)} of {len(points)} points"):
        for point, row in _run(path, jobs, missing, processes):
            known[tuple(point)] = row | {"key": key}
            _keep(rows, known[tuple(point)])
    _show([known[tuple(point)] for point in points], plot, as_json)


def _show(found: list[Row], plot: Path | None, as_json: bool) -> None:
    if plot is not None:
        from farpipe.report.fleet_sweep import draw_sweep

        draw_sweep(found, plot)
    if as_json:
        print_json([{name: value for name, value in row.items() if name != "key"} for row in found])
    else:
        console().print(_table(found))


def _numbers(text: str, option: str) -> list[float]:
    from farpipe.errors import UsageError

    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"{option}: expected numbers with commas between them, found {text!r}") from None


def _read(path: Path) -> list[Row]:
    """The rows that are there, without a last line that was cut off; InputError where the file is something else."""
    from farpipe.errors import InputError
    from farpipe.strict import read_text

    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return []
    found = []
    for line in read_text(path).splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    kept = [row for row in found if isinstance(row, dict) and "policy" in row]
    if not kept:
        raise InputError(f"{path}: is there already, and no rows of a sweep; give another file with --rows")
    return kept


def _end_last_line(path: Path) -> None:
    """So that the next row has a line of its own, also after one that was cut off."""
    if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
        _append(path, "")


def _keep(path: Path, row: Row) -> None:
    _append(path, json.dumps(row))


def _append(path: Path, line: str) -> None:
    from farpipe.errors import RunError

    try:
        with path.open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror or error}; rows before this one stay") from None


def _point(row: Row) -> tuple[Any, ...]:
    return row.get("policy"), row.get("load"), row.get("bandwidth"), row.get("seed")


def _run(path: Path, jobs: Path, points: "Sequence[Point]", processes: int | None) -> "Iterator[tuple[Point, Row]]":
    """Every point with its row, as they come; in this process where one is enough."""
    import multiprocessing
    import os
    from concurrent.futures import ProcessPoolExecutor, as_completed

    count = min(processes or len(os.sched_getaffinity(0)), len(points))
    if count <= 1:
        yield from ((point, _row(path, jobs, point)) for point in points)
        return
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(_row, path, jobs, point): point for point in points}
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def _row(path: Path, jobs: Path, point: "Point") -> Row:
    from farpipe.fleet.sweep import row_at

    scenario, trace, quotes = _case(path, jobs)
    return row_at(scenario, trace, point, quotes)


@cache
def _case(path: Path, jobs: Path) -> "tuple[Scenario, list[FleetJob], PlannerQuotes]":
    """Scenario, trace and quotes, read once in every process."""
    from farpipe.fleet.play import quotes_of
    from farpipe.fleet.scenario import load_scenario
    from farpipe.fleet.traces import read_jobs

    scenario = load_scenario(path)
    return scenario, read_jobs(jobs), quotes_of(scenario)


def _table(rows: Sequence[Row]) -> "FittedTable":
    from farpipe.report import TableView, to_rich

    head = ("policy", "load", "links", "seed", "mean JCT", "p95 JCT", "p99 wait", "use", "electricity", "all money")
    lines = tuple(_line(row) for row in rows)
    return to_rich(
        TableView(f"{len(rows)} simulations", head, lines, frozenset(range(1, len(head))), expendable=(7, 5))
    )


def _line(row: Row) -> tuple[str, ...]:
    hours = [
        "-" if row[key] is None else f"{row[key] / 3600:.2f} h" for key in ("mean_jct_s", "p95_jct_s", "p99_wait_s")
    ]
    load = "as it is" if row["load"] is None else f"{row['load']:g}"
    money = f"${row['electricity_usd']:,.0f}", f"${row['total_usd']:,.0f}"
    return (
        row["policy"],
        load,
        f"x {row['bandwidth']:g}",
        str(row["seed"]),
        *hours,
        f"{row['utilization']:.0%}",
        *money,
    )
