import pytest

from farpipe.errors import InputError
from farpipe.plan import make_plan
from farpipe.plan.engine import engine_obstacle, within_engine
from plan.jobs import job, site


def test_what_is_open_is_pinned_to_what_the_engine_can_run_and_said():
    pinned, told = within_engine(job([site("a")]))
    assert told == "layout.tensor = 1"
    assert engine_obstacle(make_plan(pinned).layout) == ""


def test_a_pin_of_the_user_stays_and_is_the_obstacle():
    request = job([site("a")], tensor=2)
    pinned, told = within_engine(request)
    assert (pinned, told) == (request, "")
    assert engine_obstacle(make_plan(pinned).layout) == "tensor = 2"


def test_the_engine_refuses_what_the_filter_names():
    from farpipe.run.spec_of_plan import run_spec_of

    with pytest.raises(InputError, match="tensor = 2"):
        run_spec_of(make_plan(job([site("a")], tensor=2)))


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("model", {"qk_norm": True}, "model.qk_norm"),
        ("training", {"dropout": True}, "training.dropout = true"),
        ("training", {"zero": 3}, "training.zero = 3"),
    ],
)
def test_what_only_the_cost_model_knows_is_refused(section, change, message):
    from farpipe.run.spec_of_plan import run_spec_of

    plan = make_plan(job([site("a")], tensor=1))
    changed = plan.job.model_copy(update={section: getattr(plan.job, section).model_copy(update=change)})
    with pytest.raises(InputError, match=f"can't train this yet, only plan it: {message}"):
        run_spec_of(plan.model_copy(update={"job": changed}))
