"""``farpipe plan JOB.toml``: find the best plan, print it and why."""

from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.output import console, progress_bar, search_status


def plan(
    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the plan.")] = Path("plan.json"),
    profile: Annotated[
        list[Path] | None, typer.Option(help="Measured times from `farpipe profile`; may be given several times.")
    ] = None,
    search_s: Annotated[
        float, typer.Option(min=0, help="Seconds to search for a better order of the plan found; 0: named orders only.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")] = False,
) -> None:
    """Find the best plan, print it and why the others lost, and write it to a file."""
    from farpipe.cli.shown import show_plan
    from farpipe.cost import Profile
    from farpipe.plan import make_plan, refine
    from farpipe.spec import load_job

    spec = load_job(job)
    with progress_bar("planning", "layouts") as advance:
        found = make_plan(spec, [Profile.load(path) for path in profile or []], advance)
    if search_s and spec.schedule is None:
        with search_status("searching for a better order") as tell:
            found = refine(found, search_s, tell)
    found.save(output)
    if as_json:
        typer.echo(found.to_json())
        return
    show_plan(found, console())
    typer.echo(f"\nplan written to {output}")
