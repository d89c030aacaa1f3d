"""A training over an optical network, from the names of its parts: its places, the network, what else is on it."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field

from farpipe.core.arguments import Checked, expect_kind
from farpipe.core.errors import InputError, UsageError
from farpipe.core.schedule.library import order as named
from farpipe.core.step import Problem, Schedule
from farpipe.core.strict import nearest
from farpipe.core.units import format_seconds
from farpipe.optical.demands import CANDIDATES, TransferPolicy, find_transfer_policy
from farpipe.optical.joint_order import joint_order
from farpipe.optical.modulation import Modulation, find_modulation
from farpipe.optical.network import Network
from farpipe.optical.network_files import find_network
from farpipe.optical.paths import PathTable, k_shortest, load_paths
from farpipe.optical.settings import LightSettings, NetworkOrName
from farpipe.optical.spectrum import Grid
from farpipe.optical.study import LightScenario, PolicyComparison, Run, compare_policies, random_nodes
from farpipe.optical.traffic import MAX_REQUESTS, PoissonTraffic, Traffic, load_trace
from farpipe.optical.transfers import UNIT_GBIT, LightTraining, messages_alone, nominal_problem
from farpipe.planning import Plan

Loaded = tuple[Problem, Schedule | None, Plan | None]
"""A step, with its own order and its plan where it has them."""
Case = tuple[LightScenario, LightTraining]
"""A network with its background, and a training at its nodes."""


class LightSetting(LightSettings, metaclass=Checked):
    """A training's places and order, the network with its background, and how light paths are asked for.

    `nodes` are those of the ranks (``"a,b,c"``) or of the sites (``"zurich=a,lugano=b"``); instead of them,
    `placements` is a number of random ones. `order` is a named one or ``joint``; by default the plan's, or joint. The
    other fields are those of `LightSettings`. InputError for values that can't be.
    """

    nodes: str | None = None
    network: NetworkOrName = "nsfnet"
    order: str | None = None
    load: Annotated[float, Field(ge=0, le=MAX_REQUESTS)] = 60.0
    trace: Path | None = None

    @cached_property
    def net(self) -> Network:
        """The network."""
        if isinstance(self.network, Network):
            return self.network
        return find_network(self.network, shared=not self.directed)

    @cached_property
    def modulations(self) -> Modulation:
        """Modulation of the messages."""
        return find_modulation(self.modulation)

    @property
    def setting_text(self) -> str:
        """Sentence about the network and what else is on it."""
        rates, holding_s = self.rates, self.mean_holding
        random = f"Poisson requests of {rates} slots, {self.load:g} Erlang, held {format_seconds(holding_s)}"
        others = f"requests of {self.trace.name}" if self.trace else random if self.load else "no other traffic"
        kind = "a spectrum per direction" if self.directed else "one spectrum for both directions"
        grid = f"{self.slots} slots of {self.slot_ghz:g} GHz, guard {self.guard}, {kind}"
        return f"network {self.net.name}, {grid}, modulation {self.modulations.name}; beside it {others}"

    @property
    def num_draws(self) -> int:
        """Placements, with a background each, or backgrounds of the one placement."""
        return self.placements or (1 if self.trace is not None else self.seeds)

    def node_choices(self, loaded: Loaded) -> list[tuple[str, ...]]:
        """The node of every rank, as given or for each random placement."""
        problem, _, plan = loaded
        sites = plan.sites if plan else ()
        if self.placements is None:
            nodes = _nodes_of_ranks(self.nodes, problem.num_ranks, sites)
            return [tuple(self.net.expect_node(node, "nodes") for node in nodes)]
        labels = self.nodes.split(",") if self.nodes else sites or tuple(map(str, range(problem.num_ranks)))
        if len(labels) != problem.num_ranks:
            raise UsageError(f"nodes: expected a name for each of {problem.num_ranks} ranks, found {len(labels)}")
        return [random_nodes(self.net, labels, self.modulations, draw) for draw in range(self.placements)]

    def candidates(self, policy: str, nodes: Sequence[str]) -> PathTable:
        """Candidate paths of a policy between the nodes of a training."""
        if self.paths is not None:
            return load_paths(self.paths, self.net)
        pairs = dict.fromkeys((a, b) for a in nodes for b in nodes if a != b)
        k, by = CANDIDATES[policy]
        return k_shortest(self.net, pairs or None, k=self.k or k, by=self.by or by, modulation=self.modulations)

    @cached_property
    def _background(self) -> tuple[PoissonTraffic | Traffic, PathTable] | None:
        """The background and its candidates; None: nothing but the training."""
        traffic = load_trace(self.trace, self.net) if self.trace else None
        if traffic and (self.begin or 0.0) >= (last_s := float(traffic.arrival_s[-1])):
            raise InputError(
                f"begin={self.begin:g}: the last request of {self.trace} comes after {last_s:g} s; begin earlier"
            )
        if not traffic and not self.load:
            return None
        pairs = traffic.pairs if traffic else None
        paths = load_paths(self.paths, self.net) if self.paths else k_shortest(self.net, pairs, k=4)
        if traffic:
            return traffic, paths
        paths.expect_all_pairs(str(self.paths))
        low, high = self.low_and_high
        if high + self.guard > self.slots:
            raise UsageError(
                f"rates={self.rates}: the largest background request takes {high + self.guard} slots "
                f"with its guard band, and a fibre has {self.slots}; lower `rates` or raise `slots`"
            )
        return PoissonTraffic(self.load, self.mean_holding, low, high), paths

    def scenario(self, candidates: PathTable) -> LightScenario:
        """The network, candidate paths and background."""
        grid = Grid(self.slots, self.slot_ghz, self.guard)
        of_trace = find_modulation(self.trace_modulation or self.modulation) if self.trace else None
        traffic, paths = self._background or (None, candidates)
        return LightScenario(candidates, paths, grid, traffic, self.modulations, of_trace, self.begin)

    def policy(self, name: str) -> TransferPolicy:
        """The policy called `name` with what the options say of units, set-up, release and keeping."""
        return find_transfer_policy(
            name,
            self.units,
            setup_s=self.setup,
            release_s=self.release,
            ahead=self.ahead,
            keep_s=self.keep,
            one_at_a_time=self.one_per_hop,
            retry_s=self.retry,
        )

    def training(
        self, loaded: Loaded, nodes: tuple[str, ...], scenario: LightScenario, policy: TransferPolicy
    ) -> LightTraining:
        """The step at its nodes, in the order that was asked for, the plan's own, or the joint one."""

        problem, own, _ = loaded
        if self.order is None and own is not None:
            return LightTraining(problem, own, nodes)
        nominal = nominal_problem(problem, nodes, scenario.paths, 6 * UNIT_GBIT)
        if self.order not in (None, "joint"):
            return LightTraining(nominal, named(str(self.order), nominal), nodes)
        shared = scenario.shared(1_000_000, scenario.begin_s + 600)  # a background that no result is measured on
        chosen = joint_order(shared, problem, nodes, policy, begin_s=scenario.begin_s)
        return LightTraining(nominal, chosen, nodes)

    def compare(
        self,
        step: Plan | Loaded,
        policies: Sequence[str],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[list[Case], PolicyComparison]:
        """Every placement with the runs of the policies on it: on `seeds` backgrounds, or, of several
        placements, on one each.

        Messages of a plan go over light paths. Its collectives inside sites are left out: no light path carries them.
        """
        expect_kind("compare: step", step, (Plan, tuple), "a Plan, or a step as (problem, schedule, plan)")
        if isinstance(step, Plan):
            step = (messages_alone(step.problem), step.schedule, step)
        chosen = {name: self.policy(name) for name in policies}
        cases: list[Case] = []
        runs: dict[str, list[Run]] = {name: [] for name in policies}
        for draw, nodes in enumerate(self.node_choices(step)):
            scenario = self.scenario(self.candidates(policies[0], nodes))
            training = self.training(step, nodes, scenario, chosen[policies[0]])
            settings = {name: (training, chosen[name], self.candidates(name, nodes)) for name in policies}
            drawn = range(self.num_draws) if self.placements is None else [draw]
            found = compare_policies(
                scenario, settings, drawn, num_steps=self.steps, skipped=self.skipped, progress=progress
            )
            cases.append((scenario, training))
            for name in policies:
                runs[name] += found.runs[name]
        return cases, PolicyComparison(runs)


def _nodes_of_ranks(nodes: str | None, num_ranks: int, sites: Sequence[str]) -> tuple[str, ...]:
    """The node of every rank."""
    if nodes is None:
        raise UsageError(
            "nodes: missing; name the node of every rank or site (--nodes zurich=1,lugano=5), or give a number of "
            "random `placements` (--set placements=10)"
        )
    words = [word.strip() for word in nodes.split(",")]
    if all("=" in word for word in words):
        of_site = dict(word.split("=", 1) for word in words)
        missing = [site for site in dict.fromkeys(sites) if site not in of_site]
        if sites and (unknown := [site for site in of_site if site not in sites]):
            raise UsageError(f"nodes: there is no site {unknown[0]!r}{nearest(unknown[0], sites)}")
        if missing or not sites:
            raise UsageError(
                f"nodes: no node for site {missing[0]!r}"
                if missing
                else "nodes: a problem has no sites; give a node per rank"
            )
        return tuple(of_site[site] for site in sites)
    if len(words) != num_ranks:
        raise UsageError(f"nodes: expected a node for each of {num_ranks} ranks, found {len(words)}")
    return tuple(words)
