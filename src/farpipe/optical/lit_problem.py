"""A Problem whose messages take the times of the light paths they had, for everything that reads Problems."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from farpipe.optical.training import Step
from farpipe.step import LightPaths, LitHop, LitStep, Problem, retimed


def lit_problem(step: Step) -> Problem:
    """The Problem of a step with one link per pair of nodes and direction, and each message's own time there.

    A message has its light path for itself, so it keeps nobody else waiting, and what it waited for the path is part of
    its delay. Simulating the Problem in the same order gives the step's time again, and any tool that reads Problems
    sees the same step. The bandwidth of a link is that of its fastest light path.
    """
    training, out = step.training, step.out
    data = training.problem.to_data()
    shape = (2, training.problem.num_stages, training.problem.num_microbatches)
    arrives_after_s, rates = np.zeros((2, *shape))
    sent = training.sent
    arrives_after_s.flat[sent] = out.arrival_s[sent] - out.ready_s[sent]
    rates.flat[sent] = out.units[sent] * step.unit_gbit * 1.25e8
    links: dict[str, Any] = {}
    for hop, ends in enumerate(training.hops):
        if ends is None:
            continue
        direction, stage = divmod(hop, training.problem.num_stages)
        name = f"{ends[0]}>{ends[1]}"
        fastest = max(float(rates[direction, stage].max()), links.get(name, {}).get("bandwidth_bytes_per_s", 0.0))
        links[name] = {"latency_s": 0.0, "bandwidth_bytes_per_s": fastest}
        data["hops"][stage - direction][("forward", "backward")[direction]]["link"] = name
    for index, (a, b) in enumerate(zip(training.nodes, training.nodes[1:], strict=False)):
        if a == b:
            data["hops"][index] = None
    return retimed(Problem.from_data(data | {"links": links}), np.zeros(shape), arrives_after_s)


def light_paths(steps: Sequence[Step]) -> LightPaths:
    """Light paths of the messages of some steps of one training, for a run that takes them.

    A message that two light paths side by side carried has the rate and delay of both together.
    """
    return LightPaths(
        schedule=steps[0].training.schedule,
        steps=tuple(
            LitStep(hops=tuple(_lit_hop(step, hop) for hop, e in enumerate(step.training.hops) if e)) for step in steps
        ),
    )


def _lit_hop(step: Step, hop: int) -> LitHop:
    out, problem = step.out, step.training.problem
    count = problem.num_microbatches
    own = slice(hop * count, (hop + 1) * count)
    direction, stage = divmod(hop, problem.num_stages)
    sizes, sending_s = problem.traffic.messages.bytes[direction, stage], out.end_s[own] - out.start_s[own]
    asked = out.units[own] * step.unit_gbit * 1.25e8
    rates = np.divide(sizes, sending_s, out=asked, where=sending_s > 0)
    return LitHop(
        direction=("forward", "backward")[direction],
        stage=stage,
        wait_s=tuple(np.maximum(out.start_s[own] - out.ready_s[own], 0.0).tolist()),
        bandwidth_bytes_per_s=tuple(rates.tolist()),
        latency_s=tuple(np.maximum(out.arrival_s[own] - out.end_s[own], 0.0).tolist()),
    )
