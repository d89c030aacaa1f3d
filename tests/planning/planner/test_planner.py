import json
import re

import pytest

from farpipe import planning
from farpipe.core.errors import InfeasibleError, InputError, UsageError
from farpipe.core.schedule import check
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.simulate import simulate
from farpipe.core.spec import Pins, parse_job
from farpipe.core.spec.model import Experts
from farpipe.planning import Explanation, Plan, refine
from farpipe.planning.cost import JobCosts, PartTimes, Profile, model_shape
from farpipe.planning.explain import after_search
from farpipe.planning.explain.changes import _ideas
from farpipe.planning.planner.evaluate import Evaluated, Rejected, evaluate
from farpipe.planning.planner.infeasible import smallest_changes
from farpipe.planning.planner.orders import best_order, try_orders
from farpipe.planning.planner.search import search
from planning.planner.every_layout import candidates
from planning.planner.jobs import TRAINING, both_ways, device, job, planned, site, why


def two_sites(pipeline=None, tensor=None, **options):
    return job([site("a"), site("b")], both_ways("a", "b", **options), pipeline=pipeline, tensor=tensor)


DEEP = """
[model]
preset = "llama-3-405b"
[training]
sequence_length = 8192
global_batch = {batch}
matmul = "fp8"
fp8_param_gather = true
grad_reduce_in_fp32 = false
tp_comm_overlap = true
zero1 = true
[[cluster.sites]]
name = "zurich"
device = "h100"
num_devices = {num_devices}
"""


def costs_of(request):
    return JobCosts(request.model, request.training)


@pytest.mark.slow
def test_the_plan_is_the_best_of_all_candidates():
    request = two_sites(tensor=2)
    plan = planning.plan(request)
    results = [evaluate(request, candidate, costs_of(request)) for candidate in candidates(request)]
    assert plan.prediction.step_s <= min(r.step_s for r in results if isinstance(r, Evaluated))
    assert len(results) > 50


@pytest.mark.slow
def test_what_one_site_can_do_alone_is_its_best():
    evaluated = search(two_sites(), costs_of(two_sites())).evaluated
    alone = min(e.step_s for e in evaluated if e.candidate.order == ("a",))
    assert alone == planning.plan(job([site("a")])).prediction.step_s


def test_what_is_predicted_is_what_is_simulated():
    plan = planning.plan(two_sites())
    check(plan.problem, plan.schedule)
    timeline = simulate(plan.problem, plan.schedule)
    assert timeline.makespan_s == plan.prediction.makespan_s >= lower_bound_s(plan.problem)
    assert plan.prediction.step_s == plan.prediction.makespan_s + plan.prediction.overhead_s
    assert max(plan.prediction.peak_memory_bytes) <= device().memory_bytes


def test_layers_add_up_and_every_stage_is_placed():
    plan = planning.plan(two_sites())
    assert sum(p.num_layers for p in plan.placements) == 8
    assert [p.first_layer for p in plan.placements[1:]] == [p.end_layer for p in plan.placements[:-1]]
    assert set(plan.sites) <= {"a", "b"}


@pytest.mark.slow
def test_a_second_site_over_a_bad_link_does_not_help_and_that_is_said():
    document = planned(two_sites(latency_s=0.5, gbit_per_s=0.1))
    plan, told = document.plan, document.explanation
    assert set(plan.sites) == {"a"} or set(plan.sites) == {"b"}
    assert "a second site does not help, " in told.verdict
    assert any("more for the links between sites" in choice.reason for choice in told.runners_up)


def test_a_slow_link_in_use_is_called_the_wall():
    told = why(job([site("a", 1), site("b", 1)], both_ways("a", "b", gbit_per_s=0.2), sites=("a", "b")))
    bound = next(line for line in told.advice if line.startswith("Link-bound by a>b, b>a"))
    assert "Gbit/s it would not be" in bound


def test_a_slower_device_gets_fewer_layers():
    slow = site("b", 1, device("v100-32gb", flops=125e12))
    plan = planning.plan(job([site("a", 1), slow], both_ways("a", "b"), sites=("a", "b"), pipeline=2, virtual=1))
    first, second = plan.placements
    assert first.num_layers > second.num_layers


def test_pins_are_kept():
    request = job(
        [site("a"), site("b")],
        both_ways("a", "b"),
        schedule="1f1b",
        pipeline=2,
        data=2,
        tensor=2,
        sites=("b", "a"),
        layers=(5, 3),
        num_microbatches=4,
    )
    plan = planning.plan(request)
    assert (plan.layout.pipeline, plan.layout.data, plan.layout.tensor) == (2, 2, 2)
    assert (plan.layout.num_microbatches, plan.layout.microbatch_size) == (4, 2)
    assert plan.sites == ("b", "a")
    assert [p.num_layers for p in plan.placements] == [5, 3]
    assert plan.schedule.method == "1f1b"


def test_an_unknown_schedule_is_refused_with_the_nearest_one():
    with pytest.raises(InputError, match=r"schedule.method: there is no schedule '1f1'; did you mean '1f1b'\?"):
        planning.plan(job(schedule="1f1"))


def test_virtual_stages_are_planned_when_pinned():
    plan = planning.plan(job([site("a")], pipeline=4, virtual=2, num_microbatches=16, schedule="interleaved"))
    assert len(plan.placements) == 8
    assert plan.schedule.method == "interleaved"


@pytest.mark.parametrize(
    ("memory_gib", "hint"),
    [
        (1.6, 'training.recompute = "auto"'),
        (1.35, "no pin layout.num_microbatches"),
        (0.8, "devices with 3 GiB of memory"),
    ],
)
def test_too_little_memory_is_told_with_the_smallest_change_that_works(memory_gib, hint):
    plain = TRAINING.model_copy(update={"recompute": "none"})
    tight = job(
        [site("a", on=device(memory_gib=memory_gib))], training=plain, pipeline=4, data=1, tensor=1, num_microbatches=4
    )
    with pytest.raises(InfeasibleError) as caught:
        planning.plan(tight)
    assert "no layout of this job works; nearest: a: pipeline 4" in str(caught.value)
    assert str(caught.value).endswith(f"smallest change that works: {hint}")
    changed = next(changed for name, changed in smallest_changes(tight, costs_of(tight)) if name == hint)
    assert planning.plan(changed).prediction.step_s > 0


def test_a_pinned_degree_of_experts_that_memory_forbids_is_named():
    experts = {"num_experts": 16, "per_token": 2, "ffn_hidden": 2048}
    training = TRAINING.model_copy(update={"recompute": "full", "zero": 1, "microbatch_size": 1})
    pins = {"pipeline": 1, "tensor": 1, "data": 4, "expert": 1}
    tight = job([site("a", on=device(memory_gib=5.0))], training=training, schedule="1f1b", **pins)
    tight = tight.model_copy(update={"model": tight.model.model_copy(update={"experts": Experts(**experts)})})
    with pytest.raises(InfeasibleError) as caught:
        planning.plan(tight)
    assert str(caught.value).endswith("smallest change that works: no pin layout.expert")


def test_more_devices_are_told_with_the_pins_that_go_with_them():
    training = TRAINING.model_copy(update={"recompute": "full"})
    pins = {"pipeline": 1, "data": 1, "tensor": 1, "layers": (8,)}
    tight = job([site("a", on=device(memory_gib=2.0))], training=training, **pins)
    names = [name for name, _ in smallest_changes(tight, costs_of(tight))]
    assert "2 times the devices at every site and layout.pipeline = 2 and no pin layout.layers" in names


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"pipeline": 8}, "needs 8 devices, the cluster has 4; add 4 devices or pin less"),
        ({"pipeline": 2, "tensor": 4}, "needs 8 devices, the cluster has 4; add 4 devices or pin less"),
        ({"context": 8}, "data 1 x tensor 1 x context 8 needs 8 devices, the cluster has 4"),
    ],
)
def test_too_few_devices_for_the_pins_are_told(pins, message):
    with pytest.raises(InfeasibleError, match=message):
        planning.plan(job([site("a")], **pins))


def test_one_device_too_few_is_in_the_singular():
    with pytest.raises(InfeasibleError, match="needs 4 devices, the cluster has 3; add 1 device or pin less"):
        planning.plan(job([site("a", 3)], pipeline=4))


def test_a_rank_that_no_site_can_hold_is_told_with_the_largest_site():
    with pytest.raises(InfeasibleError, match=r"its 4 devices on one site \(the largest, a, has 3\)"):
        planning.plan(job([site("a", 3), site("b", 1)], both_ways("a", "b"), data=4, tensor=1))


def test_an_order_in_a_v_on_one_rank_is_told_as_the_reason():
    with pytest.raises(InfeasibleError, match=r"schedule\.method = 'wave' needs two ranks at least, choose '1f1b'"):
        planning.plan(job([site("a")], schedule="wave", pipeline=1, tensor=1))


def test_a_site_with_too_few_devices_for_a_rank_is_named():
    with pytest.raises(InfeasibleError, match=r"needs 2 devices .* at its site, b has 1; give it more"):
        planning.plan(job([site("a"), site("b", 1)], both_ways("a", "b"), pipeline=2, tensor=2, sites=("a", "b")))


def test_sites_without_a_link_are_used_one_at_a_time():
    plan = planning.plan(job([site("a"), site("b", 8)]))
    assert set(plan.sites) == {"b"}


@pytest.mark.slow
def test_every_set_of_sites_is_told_of():
    _, _, evaluated, rejected = search(two_sites(), costs_of(two_sites()))
    assert {frozenset(e.candidate.order) for e in evaluated} == {frozenset("a"), frozenset("b"), frozenset("ab")}
    assert all(isinstance(r, Rejected) for r in rejected)


def test_json_survives_a_round_trip_and_is_strict(tmp_path):
    plan = planning.plan(two_sites(pipeline=2))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    data = json.loads(plan.to_json())
    for change, message in [
        ({"format": "farpipe/plan/9"}, "format"),
        ({"layuot": 1}, "layuot: unknown key; did you mean 'layout'"),
        ({"schedule": {"format": "farpipe/schedule/1"}}, "schedule: method: missing"),
        ({"problem": data["problem"] | {"hops": []}}, "problem: hops: expected one entry per adjacent stage pair"),
    ]:
        with pytest.raises(InputError, match=message):
            Plan.from_json(json.dumps(data | change))


def test_a_plan_whose_schedule_was_tampered_with_is_refused():
    data = json.loads(planning.plan(two_sites()).to_json())
    data["schedule"]["ranks"][0].pop()
    with pytest.raises(InputError, match="is not valid: "):
        Plan.from_json(json.dumps(data))


def test_repr_tells_what_runs_where():
    text = repr(planning.plan(two_sites()))
    assert "Plan for small over " in text
    assert "stage 0: rank 0 at" in text


@pytest.mark.slow
def test_auto_is_never_worse_than_any_order_that_fits():
    problem = planning.plan(two_sites(latency_s=0.05)).problem
    _, timeline = best_order(problem)
    outcomes = try_orders(problem)
    assert timeline.makespan_s == pytest.approx(min(o.makespan_s for o in outcomes), rel=1e-9)
    with pytest.raises(UsageError, match="did you mean '1f1b'"):
        best_order(problem, "1f1")


def test_a_limit_spares_work_and_loses_nothing_that_is_below_it():
    problem = planning.plan(two_sites(pipeline=4)).problem
    best_s = best_order(problem)[1].makespan_s
    assert best_order(problem, limit_s=1.001 * best_s)[1].makespan_s == best_s
    assert best_order(problem, limit_s=0.01 * best_s)[1].makespan_s >= best_s


def test_a_profile_of_a_device_that_the_job_lacks_is_refused():
    measured = profile(device="a100-80g")
    with pytest.raises(InputError, match=r"profile of 'a100-80g': no site of the job has .* did you mean 'a100-80gb'"):
        planning.plan(two_sites(pipeline=2), [measured])


def profile(**changes):
    part = PartTimes(forward_s=1e-3, input_grad_s=1e-3, weight_grad_s=1e-3)
    figures = {"device": "a100-80gb", "shape": "any", "precision": "bf16", "recompute": "none", "microbatch_size": 1}
    figures |= {"sequence_length": 1024, "optimizer_s_per_param": 1e-9, "action_overhead_s": 0.0}
    return Profile(**(figures | {"embedding": part, "layer": part, "head": part} | changes))


def test_a_profile_of_another_model_is_refused_before_planning():
    request = two_sites(pipeline=2)
    own = model_shape(request.model)
    other = model_shape(request.model.model_copy(update={"hidden": 2 * request.model.hidden}))
    with pytest.raises(InputError, match=f"shape: measured with '{re.escape(other)}', the job has '{re.escape(own)}'"):
        planning.plan(request, [profile(shape=other)])
    with pytest.raises(InputError, match="sequence_length: measured with 7, the job has"):
        planning.plan(request, [profile(shape=own, sequence_length=7)])


def test_a_profile_that_was_measured_beside_other_work_is_told_of():
    request = two_sites(pipeline=2, tensor=1)
    at = {"shape": model_shape(request.model), "sequence_length": request.training.sequence_length}
    assert "measured on a busy machine" not in "".join(why(request, [profile(**at)]).advice)
    told = why(request, [profile(**at, cpu_share=0.4)]).advice[0]
    assert "The profile of a100-80gb was measured on a busy machine" in told
    assert "60 %" in told


def test_what_a_search_brought_is_told():
    plan = planning.plan(
        job([site("a")], pipeline=2, data=1, tensor=1, virtual=1, num_microbatches=4, schedule="gpipe")
    )
    found, order = refine(plan, 5.0)
    assert found.prediction.makespan_s < plan.prediction.makespan_s
    first = after_search(Explanation(advice=("before",)), plan, found, order)
    assert first.advice[0] == "before"
    assert "Search finished: found an order that is" in first.advice[-1]
    assert "no order of these stages can be" in first.advice[-1]
    again, order = refine(found, 1.0)
    assert again is found
    assert "no faster order found" in after_search(first, found, again, order).advice[-1]


def test_the_reserve_is_left_free():
    tight = {"pipeline": 4, "data": 1, "tensor": 1, "num_microbatches": 8}
    request = job([site("a", on=device(memory_gib=2.0))], **tight)
    assert max(planning.plan(request).prediction.peak_memory_bytes) <= 2.0 * 2**30 * 15 / 16
    for reserve_gib, fits in ((0.0, True), (1.5, False)):
        place = request.cluster.sites[0].model_copy(update={"memory_reserve_bytes": reserve_gib * 2**30})
        changed = request.model_copy(update={"cluster": request.cluster.model_copy(update={"sites": (place,)})})
        if fits:
            assert planning.plan(changed).prediction.step_s <= planning.plan(request).prediction.step_s
        else:
            with pytest.raises(InfeasibleError):
                planning.plan(changed)


@pytest.mark.slow
def test_sites_that_are_alike_are_told_of_alike():
    evaluated = search(two_sites(), costs_of(two_sites())).evaluated
    best = {}
    for one in evaluated:
        best[one.candidate.order] = min(one.step_s, best.get(one.candidate.order, one.step_s))
    assert best[("a",)] == best[("b",)]


def test_the_least_memory_that_is_enough_is_found():
    request = job([site("a", on=device(memory_gib=0.4))], pipeline=4, data=1, tensor=1)
    costs = costs_of(request)
    least = next(changed for name, changed in smallest_changes(request, costs) if "of memory" in name)
    assert planning.plan(least).prediction.step_s > 0
    gib = least.cluster.sites[0].device.memory_bytes / 2**30
    assert gib > 1, "so that a GiB less is a device"
    smaller = job([site("a", on=device(memory_gib=gib - 1))], pipeline=4, data=1, tensor=1)
    with pytest.raises(InfeasibleError):
        planning.plan(smaller)


@pytest.mark.slow
def test_progress_is_told():
    calls = []
    planning.plan(two_sites(), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(number + 1, 0) for number in range(len(calls))]
    assert len(calls) > 10


def test_the_verdict_says_which_sites_to_use_and_how_much_faster_that_is():
    both = why(two_sites(gbit_per_s=100.0, latency_s=0.001))
    assert re.fullmatch(r"Use both sites, .* [ab] [>+] [ab]: .* times as fast as [ab] alone, .*\.", both.verdict)
    assert why(job([site("a")])).verdict == "Use a."
    assert why(job([site("a"), site("b")])).verdict in ("Use a alone.", "Use b alone.")
    assert both.of_another_order().verdict == ""


def test_what_can_not_be_is_no_loser():
    losers = why(job([site("a", 2), site("b", 2)], both_ways("a", "b"), schedule="1f1b", pipeline=4)).runners_up
    assert losers
    assert not [choice for choice in losers if "needs" in choice.reason]


def test_a_pinned_order_without_a_link_is_infeasible():
    with pytest.raises(InfeasibleError, match=r"layout\.sites: a > b needs a link from a to b"):
        planning.plan(job([site("a"), site("b")], sites=("a", "b")))


@pytest.mark.parametrize(("name", "lacks"), [("t4", True), ("v100-32gb", True), ("a100-80gb", False), ("mine", False)])
def test_a_device_without_flash_attention_is_named_and_the_setting_is_not_advised(name, lacks):
    places = [site("a", 1, on=device(name))]
    said = why(job(places)).advice
    assert any(f"{name} has no FlashAttention 2" in text for text in said) is lacks
    kept = job(places, training=TRAINING.model_copy(update={"flash_attention": False, "sequence_length": 8192}))
    assert not any("has no FlashAttention 2" in text for text in why(kept).advice)
    advised = [idea.what for idea in _ideas(kept, evaluate(kept, candidates(kept)[0], costs_of(kept)))]
    assert ("training.flash_attention = true" in advised) is not lacks


@pytest.mark.slow
@pytest.mark.parametrize(("num_devices", "batch", "most_s"), [(4096, 768, 4.84), (8192, 1024, 3.28)])
def test_many_stages_on_every_rank_are_planned_where_microbatches_are_few(num_devices, batch, most_s):
    asked = parse_job(DEEP.format(num_devices=num_devices, batch=batch))
    plan = planning.plan(asked)
    layout = {"pipeline": 8, "virtual": 8, "tensor": 8, "context": 2}
    by_hand = planning.plan(asked.model_copy(update={"layout": Pins(**layout)}))
    assert plan.prediction.step_s <= by_hand.prediction.step_s * 1.003
    assert plan.prediction.step_s < most_s, "two in a V took 4.90 and 3.39 s"
    assert plan.layout.virtual > 2
