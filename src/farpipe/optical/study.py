"""Studies of trainings over light paths: seeds side by side, policies on the same background, harm to it."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import numpy as np

from farpipe.core.errors import InputError
from farpipe.core.simulate import simulate
from farpipe.core.step import retimed
from farpipe.optical.confidence import Interval, mean_interval, paired_change
from farpipe.optical.demands import TransferPolicy
from farpipe.optical.modulation import MODULATIONS, Modulation
from farpipe.optical.network import Network
from farpipe.optical.paths import PathTable, k_shortest
from farpipe.optical.shared_network import PENDING, NetworkPlayer, PlayedSteps, SharedNetwork, play_steps
from farpipe.optical.spectrum import Grid
from farpipe.optical.traffic import MAX_REQUESTS, PoissonTraffic, Traffic, expect_few
from farpipe.optical.transfers import UNIT_GBIT, LightTraining, TransferRule, nominal_problem

BOUND_UNITS = 6
"""Units of a message in the lower bound of a step: the most that policies ask for by default."""
SETTLE_S = 10.0
"""Mean holding times of background traffic before a training begins."""


@dataclass(frozen=True)
class LightScenario:
    """A network with random background traffic, on which trainings are compared."""

    paths: PathTable
    """Candidates of the training."""
    background_paths: PathTable
    grid: Grid
    background: PoissonTraffic | Traffic | None
    """Random traffic, whose rates are numbers of slots, the same on every path; or a trace."""
    modulation: Modulation = MODULATIONS["64qam"]
    trace_modulation: Modulation | None = None
    """Modulation of a trace's requests."""
    first_s: float | None = None

    @property
    def begin_s(self) -> float:
        """Time at which trainings begin: `first_s`, or when the background has settled."""
        if self.first_s is not None or self.background is None:
            return self.first_s or 0.0
        return SETTLE_S * self.background.mean_holding_s

    def shared(self, seed: int, until_s: float, paths: PathTable | None = None) -> SharedNetwork:
        """The network with background traffic of `seed` that lasts until `until_s` at least."""
        return SharedNetwork(
            paths or self.paths,
            self.grid,
            self.modulation,
            self._traffic(seed, until_s),
            background_paths=self.background_paths,
            background_modulation=self.trace_modulation or MODULATIONS["bpsk"],
        )

    def _traffic(self, seed: int, until_s: float) -> Traffic | None:
        if self.background is None or isinstance(self.background, Traffic):
            return self.background
        load, holding_s = self.background.load_erlang, self.background.mean_holding_s
        mean = load / holding_s * until_s
        expect_few(
            mean,
            f"{until_s:.3g} s of background at {load:g} Erlang with a mean holding time of {holding_s:g} s; lower the "
            "load, raise mean_holding, or shorten the run (steps, setup, begin)",
        )
        count = min(int(mean + 6 * mean**0.5) + 10, MAX_REQUESTS)
        drawn = self.background.draw(tuple(self.background_paths.of_pair), count, seed)
        return replace(drawn, gbit_s=drawn.gbit_s * self.grid.slot_ghz)  # at 1 bit/s/Hz, in slots


@dataclass(frozen=True)
class Run:
    """Steps of a training on one background, compared with that background alone."""

    played: PlayedSteps
    harm: float
    """Background requests refused during the steps, as a share, less the share without a training then."""
    harm_by_slots: float
    """Slots of background requests refused during the steps, as a share, less that without a training."""

    @property
    def step_s(self) -> float:
        """Mean time per step."""
        return self.played.mean_s

    def figures(self) -> dict[str, float]:
        """The figures of the run by name."""
        steps = self.played.steps
        return {
            "step_s": self.step_s,
            "bubble_ratio": float(np.mean([step.bubble_ratio for step in steps])),
            "refused_ratio": float(np.mean([step.refused_ratio for step in steps])),
            "waited_ratio": float(np.mean([step.waited_ratio for step in steps])),
            "mean_wait_s": float(np.mean([step.wait_s.mean() for step in steps])) if steps[0].num_sent else 0.0,
            "mean_units": _mean_units(self.played),
            "held_slots": float(np.mean([step.held_slot_s / step.makespan_s for step in steps])),
            "background_refused_ratio": _refused_share(self.played),
            "background_requests": float(np.count_nonzero(self.played.background_path != PENDING)),
            "background_accepted": float(np.count_nonzero(self.played.background_path >= 0)),
            "harm": self.harm,
            "harm_by_slots": self.harm_by_slots,
        }


def _mean_units(played: PlayedSteps) -> float:
    units = [step.out.units[step.training.sent] * (step.unit_gbit / UNIT_GBIT) for step in played.steps]
    return float(np.concatenate(units).mean()) if units[0].size else 0.0


def _refused_share(played: PlayedSteps) -> float:
    came, refused = np.sum([step.background for step in played.steps], axis=0)
    return float(refused / came) if came else 0.0


def run_once(
    scenario: LightScenario,
    training: LightTraining,
    policy: TransferPolicy,
    seed: int,
    *,
    num_steps: int,
    skipped: int,
    paths: PathTable | None = None,
) -> Run:
    """A training's steps among the background of `seed`; the background is drawn longer until it outlasts them."""
    until_s = scenario.begin_s + (skipped + num_steps) * 2 * bound_s(scenario, training, paths)
    while True:
        shared = scenario.shared(seed, until_s, paths)
        traffic = shared.traffic
        settings: dict[str, Any] = {"num_steps": num_steps, "begin_s": scenario.begin_s, "skipped": skipped}
        played = play_steps(shared, training, policy, **settings, to_end=traffic is scenario.background)
        end_s = played.steps[-1].end_s
        if traffic is None or traffic is scenario.background or end_s < traffic.arrival_s[-1]:
            return Run(played, *_harm(shared, training, played))
        until_s = 1.5 * max(until_s, end_s)


def _harm(shared: SharedNetwork, training: LightTraining, played: PlayedSteps) -> tuple[float, float]:
    """Additional share of the background that was refused because of the training, by request and by slots."""
    traffic = shared.traffic
    if traffic is None:
        return 0.0, 0.0
    alone, beside = NetworkPlayer(shared, training, TransferRule()), played.background_path
    alone.wait_until(played.steps[-1].end_s)
    low, high = np.searchsorted(traffic.arrival_s, [played.steps[0].begin_s, played.steps[-1].end_s])
    more = (beside[low:high] == -1).astype(float) - (alone.background_path[low:high] == -1)
    if low == high:  # the trace ends before the steps do
        return 0.0, 0.0
    slots = traffic.gbit_s[low:high]
    return float(more.mean()), float((more * slots).sum() / slots.sum())


def random_nodes(network: Network, labels: Sequence[str], modulation: Modulation, draw: int) -> tuple[str, ...]:
    """Random nodes of ranks, a different one for each different label, with neighbouring ranks within reach.

    The same `draw` gives the same nodes. InputError when 1000 samples have none within reach.
    """
    random, sites = Random(draw), tuple(dict.fromkeys(labels))
    if len(sites) > len(network.nodes):
        raise InputError(f"{network.name}: {len(sites)} sites need different nodes, and it has {len(network.nodes)}")
    for _ in range(1000):
        at = dict(zip(sites, random.sample(network.nodes, len(sites)), strict=True))
        pairs = [(at[a], at[b]) for a, b in itertools.pairwise(labels) if a != b]
        if not pairs or all(map(modulation.efficiency, k_shortest(network, pairs, k=1).km)):
            return tuple(at[label] for label in labels)
    raise InputError(f"{network.name}: no random placement with neighbours within reach of {modulation.name} was found")


def bound_s(
    scenario: LightScenario, training: LightTraining, paths: PathTable | None = None, units: int = BOUND_UNITS
) -> float:
    """The step of a training's order if every message got `units` at once: a lower bound for that many units.

    It is alone on the shortest candidates of a network without limits, where nothing is ever refused.
    """
    table = paths or scenario.paths
    nominal = nominal_problem(training.problem, training.nodes, table, units * UNIT_GBIT)
    alone_s = nominal.traffic.messages.arrives_after_s  # no message keeps another one waiting
    return simulate(retimed(nominal, np.zeros_like(alone_s), alone_s), training.schedule).makespan_s


def no_network_s(training: LightTraining) -> float:
    """The step of a training's order if messages took no time at all."""
    free = training.problem.over({}, [None] * len(training.problem.hops))
    return simulate(free, training.schedule).makespan_s


@dataclass(frozen=True)
class PolicyComparison:
    """Runs of several named settings over the same seeds; the first is the baseline."""

    runs: Mapping[str, Sequence[Run]]

    @cached_property
    def baseline(self) -> str:
        """The name of the first setting."""
        return next(iter(self.runs))

    def change(self, name: str, baseline: str | None = None) -> Interval:
        """Relative change of the step time against the baseline, over pairs of runs that saw the same background."""
        base = self.runs[baseline or self.baseline]
        return paired_change([run.step_s for run in self.runs[name]], [run.step_s for run in base])

    def mean(self, name: str, figure: str) -> Interval:
        """A figure of `Run.figures` with its interval over the seeds."""
        return mean_interval([run.figures()[figure] for run in self.runs[name]])

    def to_data(self) -> list[dict[str, Any]]:
        """A row per setting as JSON data."""
        return [self._row(name) for name in self.runs]

    def _row(self, name: str) -> dict[str, Any]:
        figures = [run.figures() for run in self.runs[name]]
        means = {key: float(np.mean([one[key] for one in figures])) for key in figures[0]}
        change = self.change(name)
        bounds = {"change": change.mean, "change_interval": [change.low, change.high]} if len(figures) > 1 else {}
        return {"policy": name, **means, **bounds}


def compare_policies(
    scenario: LightScenario,
    settings: Mapping[str, tuple[LightTraining, TransferPolicy, PathTable | None]],
    seeds: Sequence[int],
    *,
    num_steps: int,
    skipped: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PolicyComparison:
    """Every setting (training, policy, candidates or None for the scenario's) on the same backgrounds."""
    runs: dict[str, list[Run]] = {}
    for name, (training, policy, paths) in settings.items():
        runs[name] = []
        for seed in seeds:
            found = run_once(scenario, training, policy, seed, num_steps=num_steps, skipped=skipped, paths=paths)
            runs[name].append(found)
            progress(sum(map(len, runs.values())), len(settings) * len(seeds))
    return PolicyComparison(runs)
