"""Other times of a step's messages: given ones, and those of replicas that share links and send staggered."""

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


def stagger(problem: Problem, num_replicas: int) -> Problem:
    """The step of staggered replicas, given that of replicas that send together between sites.

    Together, a message carries the bytes of all `num_replicas`, and all arrive when the last byte has. Staggered, each
    replica's message is sent at the full rate, and the replicas run one message apart from each other
    (`StepTraffic.stagger_s`). That saves the others' share of every transfer that a rank waits for, at the cost of one
    at the beginning of the step: better where the step waits for more than one transfer, unless messages differ
    so much in size that the stagger, which is the longest, is too long for the others. Neither is better everywhere.

    On other links that carry collectives as well as messages replicas are staggered too.
    """
    chosen = frozenset(filter(problem.between_sites.get, problem.links))
    all_links = chosen | set(problem.mixed_links)
    changed = {
        name: link.model_copy(update={"num_staggered": num_replicas}) if name in all_links else link
        for name, link in problem.links.items()
    }
    hops = tuple(hop and _one_replicas_hop(problem, hop, num_replicas, chosen) for hop in problem.hops)
    staggered = problem.changed(links=changed, hops=hops)
    if not any(transfer.has_times for _, transfer in problem.transfers()):
        return staggered
    messages, of_link = problem.traffic.messages, [num_replicas if name in chosen else 1 for name in problem.links]
    occupies_s = messages.occupies_s / np.array([*of_link, 1, 1])[messages.link]  # the last two: NOTHING and FREE
    return retimed(staggered, occupies_s, messages.arrives_after_s - messages.occupies_s + occupies_s)


def _one_replicas_hop(problem: Problem, hop: Hop, num_replicas: int, chosen: frozenset[str]) -> Hop:
    def part(transfer: Transfer | None) -> Transfer | None:
        if transfer is None:
            return None
        if isinstance(transfer.link, str) and isinstance(transfer.bytes, float):
            return Transfer(link=transfer.link, bytes=transfer.bytes / (num_replicas if transfer.link in chosen else 1))
        names = [transfer.link] * problem.num_microbatches if isinstance(transfer.link, str) else transfer.link
        sizes = zip(names, problem.row(transfer.bytes).tolist(), strict=True)
        return Transfer(link=transfer.link, bytes=tuple(b / (num_replicas if n in chosen else 1) for n, b in sizes))

    return Hop(forward=part(hop.forward), backward=part(hop.backward))
