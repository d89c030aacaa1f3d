"""Studies of trainings over light paths: seeds side by side, strategies on the same background, harm to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from farpipe.optical.coupled import Coupled, Shared
from farpipe.optical.intervals import Interval, mean_interval, paired_change
from farpipe.optical.joint import Played, nominal_problem, play_steps
from farpipe.optical.modulation import MODULATIONS, Modulation
from farpipe.optical.paths import PathTable
from farpipe.optical.spectrum import Grid
from farpipe.optical.strategies import Fixed, Strategy
from farpipe.optical.traffic import PoissonTraffic, Traffic
from farpipe.optical.training import UNIT_GBIT, Training, TransferRule
from farpipe.simulate import simulate
from farpipe.step import Problem, Schedule

SETTLE_S = 10.0
"""Mean holding times of background traffic before a training begins."""


@dataclass(frozen=True)
class Scenario:
    """A network with random background traffic, on which trainings are compared."""

    paths: PathTable
    """Candidates of the training."""
    background_paths: PathTable
    grid: Grid
    background: PoissonTraffic | None
    """Its rates are numbers of slots, the same on every path."""
    modulation: Modulation = MODULATIONS["64qam"]

    @property
    def begin_s(self) -> float:
        """Time at which trainings begin: the background has settled."""
        return SETTLE_S * self.background.mean_holding_s if self.background else 0.0

    def shared(self, seed: int, until_s: float, paths: PathTable | None = None) -> Shared:
        """The network with background traffic of `seed` that lasts until `until_s` at least."""
        return Shared(
            paths or self.paths,
            self.grid,
            self.modulation,
            self._traffic(seed, until_s),
            background_paths=self.background_paths,
            background_modulation=MODULATIONS["bpsk"],
        )

    def _traffic(self, seed: int, until_s: float) -> Traffic | None:
        if self.background is None:
            return None
        rate = self.background.load_erlang / self.background.mean_holding_s
        count = int(rate * until_s + 6 * (rate * until_s) ** 0.5) + 10
        drawn = self.background.draw(tuple(self.background_paths.of_pair), count, seed)
        return replace(drawn, gbit_s=drawn.gbit_s * self.grid.slot_ghz)  # at 1 bit/s/Hz: so many slots


@dataclass(frozen=True)
class Run:
    """Steps of a training on one background, beside that background alone."""

    played: Played
    harm: float
    """Background requests refused during the steps, as a share, less the share without a training then."""
    harm_by_slots: float
    """The same by the slots that were asked for."""

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
            "harm": self.harm,
            "harm_by_slots": self.harm_by_slots,
        }


def _mean_units(played: Played) -> float:
    units = [step.out.units[step.training.sent] * (step.unit_gbit / UNIT_GBIT) for step in played.steps]
    return float(np.concatenate(units).mean()) if units[0].size else 0.0


def _refused_share(played: Played) -> float:
    came, refused = np.sum([step.background for step in played.steps], axis=0)
    return float(refused / came) if came else 0.0


def run_once(
    scenario: Scenario,
    training: Training,
    strategy: Strategy,
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
        played = play_steps(shared, training, strategy, num_steps=num_steps, begin_s=scenario.begin_s, skipped=skipped)
        end_s = played.steps[-1].end_s
        if shared.traffic is None or end_s < shared.traffic.arrival_s[-1]:
            return Run(played, *_harm(shared, training, played))
        until_s = 1.5 * max(until_s, end_s)


def _harm(shared: Shared, training: Training, played: Played) -> tuple[float, float]:
    """Additional share of the background that was refused because of the training, by request and by slots."""
    traffic = shared.traffic
    if traffic is None:
        return 0.0, 0.0
    alone, beside = Coupled(shared, training, TransferRule()), played.background_path
    alone.wait_until(played.steps[-1].end_s)
    low, high = np.searchsorted(traffic.arrival_s, [played.steps[0].begin_s, played.steps[-1].end_s])
    more = (beside[low:high] == -1).astype(float) - (alone.background_path[low:high] == -1)
    slots = traffic.gbit_s[low:high]
    return float(more.mean()), float((more * slots).sum() / slots.sum())


def bound_s(scenario: Scenario, training: Training, paths: PathTable | None = None, units: int = 6) -> float:
    """The step of a training's order if every message got `units` at once: a lower bound for that many units.

    It is alone on the shortest candidates of a network without limits, where nothing is ever refused.
    """
    table = paths or scenario.paths
    nominal = nominal_problem(training.problem, training.nodes, table, units * UNIT_GBIT)
    return _unqueued_s(nominal, training.schedule)


def _unqueued_s(problem: Problem, schedule: Schedule) -> float:
    """Simulated with one link per message, so that none waits for another."""
    data: dict[str, Any] = problem.to_data()
    links: dict[str, Any] = {}
    for index, hop in enumerate(data["hops"]):
        for transfer in filter(None, (hop or {}).values()):
            name, transfer["link"] = transfer["link"], []
            for microbatch in range(problem.num_microbatches):
                own = f"{index}.{microbatch}.{name}"
                links[own] = data["links"][name]
                transfer["link"].append(own)
    return simulate(Problem.from_data(data | {"links": links}), schedule).makespan_s


def no_network_s(training: Training) -> float:
    """The step of a training's order if messages took no time at all."""
    data = training.problem.to_data()
    free = Problem.from_data(data | {"hops": [None] * (training.problem.num_stages - 1), "links": {}})
    return simulate(free, training.schedule).makespan_s


@dataclass(frozen=True)
class Comparison:
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
        bounds = {"change": change.mean, "change_interval": _finite(change)} if len(figures) > 1 else {}
        return {"policy": name, **means, **bounds}


def _finite(interval: Interval) -> list[float] | None:
    return None if interval.low == -inf else [interval.low, interval.high]


def compare(
    scenario: Scenario,
    settings: Mapping[str, tuple[Training, Strategy, PathTable | None]],
    seeds: Sequence[int],
    *,
    num_steps: int,
    skipped: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Every setting (training, strategy, candidates or None for the scenario's) on the same backgrounds."""
    runs: dict[str, list[Run]] = {}
    for name, (training, strategy, paths) in settings.items():
        runs[name] = []
        for seed in seeds:
            found = run_once(scenario, training, strategy, seed, num_steps=num_steps, skipped=skipped, paths=paths)
            runs[name].append(found)
            progress(sum(map(len, runs.values())), len(settings) * len(seeds))
    return Comparison(runs)


def best_fixed(
    scenario: Scenario, training: Training, seeds: Sequence[int], *, fewer: bool, policy: TransferRule | None = None
) -> Fixed:
    """The fixed number of units, 1 to 6, with the shortest steps: the baseline that a paper owes its readers."""
    rule = policy or TransferRule()
    candidates = {f"{units}": Fixed(units, fewer, rule) for units in range(1, 7)}
    settings = {name: (training, strategy, None) for name, strategy in candidates.items()}
    found = compare(scenario, settings, seeds, num_steps=2, skipped=1)
    return candidates[min(candidates, key=lambda name: found.mean(name, "step_s").mean)]
