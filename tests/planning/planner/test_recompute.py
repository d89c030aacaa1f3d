"""Recomputation, layers, microbatches and order chosen together."""

import dataclasses
import itertools
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_jobs import stage_cost
from farpipe import planning
from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.schedule.check import peak_memory_bytes
from farpipe.core.schedule.library import order
from farpipe.core.schedule.library.eager import extra_forwards
from farpipe.core.spec import Model, Training
from farpipe.planning import Plan
from farpipe.planning.cost import JobCosts, Layout, place_stages, step_cost
from farpipe.planning.planner.candidates import Candidate
from farpipe.planning.planner.evaluate import Evaluated, describe_recompute, evaluate, finish
from farpipe.planning.planner.in_flight import in_flight_targets, minimum_in_flight
from farpipe.planning.planner.partition import StageModes, divide_layers, every_mode, stage_options
from farpipe.planning.planner.refinement import refine_recomputation
from job_files import LATENT_EXPERTS
from pipelines import pipeline
from planning.planner.every_layout import candidates
from planning.planner.jobs import TRAINING, both_ways, device, job, site

TIGHT = {"pipeline": 4, "data": 1, "tensor": 1, "virtual": 1}


def tight_job(memory_gib=1.6, training=TRAINING, **more):
    """Eight layers on four devices that can't hold 1F1B's activations on all ranks."""
    return job([site("a", on=device(memory_gib=memory_gib))], training=training, **(TIGHT | more))


def costs_of(request):
    return JobCosts(request.model, request.training)


def test_only_stages_that_lack_memory_recompute_and_only_what_is_enough():
    plan = planning.plan(tight_job(num_microbatches=8))
    assert set(plan.recompute) == {"layernorm", "none"}
    assert max(plan.prediction.peak_memory_bytes) <= 1.6 * 2**30 * 15 / 16


def test_nothing_is_recomputed_where_there_is_memory():
    assert set(planning.plan(tight_job(80.0)).recompute) == {"none"}


@pytest.mark.parametrize("way", ["none", "full"])
def test_a_pinned_way_is_kept_by_every_stage(way):
    plan = planning.plan(tight_job(80.0, TRAINING.model_copy(update={"recompute": way})))
    assert set(plan.recompute) == {way}


def test_auto_is_never_slower_than_a_pinned_way():
    free = planning.plan(tight_job(2.0)).prediction.step_s
    for way in ("selective", "full", "layernorm", "layernorm mlp"):
        pinned = planning.plan(tight_job(2.0, TRAINING.model_copy(update={"recompute": way}))).prediction.step_s
        assert free <= pinned * (1 + 1e-9)


def test_more_memory_never_makes_the_plan_slower_here():
    steps = [planning.plan(tight_job(gib)).prediction.step_s for gib in (1.6, 2.0, 3.0, 8.0)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.slow
def test_no_mix_of_ways_with_these_layers_beats_the_plan():
    request = tight_job(num_microbatches=8, schedule="1f1b")
    costs = costs_of(request)
    plan = planning.plan(request)
    (candidate,) = candidates(request)
    layers = [p.num_layers for p in plan.placements]
    times = []
    for ways in itertools.product(("none", "layernorm", "mlp", "layernorm mlp", "full"), repeat=4):
        placements = place_stages(candidate.ranks, ["a"] * 4, layers, ways)
        try:
            found = finish(
                candidate, placements, step_cost(costs, candidate.layout, placements, request.cluster), "1f1b"
            )
        except InfeasibleError:
            continue
        times.append(found.step_s)
    assert plan.prediction.step_s <= min(times) * (1 + 1e-9)


def test_polish_takes_back_recomputation_that_is_not_needed():
    request = tight_job(80.0, num_microbatches=8)
    costs = costs_of(request)
    (candidate,) = candidates(request)
    best = evaluate(request, candidate, costs)
    assert isinstance(best, Evaluated)
    worse = tuple(dataclasses.replace(p, recompute="full") for p in best.placements)
    step = step_cost(costs, candidate.layout, worse, request.cluster)
    refined = refine_recomputation(request, finish(candidate, worse, step, best.schedule.method), costs)
    assert {p.recompute for p in refined.placements} == {"none"}
    assert refined.step_s == pytest.approx(best.step_s)


def test_wishes_begin_with_1f1b_and_hide_the_delay_by_the_closed_form():
    request = job([site("a"), site("b")], both_ways("a", "b", latency_s=0.01), sites=("a", "b"), virtual=1, pipeline=4)
    candidate = next(c for c in candidates(request) if c.layout.num_microbatches == 16)
    found = evaluate(request, candidate, costs_of(request))
    hopes = in_flight_targets(candidate, found.problem)
    assert hopes[0] == minimum_in_flight(candidate) == (4, 3, 2, 1)
    extra = extra_forwards(found.problem)
    assert extra[0] > 0
    assert tuple(a + b for a, b in zip(hopes[0], extra, strict=True)) in hopes
    assert len(set(hopes)) == len(hopes)


def test_the_ways_are_told():
    assert describe_recompute(["none", "none"]) == ""
    assert describe_recompute(["full", "full"]) == ", recomputing all"
    assert describe_recompute(["full", "full", "none"]) == ", stages 0 to 1 recomputing all"
    runs = ["full"] * 5 + ["none"] * 3 + ["full"] * 2
    assert describe_recompute(runs) == ", stages 0 to 4 and 8 to 9 recomputing all"
    assert describe_recompute(["full", "selective", "full"]) == (
        ", stages 0 and 2 recomputing all, stage 1 recomputing attention"
    )
    assert describe_recompute(["layernorm mlp", "none"]) == ", stage 0 recomputing layernorm and mlp"


def test_placements_that_contradict_a_pin_are_refused():
    pinned = tight_job(80.0, Training(**(TRAINING.model_dump() | {"recompute": "full"})))
    plan = planning.plan(pinned)
    wrong = [dataclasses.replace(p, recompute="none") for p in plan.placements]
    with pytest.raises(InputError, match=r"placements\[0\].recompute: 'none', but training.recompute pins 'full'"):
        step_cost(costs_of(pinned), plan.layout, wrong, pinned.cluster)


def test_the_ways_survive_the_plan_file(tmp_path):
    plan = planning.plan(tight_job(num_microbatches=8))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").recompute == plan.recompute


def least_bytes(request, candidate, mode, index, num_layers, in_flight):
    """By the plain functions: seconds of a stage that recomputes so, and the memory that it needs."""
    ends = {"embedding": index == 0, "head": index == len(in_flight) - 1}
    training = request.training.model_copy(update={"recompute": mode})
    cost = stage_cost(request.model, training, candidate.layout, request.cluster.sites[0], num_layers, **ends)
    return cost.seconds, cost.working_bytes + cost.held_bytes(in_flight[index])


@settings(max_examples=25, deadline=None)
@given(
    memory_gib=st.floats(0.8, 6.0),
    flash=st.booleans(),
    experts=st.booleans(),
    layers=st.sampled_from([(2, 2, 2, 2), (1, 2, 2, 3), (3, 2, 2, 1)]),
)
def test_every_stage_takes_the_fastest_set_of_operations_that_fits(memory_gib, flash, experts, layers):
    request = tight_job(memory_gib, TRAINING.model_copy(update={"flash_attention": flash}), num_microbatches=8)
    if experts:
        request = request.model_copy(
            update={"model": Model.model_validate(tomllib.loads(f"num_layers = 8\n{LATENT_EXPERTS}"))}
        )
    (candidate,) = candidates(request)
    in_flight, modes = minimum_in_flight(candidate), every_mode(request.model, request.training)
    assert {"none", "full"} <= set(modes)
    assert flash != ("selective" in modes)
    limit = request.cluster.sites[0].plannable_bytes
    best = []
    for index, count in enumerate(layers):
        each = [least_bytes(request, candidate, mode, index, count, in_flight) for mode in modes]
        best.append(min((seconds for seconds, needed in each if needed <= limit), default=None))
    options = stage_options(StageModes(costs_of(request), candidate), in_flight, modes)
    if None in best:
        with pytest.raises(InfeasibleError):
            divide_layers(8, options, layers)
        return
    chosen = divide_layers(8, options, layers).recompute
    found = [least_bytes(request, candidate, mode, i, layers[i], in_flight) for i, mode in enumerate(chosen)]
    assert [seconds for seconds, _ in found] == pytest.approx(best, rel=1e-9)
    assert all(needed <= limit * (1 + 1e-6) for _, needed in found)


def test_a_plan_with_operations_is_faster_than_all_and_slower_than_none_of_them():
    auto = planning.plan(tight_job(num_microbatches=8)).prediction.step_s
    full = planning.plan(tight_job(training=TRAINING.model_copy(update={"recompute": "full"}), num_microbatches=8))
    nothing = planning.plan(tight_job(80.0, num_microbatches=8)).prediction.step_s
    assert nothing <= auto < 0.9 * full.prediction.step_s


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2, 3, 8])
def test_microbatches_in_flight_are_those_of_interleaved_1f1b(ranks, virtual):
    """Memory that the checker finds, in units of one microbatch on one stage, is what the division of layers plans."""
    problem = pipeline(ranks, 4 * ranks, virtual)
    schedule = order("interleaved" if virtual > 1 else "1f1b", problem)
    planned = minimum_in_flight(Candidate(Layout(ranks, 1, 1, virtual, 1, 4 * ranks), ()))
    for rank, held in enumerate(peak_memory_bytes(problem, schedule)):
        assert round(held * virtual) <= sum(planned[rank::ranks]) <= round(held * virtual) + 1
