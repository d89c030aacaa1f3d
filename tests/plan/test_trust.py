"""Plans that rest on times that nobody has compared, and the range of their error."""

import pytest

from farpipe.cost import JobCosts, PartTimes, Profile, calibration_of, model_shape
from farpipe.plan import make_plan
from farpipe.plan.trust import trust
from farpipe.spec import preset_device
from plan.jobs import MODEL, TRAINING, both_ways, device, job, site


def test_a_measured_device_has_its_residual_and_no_mark():
    plan = make_plan(job([site("a")]))
    residual = calibration_of(device()).residual
    assert (plan.residual, plan.unmeasured) == (residual, ())
    assert plan.step_range_s == pytest.approx(
        (plan.prediction.step_s / (1 + residual), plan.prediction.step_s * (1 + residual))
    )


@pytest.mark.slow
def test_a_device_that_nobody_compared_is_marked_and_sets_the_range_of_the_whole_step():
    places = [site("a"), site("b", on=device("own chip"))]
    asked = job(places, both_ways("a", "b"))
    residual, unmeasured = trust(JobCosts(MODEL, TRAINING), places)
    assert unmeasured == ("own chip",)
    assert residual == calibration_of(device("own chip")).residual > calibration_of(device()).residual
    plan = make_plan(asked)
    assert set(plan.unmeasured) <= {"own chip"}


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
    plan = make_plan(job([site("a", on=device("own chip"))]), [profile])
    assert (plan.residual, plan.unmeasured) == (0.0, ())
    assert plan.step_range_s == (plan.prediction.step_s,) * 2
