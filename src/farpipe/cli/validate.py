"""``farpipe validate``: published and measured step times against ours; exit 5 outside tolerance."""

from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.options import AsJson
from farpipe.cli.output import console, print_json, status
from farpipe.core.errors import ToleranceError


def validate(
    points: Annotated[
        Path | None, typer.Argument(help="Step times that you have measured (TOML or CSV); default: published ones.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the cost model and the simulator with published and measured step times.

    Exit code 5 when the mean error of a group is outside its tolerance.
    """
    from farpipe.planning.cost.trust import families
    from farpipe.planning.planner.validation import errors_table
    from farpipe.planning.planner.validation import validate as compare_points

    with status("simulating the reference points"):
        report = compare_points(points)
    if as_json:
        print_json(report.to_data() | ({} if points else {"families": list(families())}))
    else:
        console().print(*(() if points else (errors_table(),)), report.table(), sep="\n")
    failed = [group.group.name for group in report.groups if not group.passed]
    if failed and not as_json:  # the table has said it all
        raise ToleranceError(f"outside tolerance: {', '.join(failed)}")
    report.raise_if_failed()
