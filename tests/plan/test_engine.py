import pytest

from farpipe.errors import InputError
from farpipe.plan import make_plan
from farpipe.plan.engine import TRAINABLE, plan_obstacle, within_engine
from plan.jobs import TRAINING, job, site


def test_what_is_open_is_pinned_to_what_the_engine_can_run_and_said():
    pinned, told = within_engine(job([site("a")]))
    assert told == "layout.tensor = 1"
    assert plan_obstacle(make_plan(pinned)) == ("", "")


def test_a_pin_of_the_user_stays_and_is_the_obstacle():
    request = job([site("a")], tensor=2)
    pinned, told = within_engine(request)
    assert (pinned, told) == (request, "")
    assert plan_obstacle(make_plan(pinned))[0] == "tensor = 2"


def test_the_engine_refuses_what_the_filter_names():
    from farpipe.run.spec_of_plan import run_spec_of

    with pytest.raises(InputError, match=r"tensor = 2; plan again with layout\.tensor = 1"):
        run_spec_of(make_plan(job([site("a")], tensor=2)))


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("model", {"qk_norm": True}, "model.qk_norm"),
        ("training", {"dropout": True}, "training.dropout = true"),
        ("training", {"precision": "fp16"}, 'training.precision = "fp16"; plan again with training.precision = "bf16"'),
        ("training", {"zero": 3}, "training.zero = 3"),
        ("training", {"cuda_graphs": True}, "training.cuda_graphs = true"),
    ],
)
def test_what_only_the_cost_model_knows_is_refused(section, change, message):
    from farpipe.run.spec_of_plan import run_spec_of

    plan = make_plan(job([site("a")], tensor=1))
    changed = plan.job.model_copy(update={section: getattr(plan.job, section).model_copy(update=change)})
    with pytest.raises(InputError, match=f"can't run this yet, only plan it: {message}"):
        run_spec_of(plan.model_copy(update={"job": changed}))


def test_the_change_that_is_named_makes_a_plan_that_runs():
    from farpipe.run.spec_of_plan import run_spec_of

    training = TRAINING.model_copy(update={"dropout": True})
    obstacle, change = plan_obstacle(make_plan(job([site("a")], training=training, tensor=2)))
    assert obstacle == "tensor = 2, training.dropout = true"
    assert change == "layout.tensor = 1, training.dropout = false"
    runnable = make_plan(job([site("a")], tensor=1))
    assert plan_obstacle(runnable) == ("", "")
    run_spec_of(runnable, num_steps=1)


def test_a_model_that_only_the_cost_model_knows_has_no_remedy():
    plan = make_plan(job([site("a")], tensor=1))
    changed = plan.job.model_copy(update={"model": plan.job.model.model_copy(update={"qk_norm": True})})
    assert plan_obstacle(plan.model_copy(update={"job": changed})) == ("model.qk_norm", "")


def test_the_precisions_of_the_filter_are_those_of_the_engine():
    from farpipe.runtime.model.decoder import _DTYPES

    assert set(TRAINABLE) == set(_DTYPES)
