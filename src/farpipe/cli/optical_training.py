"""``farpipe optical simulate|compare``: trainings whose transfers are light paths."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.light_options import LightOptions
from farpipe.cli.optical_blocking import AsJson
from farpipe.cli.options import with_groups
from farpipe.cli.output import check_folder, check_picture, console, print_json, progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farpipe.optical.strategies import Strategy
    from farpipe.optical.study import Comparison, Run, Scenario
    from farpipe.optical.training import Training
    from farpipe.report import FittedTable

Job = Annotated[Path, typer.Argument(help="A problem, or a plan or a job (.toml), whose problem is taken.")]
Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Independent backgrounds.")]

_SKIPPED = 2


@with_groups
def simulate(
    job: Job,
    options: LightOptions,
    policy: Annotated[
        str, typer.Option(help="ksp-ff, ksp-ff-fewer, cba, cd-cba, widest, spread, known-ends, ...")
    ] = "known-ends",
    seeds: Seeds = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a step: the pipeline above, the spectrum below (SVG or PNG).")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with this picture and the step's timeline.")] = None,
    light_paths: Annotated[
        Path | None, typer.Option(help="Write the light paths of the first background's steps, for `farpipe train`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a training over an optical network: light paths per message, among background traffic."""
    from farpipe.units import counted

    check_picture(plot)
    check_folder(plot, report, light_paths, keeping=(job,))
    scenario, strategy = options.scenario(), options.strategy(policy)
    training = options.training(job, scenario, strategy)
    runs = _runs(scenario, {policy: strategy}, training, seeds, options.steps).runs[policy]
    facts = _facts(scenario, training, policy, runs)
    _draw(plot, report, scenario, training, strategy, facts)
    if light_paths is not None:
        _write_light_paths(light_paths, runs[0])
    if as_json:
        print_json(facts)
        return
    typer.echo(
        f"{policy}, order {facts['order']}: {facts['step_s']:.4g} s per step over {counted(seeds, 'background')}"
    )
    typer.echo(f"bound of this order {facts['bound_s']:.4g} s, without a network {facts['no_network_s']:.4g} s")
    console().print(_table([{"policy": policy, **facts}]))


@with_groups
def compare(
    job: Job,
    options: LightOptions,
    policies: Annotated[
        str, typer.Option(help="Policies to compare, the baseline first.")
    ] = "ksp-ff,ksp-ff-fewer,sd-ff,cd,cba,cd-cba,cd-cba-fewer,widest,earliest,spread,known-ends",
    seeds: Seeds = 5,
    as_json: AsJson = False,
) -> None:
    """Compare policies for a training's light paths on the same background traffic, order and candidate paths."""
    from farpipe.units import counted

    scenario, names = options.scenario(), [name.strip() for name in policies.split(",")]
    strategies = {name: options.strategy(name) for name in names}
    training = options.training(job, scenario, strategies[names[0]])
    rows = _runs(scenario, strategies, training, seeds, options.steps).to_data()
    if as_json:
        print_json({"order": training.schedule.method, "seeds": seeds, "policies": rows})
        return
    typer.echo(f"order {training.schedule.method}, {counted(seeds, 'background')}; change against {names[0]}")
    console().print(_table(rows))


_EXPENDABLE = ("held_slots", "mean_units", "waited_ratio", "mean_wait_s")
"""Columns that a narrow terminal leaves out, in this order."""


def _runs(
    scenario: "Scenario", strategies: "dict[str, Strategy]", training: "Training", seeds: int, steps: int
) -> "Comparison":
    from farpipe.optical.study import compare as compared

    settings = {name: (training, strategy, None) for name, strategy in strategies.items()}
    with progress_bar("simulating", "runs") as told:
        return compared(scenario, settings, range(seeds), num_steps=steps, skipped=_SKIPPED, progress=told)


def _facts(scenario: "Scenario", training: "Training", policy: str, runs: "Sequence[Run]") -> dict[str, Any]:
    from farpipe.optical.study import bound_s, no_network_s

    figures = [run.figures() for run in runs]
    means = {key: sum(one[key] for one in figures) / len(figures) for key in figures[0]}
    return {
        "policy": policy,
        "order": training.schedule.method,
        "bound_s": bound_s(scenario, training),
        "no_network_s": no_network_s(training),
        **means,
        "steps": [[step.makespan_s for step in run.played.steps] for run in runs],
    }


def _write_light_paths(path: Path, run: "Run") -> None:
    from farpipe.optical.lit_problem import light_paths

    light_paths(run.played.steps).save(path)


def _table(rows: list[dict[str, Any]]) -> "FittedTable":
    from farpipe.report import TableView, to_rich

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
    }
    there = [key for key in shown if any(key in row for row in rows)]
    cells = tuple(tuple(_cell(key, row) for key in there) for row in rows)
    numbers, last = frozenset(range(1, len(there))), tuple(there.index(key) for key in _EXPENDABLE if key in there)
    return to_rich(TableView("Policies", tuple(shown[key] for key in there), cells, numbers, expendable=last))


def _cell(key: str, row: dict[str, Any]) -> str:
    from farpipe.units import format_change, format_percent

    value = row.get(key, "")
    if key == "change" and row.get("change_interval"):
        half = (row["change_interval"][1] - row["change_interval"][0]) / 2
        return f"{format_change(value)} ± {format_percent(half)}"
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
    plot: Path | None,
    page: Path | None,
    scenario: "Scenario",
    training: "Training",
    strategy: "Strategy",
    facts: dict[str, Any],
) -> None:
    if plot is None and page is None:
        return
    from farpipe.optical.joint import play_steps
    from farpipe.report.light import draw_light, write_light_page

    shared = scenario.shared(0, scenario.begin_s + 600)
    played = play_steps(
        shared, training, strategy, num_steps=1, begin_s=scenario.begin_s, skipped=_SKIPPED, num_logged=1_000_000
    )
    drawn = (played.steps[0], shared.table, played.log, shared.grid.num_slots)
    if plot is not None:
        draw_light(plot, *drawn)
    if page is not None:
        write_light_page(page, *drawn, title=f"{facts['policy']} over {scenario.paths.network.name}")
