"""Compiles the kernels of the orders into numba's cache: ``python -m farpipe.planning.search.compile_ahead``.

They are half of what the first plan after an installation compiles; the other half, the planner's estimates, is needed
first and compiled by the process that plans. In the order in which a plan asks for them, so that it finds each ready.
"""

import gc
from collections.abc import Sequence

from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.planning.search.greedy import greedy_orders
from farpipe.planning.search.local import improve
from farpipe.planning.search.step import search_step


def small_problem(follows: Sequence[int | None] | None = None) -> Problem:
    """Step of two stages and four microbatches, in which a search loads all that it needs and is soon over."""
    stages = tuple(
        Stage(rank=rank, forward_s=2.0, input_grad_s=3.0, weight_grad_s=1.0, activation_bytes=1.0) for rank in range(2)
    )
    link = Link(latency_s=2.0, bandwidth_bytes_per_s=1.0)
    return Problem(
        num_microbatches=4,
        ranks=(Rank(memory_bytes=3.0),) * 2,
        stages=stages,
        links={"a>b": link, "b>a": link},
        hops=(Hop(forward=Transfer(link="a>b", bytes=1.0), backward=Transfer(link="b>a", bytes=1.0)),),
        follows=None if follows is None else tuple(follows),
    )


def main() -> None:
    """Order and play a small step in each way that a plan does."""
    problem = small_problem()
    simulate(problem, order("zb-1p", problem))
    step = search_step(problem)
    improve(step, greedy_orders(step), num_evaluations=8)


if __name__ == "__main__":
    gc.disable()
    main()
