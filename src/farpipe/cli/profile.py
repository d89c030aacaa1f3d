"""``farpipe profile JOB.toml``: measure this machine's stage times."""

from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.output import console, status


def profile(
    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile.")] = Path("profile.json"),
    device: Annotated[str, typer.Option(help="What to measure on: cpu or cuda.")] = "cpu",
    processes: Annotated[
        int, typer.Option(min=1, help="Measure in so many processes at once, as many as will run.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure this machine's stage times; `farpipe plan --profile` takes them instead of modelled ones."""
    from farpipe.cli.shown import profile_table
    from farpipe.runtime.profile import measure_profile
    from farpipe.spec import load_job

    spec = load_job(job)
    with status("measuring the stages of the model"):
        measured = measure_profile(spec, device=device, num_processes=processes)
    measured.save(output)
    if as_json:
        typer.echo(measured.to_json())
        return
    console().print(profile_table(measured))
    typer.echo(f"profile written to {output}")
