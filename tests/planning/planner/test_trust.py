"""Plans that rest on times that were never compared, and the range of their error."""

import pytest

from farpipe.core.spec import preset_device, preset_model
from farpipe.core.spec.training import Lora
from farpipe.planning.cost import JobCosts, Layout, PartTimes, Profile, calibration_of, model_shape
from farpipe.planning.cost.trust import (
    ADAPTERS,
    EXPERTS,
    FAR_LINKS,
    INTERLEAVED,
    KINDS,
    MANY,
    NARROW,
    NEAR_LINKS,
    PLAIN,
    SHARDED,
    UNCOMPARED,
    kind_of,
    likely_ratios,
    range_of,
    trust_of,
    uncompared,
)
from farpipe.planning.planner.reference_points import load_points
from farpipe.planning.planner.validation import predict
from planning.planner.jobs import MODEL, TRAINING, both_ways, device, job, planned, site, why

LAYOUT = Layout(pipeline=1, data=1, tensor=1, virtual=1, microbatch_size=1, num_microbatches=8)
MET = 0.12
"""Mean error up to which a kind counts as compared on a device."""


def test_a_measured_device_has_the_range_of_its_kind_and_no_mark():
    plan = planned(job([site("a")]))
    kind = range_of(kind_of(MODEL, plan.plan.training, plan.plan.layout))
    found, step_s = plan.explanation, plan.plan.prediction.step_s
    assert (found.residual, found.unmeasured, found.such_jobs) == (kind.mean_error, (), kind.such_jobs)
    assert plan.step_range_s == pytest.approx((step_s * kind.low, step_s * kind.high))
    assert (found.links_s, found.links_range_s) == (0.0, (0.0, 0.0))


def test_ranges_hold_the_prediction_and_are_wider_where_less_is_known():
    ranges = {kind: range_of(kind) for kind in (*KINDS, UNCOMPARED, NEAR_LINKS, FAR_LINKS)}
    assert all(one.low <= 1 <= one.high for one in ranges.values())
    for wide, near in ((UNCOMPARED, PLAIN), (EXPERTS, PLAIN), (FAR_LINKS, NEAR_LINKS)):
        assert ranges[wide].high / ranges[wide].low >= ranges[near].high / ranges[near].low


def test_a_job_is_of_the_first_kind_that_it_belongs_to():
    def kind(model=MODEL, training=TRAINING, **degrees):
        return kind_of(model, training.model_copy(update={"zero": 1} | degrees.pop("how", {})), layout(**degrees))

    def layout(**degrees):
        return Layout(**vars(LAYOUT) | degrees)

    assert kind() == PLAIN
    assert kind(virtual=2) == INTERLEAVED
    assert kind(tensor=8, virtual=2) == (NARROW if MODEL.hidden <= 4096 else INTERLEAVED)
    assert kind(data=129, tensor=8) == MANY
    assert kind(data=129, how={"zero": 3}) == kind(how={"kernels": "eager"}) == SHARDED
    assert kind(how={"lora": Lora(rank=16), "zero": 3}) == ADAPTERS
    assert kind(preset_model("deepseek-v3"), how={"zero": 3}) == EXPERTS


def test_what_links_cost_has_their_error_and_the_rest_that_of_the_kind():
    found, far = range_of(PLAIN), range_of(FAR_LINKS)
    assert likely_ratios(found, 0.0, 0.05) == pytest.approx((found.low, found.high))
    assert likely_ratios(None, 1.0, 0.05) == pytest.approx((far.low, far.high))
    low, high = likely_ratios(found, 0.5, 0.05)
    assert low < 1 < high < (found.high + far.high) / 2


def test_links_between_sites_have_a_range_of_their_own():
    found = planned(job([site("a"), site("b")], both_ways("a", "b"), pipeline=2)).explanation
    assert found.links_range_s == pytest.approx(
        (found.links_s * range_of(NEAR_LINKS).low, found.links_s * range_of(NEAR_LINKS).high)
    )


def test_layouts_within_the_error_of_a_difference_are_a_tie():
    found = planned(job([site("a", 8)]))
    said, step_s = found.explanation, found.plan.prediction.step_s
    near = [one for one in said.runners_up if 0 < one.step_s <= step_s * (1 + said.tie_within)]
    assert said.tied
    assert {one.what for one in near} <= set(said.tied)
    assert said.decides.startswith(f"A tie with {len(said.tied)} other layout")


@pytest.mark.slow
def test_a_device_that_nobody_compared_is_marked_and_sets_the_range_of_the_whole_step():
    places = [site("a"), site("b", on=device("own chip"))]
    found = trust_of(JobCosts(MODEL, TRAINING), places, LAYOUT)
    assert found.unmeasured == ("own chip",)
    assert found.errors == range_of(PLAIN).never_compared()
    assert found.errors.mean_error > range_of(PLAIN).mean_error
    plan = planned(job(places, both_ways("a", "b")))
    assert set(plan.explanation.unmeasured) <= {"own chip"}


def test_products_that_were_never_compared_on_a_device_are_named():
    places = [site("a", on=preset_device("gh200"))]
    assert trust_of(JobCosts(MODEL, TRAINING), places, LAYOUT).unmeasured == ("gh200 (bf16)",)
    narrow = TRAINING.model_copy(update={"precision": "fp32", "matmul": "tf32"})
    assert trust_of(JobCosts(MODEL, narrow), places, LAYOUT).unmeasured == ()


def test_with_a_profile_nothing_is_marked():
    part = PartTimes(forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.01)
    profile = Profile(
        device="own chip",
        shape=model_shape(MODEL),
        precision="bf16",
        recompute="none",
        microbatch_size=1,
        sequence_length=TRAINING.sequence_length,
        embedding=part,
        layer=part,
        head=part,
        optimizer_s_per_param=1e-12,
        action_overhead_s=0.0,
    )
    plan = planned(job([site("a", on=device("own chip"))]), [profile])
    assert (plan.explanation.residual, plan.explanation.unmeasured) == (0.0, ())
    assert plan.step_range_s == (plan.plan.prediction.step_s,) * 2


def test_kinds_of_models_that_nobody_compared_are_named_and_widen_the_range():
    long = TRAINING.model_copy(update={"sequence_length": 131072, "global_batch": 2})
    plan = planned(job([site("a", 8)], training=long))
    assert plan.plan.layout.context > 1
    assert plan.explanation.uncompared == (
        "context parallelism",
        "sequences of 131,072 tokens (the longest compared: 8,192)",
    )
    assert (plan.explanation.unmeasured, plan.explanation.is_rough) == ((), True)
    assert "never compared" in plan.explanation.such_jobs
    assert not why(job([site("a")])).is_rough


def test_what_a_device_was_compared_for_is_in_the_carried_points():
    """A kind that is met less well than what was never compared does not count."""
    points = [point for group in load_points() if group.tolerance <= MET for point in group.points]
    for name in {point.device for point in points}:
        law, mine = calibration_of(preset_device(name)), [point for point in points if point.device == name]
        assert max(point.sequence_length for point in mine) <= law.longest
        experts = [abs(predict(point).step_s / point.step_s - 1) for point in mine if point.experts]
        latent = [point for point in mine if point.latent_attention]
        met = bool(experts) and sum(experts) / len(experts) <= MET
        assert met == ("mixtures of experts" in law.kinds)
        assert (met and bool(latent)) == ("latent attention" in law.kinds)
        assert any(point.context > 1 for point in mine) == ("context parallelism" in law.kinds)


def test_kinds_that_were_compared_on_one_device_are_named_on_another():
    costs = JobCosts(preset_model("deepseek-v3"), TRAINING)
    b200, h100, h200 = (site(name, on=preset_device(name)) for name in ("b200", "h100-sxm", "h200"))
    assert uncompared(costs, [b200], 32768, 8) == ()
    assert uncompared(costs, [b200, h100], 4096, 8) == ("latent attention",)
    assert uncompared(costs, [b200, h200], 4096, 8) == ("mixtures of experts", "latent attention")
