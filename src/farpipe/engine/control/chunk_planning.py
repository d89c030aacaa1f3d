"""Rank 0's part in planning every step of a training on chunks: asks a process of its own, and never waits for long.

Where the plan of the next step is not there when this one ends, the cut that served the last planned step is taken for
the next batch as well, without a search; the run says so, and goes on to ask. Orders that are faster than token-level
1F1B are taken where they have been found by then, and never waited for.
"""

import queue
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import FarpipeError, InfeasibleError, RunError
from farpipe.core.step import Schedule
from farpipe.core.strict import parse_json
from farpipe.engine.control.beside import Beside
from farpipe.engine.control.chunk_planner import facts_of, question, setting
from farpipe.engine.executor.step_plans import PlannedStep
from farpipe.engine.run_spec import RunSpec
from farpipe.planning.workload import StepPlan, options_of, plan_with_cut, shares, step_plan
from farpipe.planning.workload.chunk import Ints
from farpipe.planning.workload.cut import Cut

BUDGET_S: Final = 1.5
"""Longest time to plan one step."""
SHARE: Final = 0.5
"""Share of the last step's predicted time that planning the next may take; LEAST_S at least."""
LEAST_S: Final = 0.1
SEARCH_SHARE: Final = 0.75
"""Share of the same time after which the search for a faster order of the next step ends."""
MAX_SEARCH_S: Final = 1.0
PATIENCE_S: Final = 0.25
"""Time for which the end of a step waits for a late plan."""
LATE_S: Final = 60.0
"""Time after which a plan that no earlier cut can replace is given up."""
LOADING_S: Final = 300.0
"""Time after which the first plan is given up: before it the process loads all that it needs, and numba may compile."""


class ChunkPlanning:
    """The StepPlanner of `farpipe.engine.executor.step_plans` that asks a process beside the run."""

    def __init__(self, run: RunSpec, run_dir: Path | None = None) -> None:
        assert run.chunk_costs is not None
        assert run.plan.data.packing is not None
        self._costs, self._packing, self._num_replicas = run.chunk_costs, run.plan.data.packing, run.num_replicas
        self._groups: dict[str, Any] = {"group_costs": run.group_costs, "num_processes": run.plan.context}
        self._lengths: dict[int, Ints] = {}
        self._cuts: list[Cut] = []
        """Cut of every replica, from the last plan that was searched."""
        self._predicted_s, seeks_orders = BUDGET_S / SHARE, run.seeks_orders
        head = setting(self._costs, self._packing, self._num_replicas, seeks_orders=seeks_orders, **self._groups)
        self.beside = Beside("chunks", head)

    def ask(self, step: int, lengths: Ints) -> None:
        if self.beside.has_ended:
            self.beside.restart()
        # Planning runs while the ranks compute the step before, so up to SHARE of that step's predicted time costs
        # nothing. Before the first prediction it gets BUDGET_S, for which only the start of the run waits. Faster
        # orders are sought in what is left of the step once the plan has been sent.
        self._lengths[step] = lengths
        budget_s = min(BUDGET_S, max(LEAST_S, SHARE * self._predicted_s))
        self.beside.send(question(step, lengths, budget_s, min(MAX_SEARCH_S, SEARCH_SHARE * self._predicted_s)))

    def answer(self, step: int, *, patient: bool) -> PlannedStep:
        lengths = self._lengths.pop(step)
        wait_s = PATIENCE_S if not patient else LATE_S if self._cuts else LOADING_S
        found = self._searched(step, wait_s)
        if found is not None:
            return found
        # Better a step on the last good cut, even if it is slower, than ranks that idle. Only without such a cut, or
        # where it does not fit these lengths, is there nothing to do but to wait for the planner.
        why = "its planner has ended" if self.beside.has_ended else f"it took more than {wait_s:g} s too long"
        if self._cuts:
            try:
                return self._as_before(step, lengths, why)
            except InfeasibleError as error:
                why = f"{why}, and the last good cut does not fit: {error}"
        found = None if patient else self._waited_for(step, lengths)
        if found is None:
            change = "; pin layout.context and data, which is planned faster" if self._groups["group_costs"] else ""
            why += "" if patient else f", and {LATE_S:g} s more did not help"
            raise RunError(f"step {step} could not be planned: {why}{change}")
        return found

    def _waited_for(self, step: int, lengths: Ints) -> PlannedStep | None:
        """A late answer that no earlier cut can replace, of a new process where the last one has ended."""
        if self.beside.has_ended:
            self.ask(step, lengths)
            del self._lengths[step]
        return self._searched(step, LATE_S)

    def _searched(self, step: int, wait_s: float) -> PlannedStep | None:
        """The answer of the process, if it comes in time; what it says of earlier steps is learnt from."""
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                line = self.beside.receive(max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                return None
            if line is None:
                return None
            body = self._read(line)
            if body is not None and body["step"] == step and "schedules" not in body:
                return self._ordered(self._planned(body, step), step)

    def _read(self, line: str) -> dict[str, Any] | None:
        """An answer, whose cuts are remembered; None for nonsense, after which the process is ended."""
        try:
            body: dict[str, Any] = parse_json(line, "answer of the planner")
            cuts = [
                Cut(float(target_s), int(limit), options_of(self._packing).rule, equal=equal)
                for target_s, limit, equal in body.get("cuts", ())
            ]
        except (FarpipeError, KeyError, TypeError, ValueError):
            self.beside.kill()
            return None
        self._cuts = cuts or self._cuts
        return body

    def _planned(self, body: dict[str, Any], step: int) -> PlannedStep:
        if "error" in body:
            raise InfeasibleError(str(body["error"]))
        plans = tuple(StepPlan.from_data(plan, f"plan of step {step}") for plan in body["plans"])
        self._predicted_s = body["facts"]["predicted_makespan_s"]
        return PlannedStep(plans, body["facts"])

    def _ordered(self, planned: PlannedStep, step: int) -> PlannedStep:
        """The same in a faster order, if one has been found by now."""
        try:
            line = self.beside.receive()
        except queue.Empty:
            return planned
        body = None if line is None else self._read(line)
        if body is None or body["step"] != step or "schedules" not in body:
            return planned
        self._predicted_s = body["facts"]["predicted_makespan_s"]
        orders = [Schedule.from_data(order, f"order of step {step}") for order in body["schedules"]]
        plans = tuple(replace(plan, schedule=order) for plan, order in zip(planned.plans, orders, strict=True))
        return PlannedStep(plans, planned.facts | body["facts"])

    def _as_before(self, step: int, lengths: Ints, why: str) -> PlannedStep:
        """The last good cut for this batch."""
        began_s, options = time.perf_counter(), options_of(self._packing)
        parts = zip(shares(self._costs, lengths, self._num_replicas), self._cuts, strict=True)
        found = [(plan_with_cut(self._costs, lengths[mine], cut, options), mine) for mine, cut in parts]
        plans = tuple(step_plan(plan, mine) for plan, mine in found)
        facts = facts_of(self._costs, [plan for plan, _ in found], plans)
        facts |= {"planning_s": time.perf_counter() - began_s, "origin": "last good cut"}
        self._predicted_s = facts["predicted_makespan_s"]
        return PlannedStep(plans, facts, f"step {step} runs with the last good cut, not with a plan of its own: {why}")

    def close(self) -> None:
        self.beside.close()
