"""A Problem whose links are the light paths that its messages had: the way back from light to the common waist."""

from typing import Any

from farpipe.optical.paths import PathTable
from farpipe.optical.training import Step
from farpipe.step import Problem


def lit_problem(step: Step, paths: PathTable) -> Problem:
    """The Problem of a step with one link per message: the rate of its light path, and its delay.

    What a message waited for its light path counts as delay, so that simulating the Problem in the same order gives the
    step's time again, and any tool that reads Problems sees the same step.
    """
    training, out = step.training, step.out
    data = training.problem.to_data()
    links: dict[str, Any] = {}
    count = training.problem.num_microbatches
    for hop, ends in enumerate(training.hops):
        if ends is None:
            continue
        way, stage = divmod(hop, training.problem.num_stages)
        names = []
        for microbatch in range(count):
            message = hop * count + microbatch
            name = f"{ends[0]}:{stage}.{microbatch}>{ends[1]}:{stage + 1 - 2 * way}.{microbatch}"
            rate = float(out.units[message]) * step.unit_gbit * 1.25e8
            sent_s = float(out.end_s[message] - out.start_s[message])
            links[name] = {
                "latency_s": float(out.arrival_s[message] - out.ready_s[message]) - sent_s,
                "bandwidth_bytes_per_s": rate,
            }
            names.append(name)
        data["hops"][stage - way][("forward", "backward")[way]]["link"] = names
    for index, (a, b) in enumerate(zip(training.nodes, training.nodes[1:], strict=False)):
        if a == b:
            data["hops"][index] = None
    return Problem.from_data(data | {"links": links})
