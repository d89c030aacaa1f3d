"""Steps to search in: two sites with a delay, given as CrossPipe gives it."""

from itertools import pairwise

from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer


def two_sites(times=(1.0, 1.0, 1.0), delay=(0.0, 0.0), *, num_ranks=8, num_microbatches=16, in_flight=None, chunks=1):
    """A pipeline with one cut in the middle; `delay` = (latency, message) in forward times.

    Activations live until the end of W, and `in_flight` microbatches fit a rank. `chunks` = 2: a V over the ranks.
    """
    forward_s, input_grad_s, weight_grad_s = (float(t) / chunks for t in times)
    latency_s, message_s = (d * times[0] for d in delay)
    link = Link(latency_s=latency_s, bandwidth_bytes_per_s=1.0)
    order = [*range(num_ranks), *reversed(range(num_ranks))][: num_ranks * chunks]
    stages = tuple(
        Stage(
            rank=rank,
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            activation_bytes=1.0 / chunks,
            weight_stash_bytes=1.0 / chunks,
        )
        for rank in order
    )

    def hop(one, other):
        sites = ["ab"[rank >= num_ranks // 2] for rank in (one, other)]
        if sites[0] == sites[1]:
            return None
        forth, back = (Transfer(link=">".join(pair), bytes=float(message_s)) for pair in (sites, sites[::-1]))
        return Hop(forward=forth, backward=back)

    hops = tuple(hop(*pair) for pair in pairwise(order))
    memory = None if in_flight is None else float(in_flight)
    ranks = (Rank(memory_bytes=memory),) * num_ranks
    links = {"a>b": link, "b>a": link}
    return Problem(num_microbatches=num_microbatches, ranks=ranks, stages=stages, links=links, hops=hops)
