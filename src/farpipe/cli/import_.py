"""``farpipe import FILE.csv``: a schedule from elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.output import check_folder, console, keep_earlier, print_json


def import_(
    file: Annotated[Path, typer.Argument(help="A CSV schedule of torch.distributed.pipelining (compute_only).")],
    method: Annotated[str, typer.Option(help="The name that the schedule gets.")] = "torch-csv",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the schedule to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the schedule as JSON.")] = False,
) -> None:
    """Read a schedule that others have made, strictly, and show it."""
    from farpipe.schedule.torch_csv import from_torch_csv
    from farpipe.strict import read_text

    schedule = from_torch_csv(read_text(file), str(file), method)
    if output is not None:
        check_folder(output)
        keep_earlier(output, "schedule")
        schedule.save(output)
    if as_json:
        print_json(schedule.to_data())
        return
    console().print(schedule)
