"""``farpipe validate``: published and measured step times against ours; exit 5 outside tolerance."""

from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.output import console, print_json, status
from farpipe.errors import ToleranceError


def validate(
    points: Annotated[Path | None, typer.Option(help="Measured points of your own (TOML or CSV).")] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="FARPIPE_DATA", help="Folder with whole published tables: every row of them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the errors as JSON.")] = False,
) -> None:
    """Compare the cost model and the simulator with published and measured step times."""
    from farpipe.plan.validation import validate as compare_points

    with status("simulating the reference points"):
        report = compare_points(points, data)
    if as_json:
        print_json(report.to_data())
    else:
        console().print(report.table())
    failed = [group.group.name for group in report.groups if not group.passed]
    if failed and not as_json:  # the table has said it all
        raise ToleranceError(f"outside tolerance: {', '.join(failed)}")
    report.raise_if_failed()
