"""The options that commands about trainings over light paths share, and what they stand for."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farpipe.cli.optical_blocking import Guard, Modulation, Network, Shared, SlotGhz, parse_rates
from farpipe.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farpipe.optical import PoissonTraffic
    from farpipe.optical.strategies import Strategy
    from farpipe.optical.study import Scenario
    from farpipe.optical.training import Training

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


@dataclass(frozen=True)
class LightOptions:
    """A training's places and order, the network with its background, and how light paths are asked for."""

    nodes: Nodes
    network: Network = "nsfnet"
    order: Order = None
    slots: Slots = 80
    slot_ghz: SlotGhz = 12.5
    guard: Guard = 1
    modulation: Modulation = "64qam"
    k: K = 64
    by: By = "efficiency"
    shared: Shared = False
    load: Load = 60.0
    mean_holding: MeanHolding = 0.2
    rates: Rates = "4-20"
    units: Units = None
    setup: Setup = 0.0
    ahead: Ahead = False
    keep: Keep = None
    steps: Steps = 3

    def scenario(self) -> "Scenario":
        """The network, its candidate paths and its background."""
        from farpipe.optical import Grid, find_modulation, find_network, k_shortest
        from farpipe.optical.study import Scenario

        net, table = find_network(self.network, shared=self.shared), find_modulation(self.modulation)
        at = [node for word in self.nodes.split(",") if (node := word.rpartition("=")[2].strip()) in net.nodes]
        pairs = tuple(dict.fromkeys((a, b) for a in at for b in at if a != b))
        paths = k_shortest(net, pairs or None, k=self.k, by=self.by, modulation=table)
        grid = Grid(self.slots, self.slot_ghz, self.guard)
        return Scenario(paths, k_shortest(net, k=4), grid, self._background(), table)

    def _background(self) -> "PoissonTraffic | None":
        from farpipe.optical import PoissonTraffic

        low, high = parse_rates(self.rates)
        return PoissonTraffic(self.load, self.mean_holding, low, high) if self.load else None

    def strategy(self, name: str) -> "Strategy":
        """The strategy called `name` with what the options say of units, set-up and keeping."""
        from farpipe.optical.strategies import find_strategy

        return find_strategy(name, self.units, setup_s=self.setup, ahead=self.ahead, keep_s=self.keep)

    def training(self, job: Path, scenario: "Scenario", strategy: "Strategy") -> "Training":
        """The step of `job` at its nodes, in the order that was asked for, the plan's own, or the joint one."""
        from farpipe.cli.shown import load_step
        from farpipe.optical.joint import joint_order, nominal_problem
        from farpipe.optical.training import UNIT_GBIT, Training
        from farpipe.schedule.library import order as named

        problem, own, plan = load_step(job)
        places = _places(self.nodes, problem.num_ranks, plan.sites if plan else ())
        for place in places:
            scenario.paths.network.expect_node(place, "--nodes")
        if self.order is None and own is not None:
            return Training(problem, own, places)
        nominal = nominal_problem(problem, places, scenario.paths, 6 * UNIT_GBIT)
        if self.order not in (None, "joint"):
            return Training(nominal, named(str(self.order), nominal), places)
        shared = scenario.shared(1_000_000, scenario.begin_s + 600)  # a background that no result is measured on
        return Training(nominal, joint_order(shared, problem, places, strategy, begin_s=scenario.begin_s), places)


def _places(nodes: str, num_ranks: int, sites: "Sequence[str]") -> tuple[str, ...]:
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
