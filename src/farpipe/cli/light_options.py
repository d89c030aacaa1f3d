"""The options that commands about trainings over light paths share, and what they stand for."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farpipe.cli.optical_blocking import Guard, Modulation, Network, PathsFile, SlotGhz, Slots, net_called
from farpipe.cli.options import Given, refuse, settings, typed
from farpipe.cli.output import log, status
from farpipe.core.errors import InputError, UsageError
from farpipe.core.strict import nearest
from farpipe.core.units import counted, format_seconds

if TYPE_CHECKING:
    from farpipe.cli.light_settings import LightSettings
    from farpipe.core.step import Problem, Schedule
    from farpipe.optical import PoissonTraffic
    from farpipe.optical.demands import TransferPolicy
    from farpipe.optical.modulation import Modulation as ModulationTable
    from farpipe.optical.network import Network as OpticalNetwork
    from farpipe.optical.paths import PathTable
    from farpipe.optical.study import LightScenario
    from farpipe.optical.traffic import Traffic
    from farpipe.optical.transfers import LightTraining
    from farpipe.planning import Plan

    Loaded = tuple[Problem, Schedule | None, Plan | None]

Nodes = Annotated[
    str | None,
    typer.Option(help="The node of every rank, in order: 'a,b,c'; or of every site: 'zurich=a,lugano=b'."),
]
Placements = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Instead of the nodes' names: so many random placements; ranks with one name in --nodes share a node.",
    ),
]
Order = Annotated[
    str | None, typer.Option(help="Name of an order, or joint: chosen with the network; default the plan's, or joint.")
]
Load = Annotated[float, typer.Option(min=0, help="Background traffic in Erlang; 0: none.")]
Trace = Annotated[Path | None, typer.Option(help="Background instead: CSV request,arrival_s,src,dst,gbit_s,holding_s.")]
Keep = Annotated[float | None, typer.Option(min=0, help="Keep one light path per hop until idle for so many seconds.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps that count.")]


@dataclass(frozen=True)
class LightOptions:
    """A training's places and order, the network with its background, and how light paths are asked for."""

    nodes: Nodes = None
    placements: Placements = None
    network: Network = "nsfnet"
    order: Order = None
    slots: Slots = 80
    slot_ghz: SlotGhz = 12.5
    guard: Guard = 1
    modulation: Modulation = "gnpy"
    paths: PathsFile = None
    load: Load = 60.0
    trace: Trace = None
    keep: Keep = None
    steps: Steps = 3
    given: Given = None

    def __post_init__(self) -> None:
        if self.paths is not None and (self.settings.k or self.settings.by):
            raise UsageError("--set k and by are for paths that farpipe finds; --paths gives them")

    @property
    def inputs(self) -> tuple[Path | None, ...]:
        """Files that the options may name."""
        named = (self.network, self.modulation, self.settings.trace_modulation)
        return (self.paths, self.trace, *(Path(name) for name in named if name))

    @cached_property
    def settings(self) -> "LightSettings":
        """The settings that `--set` names."""
        from farpipe.cli.light_settings import LightSettings

        return settings(LightSettings, self.given)

    @cached_property
    def net(self) -> "OpticalNetwork":
        """The network."""
        return net_called(self.network, shared=not self.settings.directed)

    @cached_property
    def modulations(self) -> "ModulationTable":
        """Modulation of the messages."""
        from farpipe.optical import find_modulation

        return find_modulation(self.modulation)

    @property
    def setting_text(self) -> str:
        """Sentence about the network and what else is on it."""
        rates, holding_s = self.settings.rates, self.settings.mean_holding
        random = f"Poisson requests of {rates} slots, {self.load:g} Erlang, held {format_seconds(holding_s)}"
        others = f"requests of {self.trace.name}" if self.trace else random if self.load else "no other traffic"
        kind = "a spectrum per direction" if self.settings.directed else "one spectrum for both directions"
        grid = f"{self.slots} slots of {self.slot_ghz:g} GHz, guard {self.guard}, {kind}"
        return f"network {self.net.name}, {grid}, modulation {self.modulations.name}; beside it {others}"

    def expect_one_source(self, context: typer.Context) -> None:
        """UsageError for options of random draws beside a trace, or beside placements, of which each has one."""
        if self.trace is not None:
            random = [f"--set {name}" for name in ("mean_holding", "rates") if name in self.settings.model_fields_set]
            refuse(typed(context, seeds="--seeds", load="--load") + random, "is for random traffic, not for a trace")
        elif self.settings.trace_modulation is not None:
            refuse(["--set trace_modulation"], "is of the requests of --trace: give that too")
        if self.placements is not None:
            refuse(typed(context, seeds="--seeds"), "is for one placement: of several each has a background of its own")

    def num_draws(self, seeds: int) -> int:
        """Placements, with a background each, or backgrounds of the one placement."""
        return self.placements or (1 if self.trace is not None else seeds)

    def node_choices(self, loaded: "Loaded") -> list[tuple[str, ...]]:
        """The node of every rank: given, or in so many random placements."""
        problem, _, plan = loaded
        sites = plan.sites if plan else ()
        if self.placements is None:
            nodes = _nodes_of_ranks(self.nodes, problem.num_ranks, sites)
            return [tuple(self.net.expect_node(node, "--nodes") for node in nodes)]
        from farpipe.optical.study import random_nodes

        labels = self.nodes.split(",") if self.nodes else sites or tuple(map(str, range(problem.num_ranks)))
        if len(labels) != problem.num_ranks:
            raise UsageError(f"--nodes: expected a name for each of {problem.num_ranks} ranks, found {len(labels)}")
        return [random_nodes(self.net, labels, self.modulations, draw) for draw in range(self.placements)]

    def candidates(self, policy: str, nodes: "Sequence[str]") -> "PathTable":
        """Candidate paths of a policy between the nodes of a training."""
        from farpipe.optical import k_shortest, load_paths
        from farpipe.optical.demands import CANDIDATES

        if self.paths is not None:
            return load_paths(self.paths, self.net)
        pairs = dict.fromkeys((a, b) for a in nodes for b in nodes if a != b)
        k, by = CANDIDATES[policy]
        return k_shortest(
            self.net, pairs or None, k=self.settings.k or k, by=self.settings.by or by, modulation=self.modulations
        )

    @cached_property
    def _background(self) -> "tuple[PoissonTraffic | Traffic, PathTable] | None":
        """The background and its candidates; None: nothing but the training."""
        from farpipe.optical import PoissonTraffic, k_shortest, load_paths, load_trace

        traffic = load_trace(self.trace, self.net) if self.trace else None
        if traffic and (self.settings.begin or 0.0) >= (last_s := float(traffic.arrival_s[-1])):
            raise InputError(
                f"--set begin={self.settings.begin:g}: the last request of {self.trace} comes after {last_s:g} s; "
                "begin earlier"
            )
        if not traffic and not self.load:
            return None
        pairs = traffic.pairs if traffic else None
        paths = load_paths(self.paths, self.net) if self.paths else k_shortest(self.net, pairs, k=4)
        if traffic:
            return traffic, paths
        paths.expect_all_pairs(str(self.paths))
        low, high = self.settings.low_and_high
        if high + self.guard > self.slots:
            raise UsageError(
                f"--set rates={self.settings.rates}: the largest background request takes {high + self.guard} slots "
                f"with its guard band, and a fibre has {self.slots} (--slots); lower the rates or give more slots"
            )
        return PoissonTraffic(self.load, self.settings.mean_holding, low, high), paths

    def scenario(self, candidates: "PathTable") -> "LightScenario":
        """The network, candidate paths and background."""
        from farpipe.optical import Grid, find_modulation
        from farpipe.optical.study import LightScenario

        grid = Grid(self.slots, self.slot_ghz, self.guard)
        of_trace = find_modulation(self.settings.trace_modulation or self.modulation) if self.trace else None
        traffic, paths = self._background or (None, candidates)
        return LightScenario(candidates, paths, grid, traffic, self.modulations, of_trace, self.settings.begin)

    def policy(self, name: str) -> "TransferPolicy":
        """The policy called `name` with what the options say of units, set-up, release and keeping."""
        from farpipe.optical.demands import find_transfer_policy

        return find_transfer_policy(
            name,
            self.settings.units,
            setup_s=self.settings.setup,
            release_s=self.settings.release,
            ahead=self.settings.ahead,
            keep_s=self.keep,
            one_at_a_time=self.settings.one_per_hop,
            retry_s=self.settings.retry,
        )

    def training(
        self, loaded: "Loaded", nodes: tuple[str, ...], scenario: "LightScenario", policy: "TransferPolicy"
    ) -> "LightTraining":
        """The step at its nodes, in the order that was asked for, the plan's own, or the joint one."""
        from farpipe.core.schedule.library import order as named
        from farpipe.optical.joint_order import joint_order
        from farpipe.optical.transfers import UNIT_GBIT, LightTraining, nominal_problem

        problem, own, _ = loaded
        if self.order is None and own is not None:
            return LightTraining(problem, own, nodes)
        nominal = nominal_problem(problem, nodes, scenario.paths, 6 * UNIT_GBIT)
        if self.order not in (None, "joint"):
            return LightTraining(nominal, named(str(self.order), nominal), nodes)
        shared = scenario.shared(1_000_000, scenario.begin_s + 600)  # a background that no result is measured on
        with status("choosing an order"):
            chosen = joint_order(shared, problem, nodes, policy, begin_s=scenario.begin_s)
        return LightTraining(nominal, chosen, nodes)


def without_collectives(loaded: "Loaded") -> "Loaded":
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


def _nodes_of_ranks(nodes: str | None, num_ranks: int, sites: "Sequence[str]") -> tuple[str, ...]:
    """The node of every rank."""
    if nodes is None:
        raise UsageError("give the node of every rank as --nodes, or --placements for random ones")
    words = [word.strip() for word in nodes.split(",")]
    if all("=" in word for word in words):
        of_site = dict(word.split("=", 1) for word in words)
        missing = [site for site in dict.fromkeys(sites) if site not in of_site]
        if sites and (unknown := [site for site in of_site if site not in sites]):
            raise UsageError(f"--nodes: there is no site {unknown[0]!r}{nearest(unknown[0], sites)}")
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
