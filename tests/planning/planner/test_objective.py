import pytest

from farpipe import planning
from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Pins, Prices
from farpipe.planning import Planner
from farpipe.planning.planner.objective import choose, options, pareto, pinned_to
from planning.planner.jobs import TRAINING, both_ways, job, site


def priced(name, rent, devices=4):
    prices = Prices(rent_usd_per_device_hour=rent, electricity_usd_per_mwh=-5.0, egress_usd_per_gb=0.05)
    place = site(name, devices)
    watts = place.device.model_copy(update={"power_w": 400.0})
    return place.model_copy(update={"prices": prices, "device": watts})


JOB = job([priced("dear", 4.0), priced("cheap", 1.0)], both_ways("dear", "cheap"), tensor=1)


@pytest.fixture(scope="module")
def choices():
    return options(Planner(), JOB)


def test_time_takes_more_than_money_does(choices):
    fast, cheap = choose(choices, "time"), choose(choices, "money")
    assert fast.step_s < cheap.step_s
    assert cheap.sites == ("cheap",)
    assert cheap.figure("money") < fast.figure("money")


def test_no_choice_on_the_front_is_beaten_and_every_other_is(choices):
    front = pareto(choices)
    assert 1 < len(front) < len(choices)
    figures = [(o.step_s, o.figure("money")) for o in front]
    for option in choices:
        assert any(step_s <= option.step_s and usd <= option.figure("money") for step_s, usd in figures)
    for one in front:
        assert not any(o.step_s < one.step_s and o.figure("money") < one.figure("money") for o in choices)


def test_a_missing_price_is_named_not_taken_for_nothing():
    free = job([site("a")], tensor=1)
    with pytest.raises(InfeasibleError, match=r"objective 'money': there is no figure for .*rent at a; give the sites"):
        choose(options(Planner(), free), "money")


def test_a_negative_electricity_price_lowers_the_sum(choices):
    assert all(option.money.electricity_usd < 0 for option in choices)


def without(place, key):
    return place.model_copy(update={"prices": place.prices.model_copy(update={key: None})})


def test_a_site_whose_region_has_no_rent_is_not_the_cheapest():
    unknown = without(priced("unknown", 0.0), "rent_usd_per_device_hour")
    asked = job([unknown, priced("dear", 4.0)], both_ways("unknown", "dear"), tensor=1)
    best = choose(options(Planner(), asked), "money")
    assert best.sites == ("dear",)
    assert best.figure("money") > 0


def test_a_rent_that_nobody_knows_leaves_the_other_prices_to_choose_by():
    places = [without(priced(name, 0.0), "rent_usd_per_device_hour") for name in ("a", "b")]
    dear = places[1].prices.model_copy(update={"electricity_usd_per_mwh": 50.0})
    few = places[1].prices.model_copy(update={"electricity_usd_per_mwh": 5.0})
    places = [place.model_copy(update={"prices": prices}) for place, prices in zip(places, (dear, few), strict=True)]
    assert choose(options(Planner(), job(places, tensor=1)), "money").sites == ("b",)


def test_negative_electricity_alone_is_no_reason_to_use_more_of_it():
    paid = without(priced("paid", 0.0), "rent_usd_per_device_hour")
    with pytest.raises(InfeasibleError, match="objective 'money': there is no figure for rent at paid"):
        choose(options(Planner(), job([paid], tensor=1)), "money")


def test_the_plan_of_a_choice_is_that_choice(choices):
    cheap = choose(choices, "money")
    plan = planning.plan(pinned_to(JOB, cheap))
    assert plan.where == cheap.where
    assert (plan.layout.pipeline, plan.layout.data) == (cheap.layout.pipeline, cheap.layout.data)
    assert plan.prediction.step_s == pytest.approx(cheap.step_s, rel=0.25)


def test_a_choice_keeps_the_degrees_that_share_a_sequence_and_those_that_the_user_pinned():
    """Else the planner takes further devices for a choice that was cheap because it has few."""
    long = TRAINING.model_copy(update={"sequence_length": 32768, "global_batch": 2})
    asked = job([priced("one", 1.0, 8)], training=long, tensor=1, pipeline=1, data=1)
    choice = next(one for one in options(Planner(), asked) if one.layout.context == 4)
    plan = planning.plan(pinned_to(asked, choice))
    assert (plan.layout.context, sum(plan.devices.values())) == (4, 4)
    by_layers = job([priced("one", 1.0)], tensor=1, pipeline=2, virtual=1, layers=(3, 5))
    pinned = pinned_to(by_layers, choose(options(Planner(), by_layers), "money"))
    assert pinned.layout.layers == (3, 5)


@pytest.mark.parametrize(("layers", "ranks"), [((4, 4), {2}), ((2, 2, 2, 2), {2, 4})])
def test_layers_alone_leave_the_choices_of_all_devices_and_shapes(layers, ranks):
    """Estimates of other numbers of stages came first and were all that was looked at."""
    asked = JOB.model_copy(update={"layout": Pins(layers=layers)})
    found = options(Planner(), asked)
    assert {one.layout.pipeline for one in found} <= ranks
    assert {sum(one.devices.values()) for one in found} >= {2, 4, 8}
    assert {one.layout.num_stages for one in found} == {len(layers)}
    assert choose(found, "time").devices == planning.plan(asked).devices


def test_layers_of_more_stages_than_two_a_rank_follow_from_the_pinned_ranks():
    asked = JOB.model_copy(update={"layout": Pins(layers=(2, 1, 1, 1, 1, 2), pipeline=2)})
    assert planning.plan(asked).layout.virtual == 3
    with pytest.raises(InfeasibleError, match=r"layout\.layers: no placement of its 6 stages with at most two"):
        planning.plan(JOB.model_copy(update={"layout": Pins(layers=(2, 1, 1, 1, 1, 2), tensor=4)}))


def test_a_job_that_fits_with_zero_3_alone_has_choices():
    small = priced("one", 1.0)
    small = small.model_copy(update={"device": small.device.model_copy(update={"memory_bytes": 3.8 * 2**30})})
    sharded = TRAINING.model_copy(update={"zero": "auto"})
    asked = job([small], training=sharded, tensor=1, pipeline=1)
    plan = planning.plan(asked)
    assert plan.job.training.zero == 3
    assert choose(options(Planner(), asked), "money").layout.data == plan.layout.data
