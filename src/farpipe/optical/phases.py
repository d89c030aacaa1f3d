"""Phases of a run over light paths: links for the engine that change when light paths are set up and torn down.

In a phase every hop keeps one light path; between phases all are given back, and the next ones are what the network has
then. So a hop is a link whose rate and delay change from phase to phase, which emulated and kernel links can do too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from farpipe.errors import InputError, UsageError
from farpipe.optical.coupled import Coupled, Shared
from farpipe.optical.strategies import Strategy
from farpipe.optical.training import Step, Training
from farpipe.step import Link, Problem

_KEEP_S: Final = 60.0
"""Far more than a hop is idle within a step."""


@dataclass(frozen=True)
class Phase:
    """The light paths of some steps as links by name, and how long a step over them is predicted to take."""

    links: dict[str, Link]
    step_s: float

    def problem(self, training: Training) -> Problem:
        """The training's Problem with these links."""
        return Problem.from_data(_data(training) | {"links": {n: link.model_dump() for n, link in self.links.items()}})


def light_phases(
    shared: Shared,
    training: Training,
    strategy: Strategy,
    *,
    num_phases: int,
    begin_s: float = 0.0,
    pause_s: float = 0.0,
) -> tuple[Phase, ...]:
    """`num_phases` phases on one network, with `pause_s` and more between them, in which the background goes on.

    Links are called ``node>node``. InputError where two hops go from one node to the same other: they would be two
    light paths, and one link of the engine.
    """
    if num_phases < 1:
        raise UsageError(f"num_phases must be at least 1, found {num_phases}")
    hops = [ends for ends in training.hops if ends]
    if len(set(hops)) < len(hops):
        raise InputError(
            "nodes: two hops go from one node to the same other; give every hop a pair of nodes of its own"
        )
    rule = replace(strategy.rule, keep_s=_KEEP_S, max_blocks=1)
    coupled, phases = Coupled(shared, training, rule, begin_s=begin_s), []
    for _ in range(num_phases):
        demands = strategy.demands(training, None)
        lit = coupled.step(demands)  # in the first step of a phase messages wait until light paths are there
        phases.append(Phase(dict(_links(shared, lit)), coupled.step(demands).makespan_s))
        coupled.wait_until(coupled.now_s + _KEEP_S + pause_s)
    return tuple(phases)


def link_changes(phases: Sequence[Phase], num_steps: int) -> list[dict[str, Any]]:
    """The figures of a run's ``LinkChange`` for phases of `num_steps` steps each; the first phase is how it begins."""
    return [
        {"step": index * num_steps, "link": name, **link.model_dump(include={"latency_s", "bandwidth_bytes_per_s"})}
        for index, phase in enumerate(phases[1:], start=1)
        for name, link in phase.links.items()
    ]


def _links(shared: Shared, step: Step) -> Iterator[tuple[str, Link]]:
    """The light path of every hop: its fibre's delay, and its units' rate."""
    count = step.training.problem.num_microbatches
    for hop, ends in enumerate(step.training.hops):
        if ends is not None:
            path, units = int(step.out.path[hop * count]), float(step.out.units[hop * count])
            latency_s, rate = float(shared.table.latency_s[path]), units * step.unit_gbit * 1.25e8
            yield f"{ends[0]}>{ends[1]}", Link(latency_s=latency_s, bandwidth_bytes_per_s=rate)


def _data(training: Training) -> dict[str, Any]:
    """The training's Problem with its links named after nodes, and none inside a node."""
    data, stages = training.problem.to_data(), training.problem.num_stages
    for index in range(stages - 1):
        forward, backward = training.hops[index], training.hops[stages + index + 1]
        if forward is None or backward is None:
            data["hops"][index] = None
        else:
            data["hops"][index]["forward"]["link"] = ">".join(forward)
            data["hops"][index]["backward"]["link"] = ">".join(backward)
    return data
