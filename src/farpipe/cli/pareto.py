"""``farpipe pareto JOB.toml``: the layouts that no other beats in time and money, or in other objectives."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from farpipe.cli.output import check_folder, check_picture, console, print_json
from farpipe.errors import UsageError
from farpipe.strict import nearest

if TYPE_CHECKING:
    from farpipe.plan.objective import Objective

FORMAT: Final = "farpipe/pareto/1"


def pareto(
    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")],
    objectives: Annotated[
        str, typer.Option(metavar="<names>", help="Two or more of time, money, energy and carbon.")
    ] = "time,money",
    plot: Annotated[
        Path | None, typer.Option(help="Draw the front over the first two objectives to an .svg or .png file.")
    ] = None,
    max_step: Annotated[
        str | None, typer.Option(metavar="<time>", help="Longest step, such as '20 s'; default: any.")
    ] = None,
    max_money: Annotated[
        float | None, typer.Option(help="Most dollars per million tokens; default: any number.")
    ] = None,
    max_devices: Annotated[int | None, typer.Option(min=1, help="Most devices at all sites; default: all.")] = None,
    sites: Annotated[
        str | None, typer.Option(metavar="<names>", help="Sites that may be used, separated by commas; default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all choices as JSON.")] = False,
) -> None:
    """Show the layouts that no other beats in one objective without losing in another."""
    from farpipe.plan import objective
    from farpipe.plan.decided import tell_left_out
    from farpipe.plan.service import Planner
    from farpipe.report import to_rich
    from farpipe.report.pareto import draw_front, front_data, front_table
    from farpipe.spec import load_job

    check_folder(plot)
    check_picture(plot)
    names, spec = _objectives(objectives), load_job(job)
    allowed = None if sites is None else _sites(sites, [site.name for site in spec.cluster.sites])
    longest_s = None if max_step is None else _seconds(max_step)
    limits = objective.Limits(longest_s, max_money, max_devices, allowed)
    choices = objective.known(objective.options(Planner(), spec, limits), names)
    front = objective.pareto(choices, names)
    if plot is not None:
        draw_front(plot, choices, front, names)
    if as_json:
        print_json({"format": FORMAT, "objectives": list(names), "options": front_data(choices, front)})
        return
    console().print(to_rich(front_table(front, len(choices), tell_left_out(len(allowed or spec.cluster.sites)))))


def _objectives(text: str) -> "tuple[Objective, ...]":
    from farpipe.plan.objective import OBJECTIVES

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in OBJECTIVES:
            raise UsageError(
                f"--objectives: there is no {name!r}{nearest(name, OBJECTIVES)}; known: {', '.join(OBJECTIVES)}"
            )
    if len(set(names)) < max(2, len(names)):
        raise UsageError(f"--objectives {text!r}: expected two or more different ones, such as time,money")
    return tuple(name for name in OBJECTIVES if name in names)


def _seconds(text: str) -> float:
    from farpipe.units import SECONDS, parse

    try:
        return parse(text, SECONDS, "20 s")
    except ValueError as error:
        raise UsageError(f"--max-step: {error}") from None


def _sites(text: str, known: list[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise UsageError(f"--sites: there is no site {name!r}{nearest(name, known)}; sites: {', '.join(known)}")
    return names
