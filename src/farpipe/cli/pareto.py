"""``farpipe pareto JOB.toml``: the layouts that no other beats in time and money, or in other objectives."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from farpipe.cli.options import AsJson, Csv, JobKeys, job_with
from farpipe.cli.output import check_folder, console, print_json
from farpipe.core.errors import UsageError
from farpipe.core.strict import nearest, write_text
from farpipe.report.tables import csv_text, to_rich

if TYPE_CHECKING:
    from farpipe.planning.planner.objective import Objective

FORMAT: Final = "farpipe/pareto/1"


def pareto(
    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")],
    given: JobKeys = None,
    objective: Annotated[
        str, typer.Option(metavar="NAMES", help="Two or more of time, money, energy and carbon.")
    ] = "time,money",
    csv: Csv = None,
    as_json: AsJson = False,
) -> None:
    """Show the Pareto front of layouts over two or more objectives.

    Steps are estimates by closed forms; `farpipe plan` simulates a pinned layout. Layouts that lack a figure
    that an objective needs (a rent, a device's power) are left out. --json marks the front with on_front.
    """
    from farpipe.planning.planner import objective as choices_by
    from farpipe.planning.planner.candidates import left_out_note
    from farpipe.planning.planner.quotes import Planner
    from farpipe.report.plan_tables import front_data, front_table

    check_folder(csv, keeping=(job,))
    names, spec = _objectives(objective), job_with(job, given)
    choices = choices_by.known(choices_by.options(Planner(), spec), names)
    front = choices_by.pareto(choices, names)
    if csv is not None:
        write_text(csv, csv_text([row | row["per_million_tokens"] for row in front_data(choices, front)]))
    if as_json:
        print_json(
            {"format": FORMAT, "objectives": list(names), "options": front_data(choices, front)} | spec.model.guess_data
        )
        return
    notes = (
        left_out_note(len(spec.cluster.sites)),
        choices_by.unpriced(front) if "money" in names else "",
        spec.model.guess_note,
    )
    console().print(to_rich(front_table(front, len(choices), " ".join(filter(None, notes)))))


def _objectives(text: str) -> "tuple[Objective, ...]":
    from farpipe.planning.planner.objective import OBJECTIVES

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in OBJECTIVES:
            raise UsageError(
                f"--objective: there is no {name!r}{nearest(name, OBJECTIVES)}; known: {', '.join(OBJECTIVES)}"
            )
    if len(set(names)) < max(2, len(names)):
        raise UsageError(f"--objective {text!r}: expected two or more different ones, such as time,money")
    return tuple(name for name in OBJECTIVES if name in names)
