"""``farpipe optical simulate|compare``: trainings whose transfers are light paths."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.optical_blocking import AsJson, Guard, Modulation, Network, Shared, SlotGhz
from farpipe.cli.output import console, print_json, progress_bar
from farpipe.errors import UsageError

if TYPE_CHECKING:
    from farpipe.optical.study import Run, Scenario
    from farpipe.optical.training import Training

Job = Annotated[Path, typer.Argument(help="A problem, or a plan or a job (.toml), whose problem is taken.")]
Nodes = Annotated[
    str, typer.Option(help="The node of every rank, in order: 'a,b,c'; or of every site: 'zurich=a,lugano=b'.")
]
Order = Annotated[
    str | None, typer.Option(help="Name of an order, or joint: chosen with the network; default the plan's, or joint.")
]
Slots = Annotated[int, typer.Option(min=1, help="Slots per fibre.")]
K = Annotated[int, typer.Option("--k", min=1, max=1000, help="Candidate paths of the training's messages.")]
By = Annotated[str, typer.Option(help="Their order: km, hops (then km), or efficiency.")]
Load = Annotated[float, typer.Option(min=0, help="Background traffic in Erlang; 0: none.")]
MeanHolding = Annotated[float, typer.Option(help="Mean holding time of the background in seconds.")]
Rates = Annotated[str, typer.Option(help="Least and largest background request in slots, 'LOW-HIGH'.")]
Units = Annotated[int | None, typer.Option(min=1, help="Units of 75 Gbit/s that a message asks for at most.")]
Setup = Annotated[float, typer.Option(min=0, help="Seconds to set up a light path.")]
Ahead = Annotated[bool, typer.Option("--ahead", help="Ask for light paths so long before they are needed.")]
Keep = Annotated[float | None, typer.Option(min=0, help="Keep one light path per hop until idle for so many seconds.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps that count; two more go before them.")]
Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Independent backgrounds.")]

_SKIPPED = 2


def simulate(
    job: Job,
    nodes: Nodes,
    network: Network = "nsfnet",
    policy: Annotated[str, typer.Option(help="ksp-ff, ksp-ff-fewer, cba, cd-cba, widest, earliest, ...")] = "earliest",
    order: Order = None,
    slots: Slots = 80,
    slot_ghz: SlotGhz = 12.5,
    guard: Guard = 1,
    modulation: Modulation = "64qam",
    k: K = 8,
    by: By = "hops",
    shared: Shared = False,
    load: Load = 60.0,
    mean_holding: MeanHolding = 0.2,
    rates: Rates = "4-20",
    units: Units = None,
    setup: Setup = 0.0,
    ahead: Ahead = False,
    keep: Keep = None,
    steps: Steps = 3,
    seeds: Seeds = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a step: the pipeline above, the spectrum below (SVG or PNG).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a training over an optical network: light paths per message, among background traffic."""
    from farpipe.optical.strategies import find_strategy

    scenario = _scenario(
        network, slots, slot_ghz, guard, modulation, k, by, shared, _background(load, mean_holding, rates)
    )
    strategy = find_strategy(policy, units, setup_s=setup, ahead=ahead, keep_s=keep)
    training = _training(job, nodes, order, scenario, strategy)
    runs = _runs(scenario, {policy: strategy}, training, seeds, steps).runs[policy]
    if plot is not None:
        _draw(plot, scenario, training, strategy)
    facts = _facts(scenario, training, policy, runs)
    if as_json:
        print_json(facts)
        return
    typer.echo(f"{policy}, order {facts['order']}: {facts['step_s']:.4g} s per step over {seeds} backgrounds")
    typer.echo(f"bound of this order {facts['bound_s']:.4g} s, without a network {facts['no_network_s']:.4g} s")
    console().print(_table([{"policy": policy, **facts}]))


def compare(
    job: Job,
    nodes: Nodes,
    network: Network = "nsfnet",
    policies: Annotated[
        str, typer.Option(help="Which, the baseline first.")
    ] = "ksp-ff,ksp-ff-fewer,sd-ff,cd,cba,cd-cba,cd-cba-fewer,widest,earliest",
    order: Order = None,
    slots: Slots = 80,
    slot_ghz: SlotGhz = 12.5,
    guard: Guard = 1,
    modulation: Modulation = "64qam",
    k: K = 8,
    by: By = "hops",
    shared: Shared = False,
    load: Load = 60.0,
    mean_holding: MeanHolding = 0.2,
    rates: Rates = "4-20",
    units: Units = None,
    setup: Setup = 0.0,
    ahead: Ahead = False,
    keep: Keep = None,
    steps: Steps = 3,
    seeds: Seeds = 5,
    as_json: AsJson = False,
) -> None:
    """Compare policies for a training's light paths on the same background traffic, order and candidate paths."""
    from farpipe.optical.strategies import find_strategy

    scenario = _scenario(
        network, slots, slot_ghz, guard, modulation, k, by, shared, _background(load, mean_holding, rates)
    )
    names = [name.strip() for name in policies.split(",")]
    strategies = {name: find_strategy(name, units, setup_s=setup, ahead=ahead, keep_s=keep) for name in names}
    training = _training(job, nodes, order, scenario, strategies[names[0]])
    found = _runs(scenario, strategies, training, seeds, steps)
    rows = found.to_data()
    if as_json:
        print_json({"order": training.schedule.method, "seeds": seeds, "policies": rows})
        return
    typer.echo(f"order {training.schedule.method}, {seeds} backgrounds; change against {names[0]}")
    console().print(_table(rows))


def _background(load: float, mean_holding: float, rates: str) -> Any:
    from farpipe.cli.optical_blocking import parse_rates
    from farpipe.optical import PoissonTraffic

    low, high = parse_rates(rates)
    return PoissonTraffic(load, mean_holding, low, high) if load else None


def _scenario(
    network: str,
    slots: int,
    slot_ghz: float,
    guard: int,
    modulation: str,
    k: int,
    by: str,
    shared: bool,
    background: Any,
) -> "Scenario":
    from farpipe.optical import Grid, find_modulation, find_network, k_shortest
    from farpipe.optical.study import Scenario

    net, table = find_network(network, shared=shared), find_modulation(modulation)
    paths = k_shortest(net, k=k, by=by, modulation=table)
    return Scenario(paths, k_shortest(net, k=4), Grid(slots, slot_ghz, guard), background, table)


def _training(job: Path, nodes: str, order: str | None, scenario: "Scenario", strategy: Any) -> "Training":
    from farpipe.cli.shown import load_step
    from farpipe.optical.joint import joint_order, nominal_problem
    from farpipe.optical.training import Training
    from farpipe.schedule.library import order as named

    problem, own, plan = load_step(job)
    places = _places(nodes, problem.num_ranks, plan.sites if plan else ())
    for place in places:
        scenario.paths.network.expect_node(place, "--nodes")
    if order is None and own is not None:
        return Training(problem, own, places)
    nominal = nominal_problem(problem, places, scenario.paths, 6 * strategy.rule.unit_gbit)
    if order not in (None, "joint"):
        return Training(nominal, named(str(order), nominal), places)
    shared = scenario.shared(1_000_000, scenario.begin_s + 600)  # a background that no result is measured on
    return Training(nominal, joint_order(shared, problem, places, strategy, begin_s=scenario.begin_s), places)


def _places(nodes: str, num_ranks: int, sites: Any) -> tuple[str, ...]:
    """The node of every rank."""
    words = [word.strip() for word in nodes.split(",")]
    if all("=" in word for word in words):
        of_site = dict(word.split("=", 1) for word in words)
        missing = [site for site in dict.fromkeys(sites) if site not in of_site]
        if missing or not sites:
            raise UsageError(
                f"--nodes: no node for site {missing[0]!r}"
                if missing
                else "--nodes: a problem has no sites; give a node per rank"
            )
        return tuple(of_site[site] for site in sites)
    if len(words) != num_ranks:
        raise UsageError(f"--nodes: expected a node for each of {num_ranks} ranks, found {len(words)}")
    return tuple(words)


def _runs(scenario: "Scenario", strategies: dict[str, Any], training: "Training", seeds: int, steps: int) -> Any:
    from farpipe.optical.study import compare as compared

    settings = {name: (training, strategy, None) for name, strategy in strategies.items()}
    with progress_bar("simulating", "runs") as told:
        return compared(scenario, settings, range(seeds), num_steps=steps, skipped=_SKIPPED, progress=told)


def _facts(scenario: "Scenario", training: "Training", policy: str, runs: "list[Run]") -> dict[str, Any]:
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


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    shown = {
        "policy": "policy",
        "step_s": "step s",
        "change": "change",
        "refused_ratio": "refused",
        "mean_wait_s": "wait ms",
        "mean_units": "units",
        "held_slots": "slots held",
        "harm": "harm, points",
    }
    table = Table(*[title for key, title in shown.items() if any(key in row for row in rows)])
    for row in rows:
        table.add_row(*[_cell(key, row) for key in shown if any(key in other for other in rows)])
    return table


def _cell(key: str, row: dict[str, Any]) -> str:
    from farpipe.units import format_change, format_percent

    value = row.get(key, "")
    if key == "change" and row.get("change_interval"):
        half = (row["change_interval"][1] - row["change_interval"][0]) / 2
        return f"{format_change(value)} ± {format_percent(half)}"
    scales = {"refused_ratio": (100, "{:.2f} %"), "mean_wait_s": (1000, "{:.2f}"), "harm": (100, "{:+.2f}")}
    if isinstance(value, float):
        scale, form = scales.get(key, (1, "{:.4g}"))
        return form.format(value * scale)
    return str(value)


def _draw(path: Path, scenario: "Scenario", training: "Training", strategy: Any) -> None:
    from farpipe.optical.joint import play_steps
    from farpipe.report.light import draw_light

    shared = scenario.shared(0, scenario.begin_s + 600)
    played = play_steps(
        shared, training, strategy, num_steps=1, begin_s=scenario.begin_s, skipped=_SKIPPED, num_logged=1_000_000
    )
    draw_light(path, played.steps[0], shared.table, played.log, shared.grid.num_slots)
