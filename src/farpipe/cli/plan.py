"""``farpipe plan JOB.toml``: find the best plan, print it and why."""

import json
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from farpipe.cli.output import check_folder, console, expect_replaceable, keep_earlier, progress_bar, search_status
from farpipe.errors import UsageError


def plan(
    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the plan.")] = Path("plan.json"),
    profile: Annotated[
        list[Path] | None,
        typer.Option(metavar="<path>", help="Measured times from `farpipe profile`; may be given several times."),
    ] = None,
    search_s: Annotated[
        float,
        typer.Option(min=0, help="Seconds to search further for a faster schedule of the plan found."),
    ] = 0.0,
    tokens: Annotated[
        float | None,
        typer.Option(min=1, help="Show time and device-hours for so many tokens; default: the job's steps."),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, max=20, help="Write the best so many plans, those after the first beside it.")
    ] = 1,
    objective: Annotated[
        Literal["time", "money", "energy", "carbon"],
        typer.Option(help="What the plan is chosen by: step time, or USD, kWh or grams of carbon per token."),
    ] = "time",
    local_steps: Annotated[
        int, typer.Option(min=2, help="Steps between two exchanges of the arm with local steps.")
    ] = 100,
    compare_arms: Annotated[
        bool, typer.Option("--arms/--no-arms", help="Compare ways to use the sites, and changes that would help.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")] = False,
) -> None:
    """Find the best plan, print it and why the others lost, and write it to a file."""
    from farpipe.cli.shown import plans_of, show_plan
    from farpipe.cost import Profile
    from farpipe.plan import refine
    from farpipe.spec import load_job
    from farpipe.units import format_seconds

    check_folder(output)
    expect_replaceable(output, "plan")
    spec = load_job(job)
    if search_s and spec.schedule is not None:
        raise UsageError(
            f"--search-s: {job} names the schedule {spec.schedule!r} (schedule.method), so there is none to search "
            'for; leave out --search-s, or write method = "auto" there'
        )
    began_s = time.perf_counter()
    if objective != "time":
        from farpipe.plan.objective import choose, options, pinned_to
        from farpipe.plan.service import Planner

        spec = pinned_to(spec, choose(options(Planner(), spec), objective))
    steps = local_steps if compare_arms else None
    with progress_bar("planning", "layouts") as advance:
        profiles = [Profile.load(path) for path in profile or []]
        found, *others = plans_of(spec, job, profiles, progress=advance, num_plans=top, local_steps=steps)
    if search_s:
        with search_status("searching for a faster schedule") as tell:
            found = refine(found, search_s, tell)
    told = keep_earlier(output, "plan")
    searched_s = time.perf_counter() - began_s
    found.save(output)
    for number, other in enumerate(others, 2):
        place = output.with_name(f"{output.stem}.{number}{output.suffix}")
        told += f"\nnumber {number}, step {format_seconds(other.prediction.step_s)}: {place}"
        told += keep_earlier(place, "plan")
        other.save(place)
    if as_json:
        from farpipe.plan.engine import plan_obstacle
        from farpipe.plan.quote import money_data

        figures = {"step_s": found.prediction.step_s, "tokens_per_s": found.prediction.tokens_per_s}
        obstacle, change = plan_obstacle(found)
        engine = {"runnable": not obstacle, "obstacle": obstacle, "change": change}
        extra = {"search_s": searched_s, **figures, "money": money_data(found), "engine": engine}
        typer.echo(json.dumps(json.loads(found.to_json()) | extra, indent=1))
        return
    show_plan(found, console(), tokens)
    typer.echo(f"\nplan written to {output}{told}")
