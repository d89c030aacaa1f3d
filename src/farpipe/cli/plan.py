"""``farpipe plan JOB.toml``: find the best plan, print it and why."""

from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.output import console, progress_bar, search_status
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")] = False,
) -> None:
    """Find the best plan, print it and why the others lost, and write it to a file."""
    from farpipe.cli.shown import plan_of, show_plan
    from farpipe.cost import Profile
    from farpipe.plan import refine
    from farpipe.spec import load_job

    spec = load_job(job)
    if search_s and spec.schedule is not None:
        raise UsageError(
            f"--search-s: {job} names the schedule {spec.schedule!r} (schedule.method), so there is none to search "
            'for; leave out --search-s, or write method = "auto" there'
        )
    with progress_bar("planning", "layouts") as advance:
        found = plan_of(spec, job, [Profile.load(path) for path in profile or []], progress=advance)
    if search_s:
        with search_status("searching for a faster schedule") as tell:
            found = refine(found, search_s, tell)
    found.save(output)
    if as_json:
        typer.echo(found.to_json())
        return
    show_plan(found, console())
    typer.echo(f"\nplan written to {output}")
