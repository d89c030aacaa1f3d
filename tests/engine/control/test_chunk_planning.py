"""Planning beside a training: a process of its own, never waited for long, whose death or slowness is survived."""

import json
import queue
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from chunk_runs import PlanningHere, make_run, train_whole, write_documents
from farpipe.core.errors import InfeasibleError, RunError
from farpipe.core.schedule import check
from farpipe.core.simulate import simulate
from farpipe.core.step import Schedule
from farpipe.engine.control import chunk_planning
from farpipe.engine.control.beside import answers
from farpipe.engine.control.chunk_planner import OrderSearch, ordered, plan_step, prepare, question, setting
from farpipe.engine.control.chunk_planning import ChunkPlanning
from farpipe.engine.executor.step_plans import PlannedStep
from farpipe.engine.launch.run import run as run_here
from farpipe.engine.train import train_rank
from farpipe.planning.workload import StepPlan
from in_process import run_ranks
from sound_chunks import check_chunks
from trainings import metrics

LENGTHS = np.array([60, 3, 41, 7, 1])


@pytest.fixture
def documents(tmp_path):
    return write_documents(tmp_path / "text")


@pytest.fixture
def planning(documents):
    made = ChunkPlanning(make_run(documents))
    yield made
    made.close()


def test_questions_and_answers_are_lines(documents):
    run = make_run(documents)
    lines = [setting(run.chunk_costs, "elastic", 1), question(3, LENGTHS, 0.1), question(4, np.array([10**9]), 0.1)]
    tiny = run.chunk_costs.base.ranks[0].model_copy(update={"memory_bytes": 1e6})
    assert tiny.memory_bytes == 1e6
    first, second = (json.loads(json.dumps(answer)) for answer in answers(prepare, lines))
    check_chunks(StepPlan.from_data(first["plans"][0], "plan").chunks, LENGTHS)
    assert first["facts"]["num_tokens"] == LENGTHS.sum()
    assert second["step"] == 4
    assert "does not fit in any number of slices" in second["error"]


@pytest.mark.slow
def test_a_process_plans_and_what_does_not_fit_is_told(planning):
    planning.ask(0, LENGTHS)
    planned = planning.answer(0, patient=True)
    assert planned.facts["origin"] == "searched"
    assert planned.warning == ""
    check_chunks(planned.plans[0].chunks, LENGTHS)
    planning.ask(1, np.array([10**9]))
    with pytest.raises(InfeasibleError, match="does not fit in any number of slices"):
        planning.answer(1, patient=True)


@pytest.mark.slow
def test_the_last_good_cut_stands_in_for_a_plan_that_is_late(planning, monkeypatch):
    planning.ask(0, LENGTHS)
    planning.answer(0, patient=True)
    monkeypatch.setattr(chunk_planning, "PATIENCE_S", 0.0)
    monkeypatch.setattr(planning, "_searched", lambda step, wait_s: None)
    planning.ask(1, LENGTHS[::-1].copy())
    planned = planning.answer(1, patient=False)
    assert planned.facts["origin"] == "last good cut"
    assert "step 1 runs with the last good cut" in planned.warning
    check_chunks(planned.plans[0].chunks, LENGTHS[::-1])
    monkeypatch.undo()
    planning.ask(2, LENGTHS)
    assert planning.answer(2, patient=True).facts["origin"] == "searched", "the late answer is passed over"


@pytest.mark.slow
def test_a_planner_that_dies_is_replaced(planning):
    planning.ask(0, LENGTHS)
    planning.answer(0, patient=True)
    planning.beside.kill()
    assert planning.beside.process.wait(60)
    planning._lengths[1] = LENGTHS
    planned = planning.answer(1, patient=False)
    assert "its planner has ended" in planned.warning
    planning.ask(2, LENGTHS)
    assert planning.answer(2, patient=True).facts["origin"] == "searched"


@pytest.mark.slow
def test_a_planner_that_dies_is_asked_anew_where_no_cut_can_stand_in(planning, monkeypatch):
    monkeypatch.setattr(planning, "_read", without_cuts(planning._read))
    planning.ask(0, LENGTHS)
    planning.answer(0, patient=True)
    planning.ask(1, LENGTHS)
    planning.beside.kill()
    assert planning.beside.process.wait(60)
    planned = planning.answer(1, patient=False)
    assert planned.facts["origin"] == "searched"
    assert not planned.warning


def without_cuts(read):
    """The same of answers that have no cuts, as those of groups."""

    def passed_on(line):
        return read(json.dumps(json.loads(line) | {"cuts": []}))

    return passed_on


def test_without_any_plan_the_run_ends_with_the_reason(planning, monkeypatch):
    monkeypatch.setattr(chunk_planning, "LATE_S", 0.0)
    monkeypatch.setattr(chunk_planning, "PATIENCE_S", 0.0)
    monkeypatch.setattr(planning, "_searched", lambda step, wait_s: None)
    planning.ask(0, LENGTHS)
    with pytest.raises(RunError, match="step 0 could not be planned"):
        planning.answer(0, patient=True)


@pytest.mark.slow
def test_what_went_wrong_with_planning_is_in_the_metrics(documents, tmp_path, monkeypatch):
    monkeypatch.setattr(ChunkPlanning, "_searched", late_after(ChunkPlanning._searched, first=1))
    run = make_run(documents)
    place = tmp_path / "run"
    place.mkdir()
    run_ranks(2, lambda peers: train_rank(run, peers, place, make_planner=ChunkPlanning))
    lines = metrics(place)
    assert [line["chunks"]["origin"] for line in lines] == ["searched"] + ["last good cut"] * 3
    told = [warning for line in lines for warning in line.get("warnings", ())]
    assert [warning.split(" runs with")[0] for warning in told] == ["step 1", "step 2", "step 3"]


def late_after(searched, first):
    """The same, but it never comes in time after so many answers."""
    answered = []

    def late(self, step, wait_s):
        if len(answered) >= first:
            return None
        answered.append(step)
        return searched(self, step, wait_s)

    return late


def test_faster_orders_keep_chains_and_memory_and_what_is_not_ready_is_not_waited_for(documents):
    run, orders = make_run(documents, ranks=4), OrderSearch()
    told = plan_step(run.chunk_costs, "elastic", LENGTHS, 1, 0.1) | {"step": 3}
    orders._ready = Future()
    assert ordered(orders, run.chunk_costs, told, 0.2) is None, "nothing is loaded yet"
    orders = OrderSearch()
    orders.wait()
    assert ordered(orders, run.chunk_costs, told, 0.0) is None, "no time is left"
    found = ordered(orders, run.chunk_costs, told, 0.3)
    plan = StepPlan.from_data(told["plans"][0], "plan")
    problem, order = plan.problem(run.chunk_costs), Schedule.from_data(found["schedules"][0], "order")
    check(problem, order)
    pattern_s = simulate(problem, plan.schedule).makespan_s
    assert found["facts"]["predicted_makespan_s"] == simulate(problem, order).makespan_s < 0.995 * pattern_s
    assert found["facts"]["pattern_makespan_s"] == pattern_s


def test_an_order_that_is_found_in_time_is_taken_and_otherwise_the_pattern_runs(documents, planning, monkeypatch):
    costs, orders = make_run(documents, ranks=4).chunk_costs, OrderSearch()
    orders.wait()
    first = plan_step(costs, "elastic", LENGTHS, 1, 0.1) | {"step": 1}
    second = ordered(orders, costs, first, 0.3)
    for lines, is_faster in (([first, second], True), ([first], False), ([first, second | {"step": 0}], False)):
        monkeypatch.setattr(planning, "beside", Lines(lines))
        planning._lengths[1] = LENGTHS
        planned = planning.answer(1, patient=False)
        assert (planned.facts["order"] != "chunk-1f1b") == is_faster
        assert planned.facts["order"] == planned.plans[0].schedule.method
        problem = planned.plans[0].problem(costs)
        check(problem, planned.plans[0].schedule)
        makespan_s = simulate(problem, planned.plans[0].schedule).makespan_s
        assert planned.facts["predicted_makespan_s"] == makespan_s == planning._predicted_s


class Lines:
    """A process beside the run that has written these lines."""

    has_ended = False

    def __init__(self, lines):
        self.lines = list(map(json.dumps, lines))

    def receive(self, wait_s=0.0):
        if not self.lines:
            raise queue.Empty
        return self.lines.pop(0)


@pytest.mark.slow
def test_training_in_searched_orders_is_training_on_whole_documents(documents, tmp_path):
    run, place, orders = make_run(documents, ranks=4), tmp_path / "run", OrderSearch()
    orders.wait()
    place.mkdir()
    run_ranks(4, lambda peers: train_rank(run, peers, place, make_planner=partial(SearchingHere, orders=orders)))
    lines = metrics(place)
    assert all(line["chunks"]["order"] != "chunk-1f1b" for line in lines)
    losses, norms, _ = train_whole(run, torch.float32)
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-3)


class SearchingHere(PlanningHere):
    """The same with an order that is sought when the answer is asked for."""

    def __init__(self, run, run_dir=None, *, orders):
        super().__init__(run, run_dir)
        self.orders = orders

    def answer(self, step, *, patient):
        planned = super().answer(step, patient=patient)
        told = {"step": step, "plans": [plan.to_data() for plan in planned.plans], "facts": planned.facts}
        found = ordered(self.orders, self.run.chunk_costs, told, 0.3)
        schedules = [Schedule.from_data(order, "order") for order in found["schedules"]]
        plans = tuple(replace(plan, schedule=order) for plan, order in zip(planned.plans, schedules, strict=True))
        return PlannedStep(plans, planned.facts | found["facts"])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "sleep"])
def test_real_processes_over_an_emulated_wan(documents, tmp_path, device):
    run = make_run(documents, latency_s=0.002, device=device)
    summary = run_here(run, tmp_path / "run")
    assert summary.num_steps == 4
    lines = metrics(tmp_path / "run")
    first, *others = (line["chunks"]["origin"] for line in lines)
    assert first == "searched"
    assert {*others} <= {"searched", "last good cut"}, "a busy machine may be late with the plan of a later step"
    if device == "cpu":
        losses, _, _ = train_whole(run, torch.float32)
        assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
