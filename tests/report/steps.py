"""Steps over two sites for the tests of pictures, tables and traces."""

import dataclasses
from itertools import pairwise

import numpy as np

from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Sync, Transfer
from farpipe.report.views import RunView

GIB = 2.0**30


def two_sites(num_ranks, num_microbatches, per_rank=1, latency_s=0.5, sync=False, seed=None, memory_bytes=40 * GIB):
    """A pipeline whose first half of ranks is in ``east`` and whose second half is in ``west``.

    Times are halves and quarters, so that they are exact; `seed` makes every action up to a tenth slower.
    """
    sites = tuple("east" if rank < (num_ranks + 1) // 2 else "west" for rank in range(num_ranks))
    rng = None if seed is None else np.random.default_rng(seed)

    def seconds(value):
        return value if rng is None else tuple((value * (1 + 0.1 * rng.random(num_microbatches))).tolist())

    def name(a, b):
        return f"{sites[a]}>{sites[b]}" if sites[a] != sites[b] else f"{sites[a]}:{a}>{sites[b]}:{b}"

    places = [stage % num_ranks for stage in range(num_ranks * per_rank)]
    links, hops = {}, []
    for a, b in pairwise(places):
        far = sites[a] != sites[b]
        for end in (name(a, b), name(b, a)) if a != b else ():
            links[end] = Link(latency_s=latency_s if far else 0.0, bandwidth_bytes_per_s=4.0 if far else 64.0)
        hops.append(
            Hop(forward=Transfer(link=name(a, b), bytes=1.0), backward=Transfer(link=name(b, a), bytes=1.0))
            if a != b
            else None
        )
    stages = [
        Stage(
            rank=rank,
            forward_s=seconds(1.0 / per_rank),
            input_grad_s=seconds(1.0 / per_rank),
            weight_grad_s=seconds(0.5 / per_rank),
            activation_bytes=2 * GIB / per_rank,
            weight_stash_bytes=GIB / per_rank,
        )
        for rank in places
    ]
    collective = Transfer(link=next(iter(links), ""), bytes=1.0) if sync else None
    return Problem(
        num_microbatches=num_microbatches,
        ranks=tuple(Rank(memory_bytes=memory_bytes, static_bytes=8 * GIB) for _ in sites),
        stages=tuple(stages),
        links=dict(sorted(links.items())),
        hops=tuple(hops),
        sync=tuple(Sync(gather=collective, reduce=collective) for _ in stages) if sync else None,
    )


def sites_of(num_ranks):
    return tuple("east" if rank < (num_ranks + 1) // 2 else "west" for rank in range(num_ranks))


def play(problem, method="1f1b"):
    """The predicted timeline of a named order."""
    return simulate(problem, order(method, problem))


def as_measured(timeline):
    return dataclasses.replace(timeline, source="measured")


def metrics(num_steps, step_s=2.0):
    """Lines as in metrics.jsonl; the first step is cold."""
    return [
        {"step": i, "loss": 5.0 / (i + 1), "step_s": step_s * (3 if i == 0 else 1), "tokens_per_s": 100.0, "extra": {}}
        for i in range(num_steps)
    ]


def run_view(num_ranks=2, num_microbatches=4, method="1f1b", num_steps=0, **options):
    """A run; with `num_steps` it was measured as well."""
    problem = two_sites(num_ranks, num_microbatches, **options)
    slower = two_sites(num_ranks, num_microbatches, seed=1, **options)
    measured = as_measured(simulate(slower, order(method, problem))) if num_steps else None
    lines = metrics(num_steps) if num_steps else ()
    return RunView(method, problem, play(problem, method), measured, lines, 0.25, sites_of(num_ranks))
