"""Plans that rest on times that were never compared, and the range of their error."""

import pytest

from farpipe.core.spec import preset_device, preset_model
from farpipe.planning.cost import JobCosts, PartTimes, Profile, calibration_of, model_shape
from farpipe.planning.cost.calibration import UNCOMPARED
from farpipe.planning.explain.limits import trust, uncompared
from farpipe.planning.planner.reference_points import load_points
from farpipe.planning.planner.validation import predict
from planning.planner.jobs import MODEL, TRAINING, both_ways, device, job, planned, site, why


def test_a_measured_device_has_its_residual_and_no_mark():
    plan = planned(job([site("a")]))
    residual = calibration_of(device()).residual
    assert (plan.explanation.residual, plan.explanation.unmeasured) == (residual, ())
    assert plan.step_range_s == pytest.approx(
        (plan.plan.prediction.step_s / (1 + residual), plan.plan.prediction.step_s * (1 + residual))
    )


@pytest.mark.slow
def test_a_device_that_nobody_compared_is_marked_and_sets_the_range_of_the_whole_step():
    places = [site("a"), site("b", on=device("own chip"))]
    asked = job(places, both_ways("a", "b"))
    residual, unmeasured = trust(JobCosts(MODEL, TRAINING), places)
    assert unmeasured == ("own chip",)
    assert residual == calibration_of(device("own chip")).residual > calibration_of(device()).residual
    plan = planned(asked)
    assert set(plan.explanation.unmeasured) <= {"own chip"}


def test_products_that_were_never_compared_on_a_device_are_named():
    places = [site("a", on=preset_device("gh200"))]
    assert trust(JobCosts(MODEL, TRAINING), places) == (0.12, ("gh200 (bf16)",))
    narrow = TRAINING.model_copy(update={"precision": "fp32", "matmul": "tf32"})
    assert trust(JobCosts(MODEL, narrow), places) == (calibration_of(places[0].device).residual, ())


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
    assert (plan.explanation.residual, plan.explanation.unmeasured, plan.explanation.is_rough) == (0.36, (), True)
    assert not why(job([site("a")])).is_rough


def test_what_a_device_was_compared_for_is_in_the_carried_points():
    """A kind that is met less well than what was never compared does not count."""
    points = [point for group in load_points() if group.tolerance <= UNCOMPARED for point in group.points]
    for name in {point.device for point in points}:
        law, mine = calibration_of(preset_device(name)), [point for point in points if point.device == name]
        assert max(point.sequence_length for point in mine) <= law.longest
        experts = [abs(predict(point).step_s / point.step_s - 1) for point in mine if point.experts]
        latent = [point for point in mine if point.latent_attention]
        met = bool(experts) and sum(experts) / len(experts) <= UNCOMPARED
        assert met == ("mixtures of experts" in law.kinds)
        assert (met and bool(latent)) == ("latent attention" in law.kinds)
        assert any(point.context > 1 for point in mine) == ("context parallelism" in law.kinds)


def test_kinds_that_were_compared_on_one_device_are_named_on_another():
    costs = JobCosts(preset_model("deepseek-v3"), TRAINING)
    b200, h100, h200 = (site(name, on=preset_device(name)) for name in ("b200", "h100-sxm", "h200"))
    assert uncompared(costs, [b200], 32768, 8) == ()
    assert uncompared(costs, [b200, h100], 4096, 8) == ("latent attention",)
    assert uncompared(costs, [b200, h200], 4096, 8) == ("mixtures of experts", "latent attention")
