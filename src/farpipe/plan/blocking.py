"""Engines whose ranks wait until a message has left before they go on."""

from farpipe.step import Problem
from farpipe.step.links import Hop, Transfer


def blocking_sends(problem: Problem) -> Problem:
    """The step where a rank computes nothing while it sends; the receiver gets the message when it has left.

    So DeepSpeed sends (``dist.send`` on the stream that computes, deepspeed/runtime/pipe/p2p.py). farpipe's engine,
    like Megatron-LM's, sends beside the computation.
    """
    occupies_s = problem.traffic.messages.occupies_s  # [direction, stage, microbatch]
    stages = []
    for index, stage in enumerate(problem.stages):
        forward, backward = occupies_s[:, index]
        update = {
            "forward_s": tuple((problem.row(stage.forward_s) + forward).tolist()),
            "input_grad_s": tuple((problem.row(stage.input_grad_s) + backward).tolist()),
        }
        stages.append(stage.model_copy(update=update))
    hops = tuple(hop and Hop(forward=_sent(hop.forward), backward=_sent(hop.backward)) for hop in problem.hops)
    return problem.model_copy(update={"stages": tuple(stages), "hops": hops})


def _sent(transfer: Transfer | None) -> Transfer | None:
    """Rest of a message that its sender has waited for."""
    return transfer and transfer.model_copy(update={"occupies_s": 0.0, "arrives_after_s": 0.0})
