"""A process beside a training on chunks that plans its steps: ``python -m farpipe.control.chunk_planner``.

Its first line says what chunks cost and how to plan: ``{"costs": ..., "packing": ..., "num_replicas": ...,
"seeks_orders": ...}``. Then it reads a question a line, ``{"step": ..., "lengths": [...], "budget_s": ..., "search_s":
...}``, and writes an answer a line: ``{"step": ..., "plans": [...], "cuts": [...], "facts": {...}}``, a plan for every
replica, or ``{"step": ..., "error": ...}``. Where a faster order is found within `search_s` of the question, one more
line tells it: ``{"step": ..., "schedules": [...], "facts": {...}}``.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import IO, Any, Final

import numpy as np

from farpipe.control.chunk_orders import OrderSearch
from farpipe.cost.chunks import ChunkCosts
from farpipe.errors import InfeasibleError
from farpipe.schedule import peak_memory_bytes
from farpipe.sequences import Packing, SequencePlan, StepPlan, options_of, plan_sequences, shares, step_plan
from farpipe.sequences.chunk import Ints
from farpipe.simulate import simulate
from farpipe.strict import finite, parse_json

LOW_PRIORITY: Final = 5
"""It gives way to the ranks, but they will wait for it."""


def setting(costs: ChunkCosts, packing: Packing, num_replicas: int, *, seeks_orders: bool = False) -> str:
    """The first line."""
    head = {"costs": costs.to_data(), "packing": packing, "num_replicas": num_replicas, "seeks_orders": seeks_orders}
    return json.dumps(head) + "\n"


def question(step: int, lengths: Ints, budget_s: float, search_s: float = 0.0) -> str:
    """A line that asks for the plan of a step, and for a faster order within `search_s`."""
    asked = {"step": step, "lengths": lengths.tolist(), "budget_s": budget_s, "search_s": search_s}
    return json.dumps(asked) + "\n"


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Answer all questions."""
    head = parse_json(next(iter(questions)), "setting")
    costs, num_replicas = ChunkCosts.from_data(head["costs"], "setting"), int(head["num_replicas"])
    orders = OrderSearch() if head["seeks_orders"] else None
    preload(costs, head["packing"])
    for line in questions:
        began_s, body = time.perf_counter(), parse_json(line, "question")
        lengths = np.array(body["lengths"], np.int64)
        told: dict[str, Any] = {"step": body["step"]}
        try:
            told |= plan_step(costs, head["packing"], lengths, num_replicas, finite(body["budget_s"]))
        except InfeasibleError as error:
            told["error"] = str(error)
        _tell(answers, told)
        if orders is not None and "error" not in told:
            left_s = finite(body["search_s"]) - (time.perf_counter() - began_s)
            _tell(answers, ordered(orders, costs, told, left_s))


def _tell(answers: IO[str], told: dict[str, Any] | None) -> None:
    if told is not None:
        answers.write(json.dumps(told) + "\n")
        answers.flush()


def ordered(orders: OrderSearch, costs: ChunkCosts, told: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
    """The second answer: faster orders for the plans that were told, where there are any."""
    plans = orders.better(costs, [StepPlan.from_data(plan, "answer") for plan in told["plans"]], limit_s)
    if plans is None:
        return None
    facts = predicted(costs, plans) | {"pattern_makespan_s": told["facts"]["predicted_makespan_s"]}
    return {"step": told["step"], "schedules": [plan.schedule.to_data() for plan in plans], "facts": facts}


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
    cuts = [[plan.cut.target_s, plan.cut.token_limit] for plan, _ in found]
    return {"plans": [plan.to_data() for plan in plans], "cuts": cuts, "facts": facts}


def facts_of(costs: ChunkCosts, found: Sequence[SequencePlan], plans: Sequence[StepPlan]) -> dict[str, Any]:
    """Facts and predictions of a step's plans, for the metrics."""
    return {
        "num_chunks": sum(len(plan.chunks) for plan in plans),
        "num_slices": max(plan.num_slices for plan in found),
        "num_pipelines": max(len(plan.pipelines) for plan in found),
        "num_tokens": sum(plan.num_tokens for plan in plans),
        "recomputed_layers": int(sum(plan.recomputed.sum() for plan in plans)),
        **predicted(costs, plans),
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


def main() -> None:
    """Serve whoever started this process."""
    os.nice(LOW_PRIORITY)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this process
    serve(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
