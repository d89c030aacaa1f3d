"""Plans of the steps of a training on chunks, as the helper process ``chunks`` makes them.

The first line says what chunks cost and how to plan: ``{"costs": ..., "packing": ..., "num_replicas": ...,
"seeks_orders": ..., "group_costs": [...], "num_processes": ...}``, the last two for chunks that processes share in
groups. A question is ``{"step": ..., "lengths": [...], "budget_s": ..., "search_s": ...}``, and its answer
``{"step": ..., "plans": [...], "cuts": [...], "facts": {...}}``, a plan for every replica, or ``{"step": ...,
"error": ...}``. Where a faster order is found within `search_s` of the question, one more line has it: ``{"step": ...,
"schedules": [...], "facts": {...}}``.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import numpy as np

from farpipe.core.errors import FarpipeError, InfeasibleError
from farpipe.core.schedule import peak_memory_bytes
from farpipe.core.simulate import simulate
from farpipe.core.step import Problem
from farpipe.core.strict import finite
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.search import search
from farpipe.planning.search.compile_ahead import small_problem
from farpipe.planning.workload import (
    Packing,
    SequencePlan,
    StepPlan,
    options_of,
    plan_group_step,
    plan_sequences,
    shares,
    step_plan,
)
from farpipe.planning.workload.chunk import Ints
from farpipe.planning.workload.group_steps import degrees_of, makespan_s

METHODS: Final = ("named", "greedy")
WORTH: Final = 0.005
"""Smallest gain for which an order replaces the plan's."""
LEAST_S: Final = 0.02
"""Less time than this is not worth to begin with."""


class OrderSearch:
    """Seeks orders for planned steps that beat token-level 1F1B, when it has loaded what it needs.

    It begins when the step's plan has been sent, so only the next request waits for it; so it tries only the
    methods that take hundredths of a second (on chunks, local search has never found anything better than zero-bubble
    orders).
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "orders")
        chained = small_problem(follows=(None, 0, None, None))
        self._ready: Future[object] = self._pool.submit(search, chained, 0.1, methods=METHODS)

    def wait(self) -> None:
        """Wait until everything is loaded; `better` finds nothing before."""
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


def setting(
    costs: ChunkCosts,
    packing: Packing,
    num_replicas: int,
    *,
    seeks_orders: bool = False,
    group_costs: Sequence[ChunkCosts] = (),
    num_processes: int = 1,
) -> str:
    """The first line; with `group_costs` each step is planned on groups of `num_processes`."""
    head = {
        "costs": costs.to_data(),
        "packing": packing,
        "num_replicas": num_replicas,
        "seeks_orders": seeks_orders,
        "group_costs": [one.to_data() for one in group_costs],
        "num_processes": num_processes,
    }
    return json.dumps(head) + "\n"


def question(step: int, lengths: Ints, budget_s: float, search_s: float = 0.0) -> str:
    """A line that asks for the plan of a step, and for a faster order within `search_s`."""
    asked = {"step": step, "lengths": lengths.tolist(), "budget_s": budget_s, "search_s": search_s}
    return json.dumps(asked) + "\n"


def prepare(head: dict[str, Any]) -> Callable[[dict[str, Any]], Iterator[dict[str, Any]]]:
    """Load everything that a plan needs; what answers questions, with a second answer where a faster order is found."""
    costs, num_replicas = ChunkCosts.from_data(head["costs"], "setting"), int(head["num_replicas"])
    degrees = enumerate(head["group_costs"])
    group_costs = [ChunkCosts.from_data(one, f"setting: group_costs[{index}]") for index, one in degrees]
    orders = OrderSearch() if head["seeks_orders"] and not group_costs else None  # one stage has one order
    preload(costs, head["packing"])

    def answering(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        began_s, lengths = time.perf_counter(), np.array(body["lengths"], np.int64)
        answer: dict[str, Any] = {"step": body["step"]}
        try:
            if group_costs:
                answer |= plan_in_groups(group_costs, lengths, head["num_processes"])
            else:
                answer |= plan_step(costs, head["packing"], lengths, num_replicas, finite(body["budget_s"]))
        except InfeasibleError as error:
            answer["error"] = str(error)
        yield answer
        if orders is not None and "error" not in answer:
            left_s = finite(body["search_s"]) - (time.perf_counter() - began_s)
            if (faster := ordered(orders, costs, answer, left_s)) is not None:
                yield faster

    return answering


def ordered(orders: OrderSearch, costs: ChunkCosts, first: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
    """The second answer: faster orders for the plans of the `first`, where there are any."""
    plans = orders.better(costs, [StepPlan.from_data(plan, "answer") for plan in first["plans"]], limit_s)
    if plans is None:
        return None
    facts = predicted(costs, plans) | {"pattern_makespan_s": first["facts"]["predicted_makespan_s"]}
    return {"step": first["step"], "schedules": [plan.schedule.to_data() for plan in plans], "facts": facts}


def plan_step(costs: ChunkCosts, packing: Packing, lengths: Ints, num_replicas: int, budget_s: float) -> dict[str, Any]:
    """The plans of a batch for every replica, with the cut that each was made by and what was predicted."""
    began_s, options = time.perf_counter(), options_of(packing, budget_s / num_replicas)
    parts = shares(costs, lengths, num_replicas)
    found = [(plan_sequences(costs, lengths[mine], options), mine) for mine in parts]
    plans = [step_plan(plan, mine) for plan, mine in found]
    facts = facts_of(costs, [plan for plan, _ in found], plans) | {
        "planning_s": time.perf_counter() - began_s,
        "origin": "searched",
    }
    cuts = [[plan.cut.target_s, plan.cut.token_limit, plan.cut.equal] for plan, _ in found]
    return {"plans": [plan.to_data() for plan in plans], "cuts": cuts, "facts": facts}


def plan_in_groups(costs: Sequence[ChunkCosts], lengths: Ints, num_processes: int) -> dict[str, Any]:
    """The same for one stage whose processes share chunks in groups; `costs`: of every degree, ascending."""
    began_s = time.perf_counter()
    placed, step = plan_group_step(costs, lengths, num_processes, options_of("elastic"))
    pipelines = [pipeline for one in placed for pipeline in one.plan.pipelines]
    peaks = [(each.peak_memory_bytes[0], each.problem.ranks[0].static_bytes) for each in pipelines]
    facts = facts_of_plans([one.plan for one in placed], [step]) | {
        "groups": {str(degree): count for degree, count in degrees_of(placed).items()},
        "order": step.schedule.method,
        "predicted_makespan_s": makespan_s(placed),
        "predicted_peak_bytes": [max(peak for peak, _ in peaks)],
        "predicted_held_bytes": [max(peak - static for peak, static in peaks)],
        "planning_s": time.perf_counter() - began_s,
        "origin": "searched",
    }
    return {"plans": [step.to_data()], "cuts": [], "facts": facts}


def facts_of(costs: ChunkCosts, found: Sequence[SequencePlan], plans: Sequence[StepPlan]) -> dict[str, Any]:
    """Facts and predictions of a step's plans, for the metrics."""
    return facts_of_plans(found, plans) | predicted(costs, plans)


def facts_of_plans(found: Sequence[SequencePlan], plans: Sequence[StepPlan]) -> dict[str, Any]:
    """The facts alone."""
    return {
        "num_chunks": sum(len(plan.chunks) for plan in plans),
        "num_slices": max(plan.num_slices for plan in found),
        "num_pipelines": max(len(plan.pipelines) for plan in found),
        "num_tokens": sum(plan.num_tokens for plan in plans),
        "recomputed_layers": int(sum(plan.recomputed.sum() for plan in plans)),
        "keeps_attention": any(plan.keeps_attention for plan in plans),
    }


def predicted(costs: ChunkCosts, plans: Sequence[StepPlan]) -> dict[str, Any]:
    """Predictions of a step's plans; of several replicas that of the slowest, and of the fullest."""
    problems = [plan.problem(costs) for plan in plans]
    times = [simulate(problem, plan.schedule).makespan_s for problem, plan in zip(problems, plans, strict=True)]
    peaks = [peak_memory_bytes(problem, plan.schedule) for problem, plan in zip(problems, plans, strict=True)]
    held = [
        [peak - rank.static_bytes for peak, rank in zip(of_plan, problem.ranks, strict=True)]
        for of_plan, problem in zip(peaks, problems, strict=True)
    ]
    return {
        "order": ", ".join(dict.fromkeys(plan.schedule.method for plan in plans)),
        "predicted_makespan_s": max(times),
        "predicted_peak_bytes": [max(column) for column in zip(*peaks, strict=True)],
        "predicted_held_bytes": [max(column) for column in zip(*held, strict=True)],
        **({"predicted_replicas_s": times} if len(times) > 1 else {}),
    }


def preload(costs: ChunkCosts, packing: Packing) -> None:
    """Load all that a plan needs, in one that is soon made; whether it fits does not matter."""
    try:
        plan_step(costs, packing, np.array([4, 2, 1]), 1, 0.1)
    except InfeasibleError:
        return
