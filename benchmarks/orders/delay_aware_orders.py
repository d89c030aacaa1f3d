"""Gain of an order that knows the delay: step time / (m (F + I + W)) of 1F1B, greedy and auto, two sites, p=8.

The limit to hold this against is the lower bound beside it (equal where auto proved its order optimal). F, I, W are
relative; the delay is (latency, message) in forward times; K microbatches fit a rank until the end of their W.
"""

import itertools
import json
import time
from typing import Any

from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.planning.search import search

NUM_RANKS, NUM_MICROBATCHES, TIME_LIMIT_S = 8, 16, 20.0
ROWS = [
    ((1, 1, 1), (1, 0)),
    ((1, 1, 1), (2, 2)),
    ((76, 93, 41), (0, 0)),
    ((76, 93, 41), (2, 0)),
    ((76, 93, 41), (2, 2)),
]


def two_sites(
    times: tuple[int, int, int],
    delay: tuple[int, int],
    in_flight: int,
    num_ranks: int = NUM_RANKS,
    num_microbatches: int = NUM_MICROBATCHES,
) -> Problem:
    """Half of the ranks at each of two sites, a link for each direction between them."""
    forward_s, input_grad_s, weight_grad_s = map(float, times)
    link = Link(latency_s=delay[0] * forward_s, bandwidth_bytes_per_s=1.0)
    size = delay[1] * forward_s
    cut = Hop(forward=Transfer(link="a>b", bytes=size), backward=Transfer(link="b>a", bytes=size))
    stages = [
        Stage(
            rank=rank,
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            activation_bytes=1.0,
            weight_stash_bytes=1.0,
        )
        for rank in range(num_ranks)
    ]
    return Problem(
        num_microbatches=num_microbatches,
        ranks=(Rank(memory_bytes=float(in_flight)),) * num_ranks,
        stages=tuple(stages),
        links={"a>b": link, "b>a": link},
        hops=tuple(cut if rank == num_ranks // 2 - 1 else None for rank in range(num_ranks - 1)),
    )


def row(times: tuple[int, int, int], delay: tuple[int, int], in_flight: int) -> dict[str, Any]:
    """One line of the table."""
    problem = two_sites(times, delay, in_flight)
    ideal_s = NUM_MICROBATCHES * float(sum(times))
    begin = time.perf_counter()
    greedy = search(problem, TIME_LIMIT_S, methods=["greedy"])
    found = search(problem, TIME_LIMIT_S)
    return {
        "1f1b": round(simulate(problem, order("1f1b", problem)).makespan_s / ideal_s, 4),
        "greedy": round(greedy.timeline.makespan_s / ideal_s, 4),
        "auto": round(found.timeline.makespan_s / ideal_s, 4),
        "lower_bound": round(found.lower_bound_s / ideal_s, 4),
        "proven": found.proven,
        "made_by": found.schedule.method,
        "elapsed_s": round(time.perf_counter() - begin, 2),
    }


def main() -> None:
    """Measure and print."""
    search(two_sites((1, 2, 1), (1, 1), 2), 1.0)  # compile
    cases = itertools.product(ROWS, (8, 16))
    rows = {f"F,I,W {t}, delay {d}, K={k}": row(t, d, k) for (t, d), k in cases}
    print(json.dumps({"benchmark": "delay_aware_orders", "step time / ideal": rows}))


if __name__ == "__main__":
    main()
