"""``farpipe optical blocking|simulate|compare``: light paths, and trainings whose transfers they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.light_options import LightOptions, without_collectives
from farpipe.cli.optical_blocking import Seeds, blocking
from farpipe.cli.options import AsJson, Plot, with_groups
from farpipe.cli.output import check_folder, check_picture, console, print_json, progress_bar
from farpipe.core.errors import UsageError
from farpipe.core.strict import write_text
from farpipe.core.units import counted, format_change, format_percent
from farpipe.report.tables import TableView, to_rich

if TYPE_CHECKING:
    from farpipe.optical.demands import TransferPolicy
    from farpipe.optical.light_setting import Case
    from farpipe.optical.study import PolicyComparison, Run
    from farpipe.report.light import LightText

optical = typer.Typer(help="Light paths: blocking of dynamic traffic, trainings over an optical network.")
optical.command("blocking")(blocking)


@optical.callback()
def common() -> None:
    """Light paths: blocking of dynamic traffic, trainings over an optical network."""


StepFile = Annotated[Path, typer.Argument(help="A problem, or a plan or a job (.toml), whose problem is taken.")]

COMPARED = "ksp-ff,ksp-ff-fewer,cd-cba,earliest,widen"
"""Names of transfer policies (`optical.demands`)."""
_EXPENDABLE = ("background_accepted", "held_slots", "mean_units", "mean_wait_s")
"""Columns that a narrow terminal leaves out, in this order."""


@dataclass(frozen=True)
class LightOutputs:
    """Files about a simulated training."""

    plot: Plot = None
    html: Annotated[Path | None, typer.Option(help="Write a page with this picture and the step's timeline.")] = None
    window: Annotated[str, typer.Option(help="Seconds of the step that the picture shows.")] = "0-1.5"
    light_paths: Annotated[
        Path | None, typer.Option(help="Write the light paths of the first background's steps, for `farpipe train`.")
    ] = None
    log: Annotated[
        Path | None, typer.Option(help="Write every light path of one step, the background's too, as CSV.")
    ] = None


@optical.command()
@with_groups
def simulate(
    context: typer.Context,
    job: StepFile,
    options: LightOptions,
    *,
    policy: Annotated[str, typer.Option(help=COMPARED.replace(",", ", ") + ".")] = "widen",
    seeds: Seeds = 1,
    outputs: LightOutputs,
    as_json: AsJson = False,
) -> None:
    """Simulate a training over an optical network: light paths per message, among background traffic."""
    from farpipe.optical.transfers import light_paths
    from farpipe.report.light import LightText

    check_picture(outputs.plot)
    window_s = _window_s(outputs.window)
    files = (outputs.plot, outputs.html, outputs.light_paths, outputs.log)
    check_folder(*files, keeping=(job, *options.inputs))
    options.expect_one_source(context)
    cases, runs = _run(job, options, [policy], seeds)
    facts = _facts(cases, policy, runs.runs[policy], options.settings.units)
    lines = (
        f"{policy}, order {facts['order']}: {facts['step_s']:.4g} s per step over {_draws(options, seeds)}",
        f"bound of this order {facts['bound_s']:.4g} s, without a network {facts['no_network_s']:.4g} s",
    )
    table = _table([{"policy": policy, **facts}])
    about = LightText(
        f"{policy} over {options.setting.net.name}", "\n".join((*lines, options.setting.setting_text)), table
    )
    _draw(outputs, window_s, cases[0], options.setting.policy(policy), about)
    if outputs.light_paths is not None:
        light_paths(runs.runs[policy][0].played.steps).save(outputs.light_paths)
    if as_json:
        print_json(facts)
        return
    typer.echo("\n".join((*lines, options.setting.setting_text)))
    console().print(to_rich(table))


@optical.command()
@with_groups
def compare(
    context: typer.Context,
    job: StepFile,
    options: LightOptions,
    policy: Annotated[
        str, typer.Option(metavar="NAMES", help="Policies with commas between them, the baseline first.")
    ] = COMPARED,
    seeds: Seeds = 5,
    as_json: AsJson = False,
) -> None:
    """Compare policies for a training's light paths on the same background traffic and order."""
    options.expect_one_source(context)
    cases, found = _run(job, options, [name.strip() for name in policy.split(",")], seeds)
    rows, order = found.to_data(), cases[0][1].schedule.method
    if as_json:
        draws = {"placements" if options.placements else "seeds": options.setting.num_draws(seeds)}
        print_json({"order": order, **draws, "policies": rows})
        return
    typer.echo(f"order {order}, {_draws(options, seeds)}; change against {found.baseline}")
    console().print(to_rich(_table(rows)))


def _draws(options: LightOptions, seeds: int) -> str:
    return counted(options.setting.num_draws(seeds), "placement" if options.placements else "background")


def _run(job: Path, options: LightOptions, names: list[str], seeds: int) -> "tuple[list[Case], PolicyComparison]":
    from farpipe.cli.planned import load_step

    step = without_collectives(load_step(job))
    with progress_bar("simulating", "runs") as progress:
        return options.setting.compare(step, names, seeds, progress)


def _facts(cases: "list[Case]", policy: str, runs: "Sequence[Run]", units: int | None) -> dict[str, Any]:
    from farpipe.optical.study import BOUND_UNITS, bound_s, no_network_s

    figures = [run.figures() for run in runs]
    means = {key: sum(one[key] for one in figures) / len(figures) for key in figures[0]}
    return {
        "policy": policy,
        "order": cases[0][1].schedule.method,
        "bound_s": sum(bound_s(*case, units=max(BOUND_UNITS, units or 0)) for case in cases) / len(cases),
        "no_network_s": no_network_s(cases[0][1]),
        **means,
        "steps": [[step.makespan_s for step in run.played.steps] for run in runs],
    }


def _table(rows: list[dict[str, Any]]) -> TableView:
    shown = {
        "policy": "policy",
        "step_s": "step s",
        "change": "change",
        "refused_ratio": "refused",
        "waited_ratio": "waited",
        "mean_wait_s": "wait ms",
        "mean_units": "units",
        "held_slots": "slots held",
        "harm": "harm, points",
        "background_accepted": "others accepted",
    }
    if not any(row.get("background_requests") for row in rows):
        del shown["background_accepted"]
    there = [key for key in shown if any(key in row for row in rows)]
    cells = tuple(tuple(_cell(key, row) for key in there) for row in rows)
    numbers, last = frozenset(range(1, len(there))), tuple(there.index(key) for key in _EXPENDABLE if key in there)
    return TableView("Policies", tuple(shown[key] for key in there), cells, numbers, expendable=last)


def _cell(key: str, row: dict[str, Any]) -> str:
    value = row.get(key, "")
    if key == "change" and row.get("change_interval"):
        half = (row["change_interval"][1] - row["change_interval"][0]) / 2
        return f"{format_change(value)} ± {format_percent(half)}"
    if key == "background_accepted":
        return f"{value:,.0f} of {row['background_requests']:,.0f}"
    scales = {
        "refused_ratio": (100, "{:.2f} %"),
        "waited_ratio": (100, "{:.2f} %"),
        "mean_wait_s": (1000, "{:.2f}"),
        "harm": (100, "{:+.2f}"),
    }
    if isinstance(value, float):
        scale, form = scales.get(key, (1, "{:.4g}"))
        return form.format(value * scale)
    return str(value)


def _draw(
    outputs: LightOutputs, window_s: tuple[float, float], case: "Case", policy: "TransferPolicy", about: "LightText"
) -> None:
    """Draw and list the light paths of one step."""
    if outputs.plot is None and outputs.html is None and outputs.log is None:
        return
    scenario, training = case
    from farpipe.optical.shared_network import play_steps
    from farpipe.report.light import draw_light, light_rows, write_light_page

    shared = scenario.shared(0, scenario.begin_s + 600)
    played = play_steps(
        shared, training, policy, num_steps=1, begin_s=scenario.begin_s, skipped=2, num_logged=1_000_000
    )
    drawn = (played.steps[0], shared.table, played.log)
    if outputs.plot is not None:
        draw_light(outputs.plot, *drawn, shared.grid.num_slots, window_s)
    if outputs.html is not None:
        write_light_page(outputs.html, *drawn, shared.grid.num_slots, window_s, about=about)
    if outputs.log is not None:
        write_text(outputs.log, "\n".join(light_rows(*drawn)) + "\n")


def _window_s(text: str) -> tuple[float, float]:
    """Begin and end of the part of a step that is drawn."""
    low, _, high = text.partition("-")
    try:
        window = float(low), float(high)
    except ValueError:
        window = (0.0, 0.0)
    if not 0 <= window[0] < window[1]:
        raise UsageError(f"--window: expected two times in seconds such as 0.5-1.2, the earlier first, found {text!r}")
    return window
