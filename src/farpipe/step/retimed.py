"""Steps whose messages take other times on their links than bytes, bandwidth and latency say."""

import numpy as np
from numpy.typing import NDArray

from farpipe.step.links import Hop, Transfer
from farpipe.step.problem import Problem

Floats = NDArray[np.float64]


def retimed(problem: Problem, occupies_s: Floats, arrives_after_s: Floats) -> Problem:
    """The same step with other times of its messages: both [2, S, M], as in `Messages`, of what hops there are.

    Where replicas are staggered, these are the times of one replica's messages, as if it were alone.
    """

    def timed(transfer: Transfer | None, at: tuple[int, int]) -> Transfer | None:
        if transfer is None:
            return None
        times = {"occupies_s": tuple(occupies_s[at].tolist()), "arrives_after_s": tuple(arrives_after_s[at].tolist())}
        return Transfer(**(dict(transfer) | times))

    hops = tuple(
        hop and Hop(forward=timed(hop.forward, (0, index)), backward=timed(hop.backward, (1, index + 1)))
        for index, hop in enumerate(problem.hops)
    )
    return problem.model_copy(update={"hops": hops})
