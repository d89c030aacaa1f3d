"""The search for orders in the process that plans the steps of a training on chunks: what beats token-level 1F1B.

It begins when the step's plan has been told, so nobody waits for it but the next question; so it tries only the methods
that take hundredths of a second (on chunks, local search has never found anything better than zero-bubble orders).
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from farpipe.cost.chunks import ChunkCosts
from farpipe.errors import FarpipeError
from farpipe.search import search
from farpipe.sequences import StepPlan
from farpipe.simulate import simulate
from farpipe.step import Problem, Rank, Stage

METHODS: Final = ("named", "greedy")
WORTH: Final = 0.005
"""By how much an order has to be faster than the plan's."""
LEAST_S: Final = 0.02
"""Less time than this is not worth to begin with."""


class OrderSearch:
    """Seeks orders for planned steps, when it has loaded what it needs."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "orders")
        self._ready: Future[None] = self._pool.submit(_get_ready)

    def wait(self) -> None:
        """Until everything is loaded; `better` finds nothing before."""
        self._ready.result()

    def better(self, costs: ChunkCosts, plans: Sequence[StepPlan], limit_s: float) -> list[StepPlan] | None:
        """The plans with the orders that were found in about `limit_s`; None where none is faster by enough.

        Chains and memory are kept, and what is recomputed stays.
        """
        if limit_s < LEAST_S or not self._ready.done():
            return None
        each_s = limit_s / len(plans)
        found = [_better(plan, plan.problem(costs), each_s) for plan in plans]
        return found if any(new is not old for new, old in zip(found, plans, strict=True)) else None


def _better(plan: StepPlan, problem: Problem, limit_s: float) -> StepPlan:
    """The plan itself where no order is faster."""
    try:
        found = search(problem, limit_s, methods=METHODS)
    except FarpipeError:
        return plan
    is_worth = found.timeline.makespan_s < (1 - WORTH) * simulate(problem, plan.schedule).makespan_s
    return replace(plan, schedule=found.schedule) if is_worth else plan


def _get_ready() -> None:
    """Load all that a search needs, in one that is soon over."""
    stages = tuple(
        Stage(rank=rank, forward_s=2, input_grad_s=3, weight_grad_s=1, activation_bytes=1) for rank in range(2)
    )
    problem = Problem(
        num_microbatches=3, ranks=(Rank(memory_bytes=9.0),) * 2, stages=stages, hops=(None,), follows=(None, 0, None)
    )
    search(problem, 0.1, methods=METHODS)
