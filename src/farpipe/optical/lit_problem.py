"""Steps over light paths as what others read: a Problem with the messages' own times, and a run's light paths."""

from collections.abc import Sequence

import numpy as np

from farpipe.optical.transfers import BYTES_PER_GBIT, Step, over_pairs
from farpipe.step import LightPaths, Link, LitHop, LitStep, Problem, retimed


def lit_problem(step: Step) -> Problem:
    """The Problem of a step with one link per pair of nodes and direction, and each message's own time there.

    A message has its light path for itself, so it delays no other message, and its wait for the path is part of its
    delay. Simulating the Problem in the same order gives the step's time again, and any tool that reads Problems
    sees the same step. The bandwidth of a link is that of its fastest light path.
    """
    training, out = step.training, step.out
    shape = (2, training.problem.num_stages, training.problem.num_microbatches)
    sent, arrives_after_s = training.sent, np.zeros(shape)
    arrives_after_s.flat[sent] = out.arrival_s[sent] - out.ready_s[sent]
    units = out.units.reshape(len(training.hops), -1).max(axis=1)
    fastest: dict[tuple[str, str], float] = {}
    for ends, most in zip(training.hops, units, strict=True):
        if ends is not None:
            fastest[ends] = max(fastest.get(ends, 0.0), float(most) * step.unit_gbit * BYTES_PER_GBIT)

    def link(a: str, b: str) -> Link:
        return Link(latency_s=0.0, bandwidth_bytes_per_s=fastest[a, b])

    return retimed(over_pairs(training.problem, training.nodes, link), np.zeros(shape), arrives_after_s)


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
    asked = out.units[own] * step.unit_gbit * BYTES_PER_GBIT
    rates = np.divide(sizes, sending_s, out=asked, where=sending_s > 0)
    return LitHop(
        direction=("forward", "backward")[direction],
        stage=stage,
        wait_s=tuple(np.maximum(out.start_s[own] - out.ready_s[own], 0.0).tolist()),
        bandwidth_bytes_per_s=tuple(rates.tolist()),
        latency_s=tuple(np.maximum(out.arrival_s[own] - out.end_s[own], 0.0).tolist()),
    )
