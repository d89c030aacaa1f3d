"""``farpipe optical blocking|simulate|compare``: light paths, and trainings whose transfers they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.optical_blocking import Network, blocking, net_called
from farpipe.cli.options import AsJson, Csv, Given, Plot, refuse, settings, typed, with_groups
from farpipe.cli.output import check_folder, check_picture, console, log, print_json, progress_bar
from farpipe.core.errors import UsageError
from farpipe.core.strict import write_text
from farpipe.core.units import counted, format_change, format_percent, format_seconds
from farpipe.report.tables import TableView, csv_text, to_rich

if TYPE_CHECKING:
    from farpipe.optical.demands import TransferPolicy
    from farpipe.optical.light_setting import Case, LightSetting, Loaded
    from farpipe.optical.settings import LightSettings
    from farpipe.optical.study import PolicyComparison, Run
    from farpipe.report.light import LightText

optical = typer.Typer(help="Light paths: blocking of dynamic traffic, trainings over an optical network.")
optical.command("blocking")(blocking)


@optical.callback()
def common() -> None:
    """Light paths: blocking of dynamic traffic, trainings over an optical network."""


StepFile = Annotated[Path, typer.Argument(help="A problem, or a plan or a job (.toml), whose problem is taken.")]

COMPARED_SEEDS = 5
"""Backgrounds on which policies are compared by default."""
COMPARED = "ksp-ff,ksp-ff-fewer,cd-cba,earliest,widen"
"""Names of transfer policies (`optical.demands`)."""
_EXPENDABLE = ("background_accepted", "held_slots", "mean_units", "mean_wait_s")
"""Columns that a narrow terminal leaves out, in this order."""


@dataclass(frozen=True)
class LightOptions:
    """A training's places and order, the network with its background, and how light paths are asked for."""

    nodes: Annotated[
        str | None,
        typer.Option(help="The node of every rank, in order: 'a,b,c'; or of every site: 'zurich=a,lugano=b'."),
    ] = None
    network: Network = "nsfnet"
    method: Annotated[
        str | None,
        typer.Option(help="A named schedule, or joint: chosen with the network; default: the plan's, or joint."),
    ] = None
    load: Annotated[float, typer.Option(min=0, max=5e7, help="Background traffic in Erlang; 0: none.")] = 60.0
    trace: Annotated[
        Path | None, typer.Option(help="Background instead: CSV request,arrival_s,src,dst,gbit_s,holding_s.")
    ] = None
    given: Given = None

    @property
    def inputs(self) -> tuple[Path | None, ...]:
        """Files that the options may name."""
        named = (self.network, self.settings.modulation, self.settings.trace_modulation)
        return (self.settings.paths, self.trace, *(Path(name) for name in named if name))

    @cached_property
    def settings(self) -> "LightSettings":
        """The settings that `--set` names."""
        from farpipe.optical.settings import LightSettings

        return settings(LightSettings, self.given)

    def setting(self, seeds: int) -> "LightSetting":
        """The same for `farpipe.optical`, with `seeds` backgrounds unless `--set` names a number."""
        from farpipe.optical.light_setting import LightSetting

        return LightSetting(
            nodes=self.nodes,
            network=net_called(self.network, shared=not self.settings.directed),
            order=self.method,
            load=self.load,
            trace=self.trace,
            **({"seeds": seeds} | self.settings.model_dump(exclude_unset=True)),
        )

    def expect_one_source(self, context: typer.Context) -> None:
        """UsageError for settings that another one makes useless: paths, a trace, or several placements."""
        given = self.settings.model_fields_set
        if self.settings.paths is not None:
            refuse(_set(given, "k", "by"), "is for paths that farpipe finds; leave out --set paths")
        if self.trace is not None:
            random = typed(context, load="--load") + _set(given, "seeds", "mean_holding", "rates")
            refuse(random, "is for random traffic, not for a trace")
        else:
            refuse(_set(given, "trace_modulation"), "needs --trace")
        if self.settings.placements is not None:
            refuse(_set(given, "seeds"), "is for one placement: several have a background each")


def _set(given: set[str], *names: str) -> list[str]:
    return [f"--set {name}" for name in names if name in given]


@dataclass(frozen=True)
class LightOutputs:
    """Files about a simulated training."""

    plot: Plot = None
    html: Annotated[Path | None, typer.Option(help="Write a page with this picture and the step's timeline.")] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the light paths of the first background's steps, for `farpipe train --light-paths`.",
        ),
    ] = None
    events: Annotated[
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
    outputs: LightOutputs,
    as_json: AsJson = False,
) -> None:
    """Simulate a training over an optical network: light paths per message, among background traffic."""
    from farpipe.optical.transfers import light_paths
    from farpipe.report.light import LightText

    check_picture(outputs.plot)
    window_s = _window_s(options.settings.window)
    files = (outputs.plot, outputs.html, outputs.output, outputs.events)
    check_folder(*files, keeping=(job, *options.inputs))
    options.expect_one_source(context)
    setting = options.setting(seeds=1)
    cases, runs = _run(job, setting, [policy])
    facts = _facts(cases, policy, runs.runs[policy], options.settings.units)
    lines = (
        f"{policy}, order {facts['order']}: {facts['step_s']:.4g} s per step over {_draws(setting)}",
        f"bound of this order {facts['bound_s']:.4g} s, without a network {facts['no_network_s']:.4g} s",
    )
    table = _table([{"policy": policy, **facts}])
    about = LightText(f"{policy} over {setting.net.name}", "\n".join((*lines, setting.setting_text)), table)
    _draw(outputs, window_s, cases[0], setting.policy(policy), about)
    if outputs.output is not None:
        light_paths(runs.runs[policy][0].played.steps).save(outputs.output)
    if as_json:
        print_json(facts)
        return
    typer.echo("\n".join((*lines, setting.setting_text)))
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
    csv: Csv = None,
    as_json: AsJson = False,
) -> None:
    """Compare policies for a training's light paths on the same background traffic and order."""
    check_folder(csv, keeping=(job, *options.inputs))
    options.expect_one_source(context)
    refuse(_set(options.settings.model_fields_set, "window"), "is for the picture of `optical simulate`")
    setting = options.setting(COMPARED_SEEDS)
    cases, found = _run(job, setting, [name.strip() for name in policy.split(",")])
    rows, order = found.to_data(), cases[0][1].schedule.method
    if csv is not None:
        write_text(csv, csv_text(rows))
    if as_json:
        draws = {"placements" if setting.placements else "seeds": setting.num_draws}
        print_json({"order": order, **draws, "policies": rows})
        return
    typer.echo(f"order {order}, {_draws(setting)}; change against {found.baseline}")
    console().print(to_rich(_table(rows)))


def _draws(setting: "LightSetting") -> str:
    return counted(setting.num_draws, "placement" if setting.placements else "background")


def _run(job: Path, setting: "LightSetting", names: list[str]) -> "tuple[list[Case], PolicyComparison]":
    from farpipe.cli.planned import load_step

    step = _without_collectives(load_step(job))
    with progress_bar("simulating", "run") as progress:
        return setting.compare(step, names, progress)


def _without_collectives(loaded: "Loaded") -> "Loaded":
    """The same step with its messages alone; a line on stderr says what is left out."""
    from farpipe.core.simulate import simulate
    from farpipe.optical.transfers import messages_alone

    problem, schedule, plan = loaded
    if not problem.collectives:
        return loaded
    alone = messages_alone(problem)
    left_out = f"left out: {counted(len(problem.collectives), 'collective')} inside sites, which no light path carries"
    if schedule is not None:
        whole_s, alone_s = (simulate(one, schedule).makespan_s for one in (problem, alone))
        left_out += f"; in the plan they take {format_seconds(whole_s - alone_s)} of {format_seconds(whole_s)}"
    log(left_out)
    return alone, schedule, plan


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
        "harm": "extra blocking, points",
        "background_accepted": "background accepted",
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
    if outputs.plot is None and outputs.html is None and outputs.events is None:
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
    if outputs.events is not None:
        write_text(outputs.events, "\n".join(light_rows(*drawn)) + "\n")


def _window_s(text: str) -> tuple[float, float]:
    """Begin and end of the part of a step that is drawn."""
    low, _, high = text.partition("-")
    try:
        window = float(low), float(high)
    except ValueError:
        window = (0.0, 0.0)
    if not 0 <= window[0] < window[1]:
        raise UsageError(
            f"--set window: expected two times in seconds such as 0.5-1.2, the earlier first, found {text!r}"
        )
    return window
