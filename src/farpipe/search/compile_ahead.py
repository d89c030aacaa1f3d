"""Kernels of the orders, compiled into numba's cache by ``python -m farpipe.search.compile_ahead`` as a process.

They are half of what the first plan after an installation compiles; the other half, the planner's estimates, is needed
first and compiled by the process that plans. In the order in which a plan asks for them, so that it finds each ready.
"""

import gc

from farpipe.schedule.library import order
from farpipe.search.greedy import greedy_orders
from farpipe.search.local import improve
from farpipe.search.step import search_step
from farpipe.simulate import simulate
from farpipe.step import Hop, Link, Problem, Rank, Stage, Transfer


def main() -> None:
    """Order and play a step of two stages in each way that a plan does."""
    ranks = (Rank(memory_bytes=8.0),) * 2
    stages = tuple(
        Stage(rank=rank, forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, activation_bytes=1.0) for rank in range(2)
    )
    link = Link(latency_s=1.0, bandwidth_bytes_per_s=1.0)
    hop = Hop(forward=Transfer(link="0>1", bytes=1.0), backward=Transfer(link="1>0", bytes=1.0))
    problem = Problem(num_microbatches=2, ranks=ranks, stages=stages, links={"0>1": link, "1>0": link}, hops=(hop,))
    simulate(problem, order("zb-1p", problem))
    step = search_step(problem)
    improve(step, greedy_orders(step), num_evaluations=8)


if __name__ == "__main__":
    gc.disable()
    main()
