"""Arms on one cost model, what limits them, and the changes that would help."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.cost import JobCosts
from farpipe.plan import Plan, make_plan
from farpipe.plan.arms import arms_of, limit_of
from farpipe.plan.decided import decided
from farpipe.plan.improvements import COSTS, WORTH_TELLING, improvements, still_helping
from farpipe.plan.mixtures import mixture
from farpipe.plan.plan import Change
from farpipe.plan.planner import make_plans, refine, reorder
from farpipe.plan.quick import quick_search
from farpipe.plan.refined import predicted, refined
from farpipe.plan.separate_sites import separate_sites, shares_of_batch
from plan.jobs import TRAINING, both_ways, device, job, site


def costs_of(asked):
    return JobCosts(asked.model, asked.training)


def two_sites(fast=1.0, pins=None, **link):
    places = [site("a"), site("b", on=device("fast", flops=312e12 * fast) if fast != 1 else None)]
    return job(places, both_ways("a", "b", **link), **(pins or {}))


def advised_plan(asked, local_steps=100):
    return make_plans(asked, local_steps=local_steps)[0]


@pytest.fixture(scope="module")
def unlike():
    """The plan of two sites, one with twice the speed of the other."""
    return advised_plan(two_sites(fast=2.0))


@pytest.mark.slow
def test_every_way_to_use_the_sites_is_an_arm_the_fastest_first(unlike):
    kinds = {(arm.kind, arm.where) for arm in unlike.arms}
    assert {("one site", "a"), ("one site", "b")} <= kinds
    assert {kind for kind, _ in kinds} == {"one site", "pipeline", "replicas", "local steps"}
    assert [arm.step_s for arm in unlike.arms] == sorted(arm.step_s for arm in unlike.arms)


def test_the_winner_is_the_fastest_arm_that_trains_as_asked(unlike):
    first = next(arm for arm in unlike.arms if arm.same_training)
    assert first.step_s == pytest.approx(unlike.prediction.step_s, rel=1e-9)


def test_arms_that_train_otherwise_say_so(unlike):
    told = {arm.training for arm in unlike.arms if arm.kind == "local steps" or "int8" in arm.training}
    assert told == {"int8 or fp8 messages", "100 local steps between exchanges"}


def test_a_plan_with_arms_and_changes_survives_a_round_trip(unlike):
    again = Plan.from_json(unlike.to_json())
    assert (again.arms, again.changes, again.limited_by) == (unlike.arms, unlike.changes, unlike.limited_by)
    assert unlike.arms


def test_a_plan_without_them_is_as_before():
    assert make_plan(two_sites()).arms == ()


@pytest.mark.parametrize(
    ("link", "limit"),
    [
        ({"gbit_per_s": 0.2, "latency_s": 1e-4}, "bandwidth of"),
        ({"gbit_per_s": 10000.0, "latency_s": 0.2}, "latency of"),
    ],
)
def test_what_limits_a_pipeline_is_the_figure_of_the_link_that_is_bad(link, limit):
    asked = decided(two_sites(pins={"sites": ("a", "b"), "replicas": "inside"}, **link))
    best = next(one for one in quick_search(asked, costs_of(asked)) if len(one.candidate.order) == 2)
    assert limit_of(best).startswith(limit)


def test_one_device_alone_is_limited_by_computing():
    long = TRAINING.model_copy(update={"global_batch": 512})
    asked = decided(job([site("a", 1)], training=long))
    assert limit_of(quick_search(asked, costs_of(asked))[0]) == "computing"


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    devices=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    latency_s=st.sampled_from([1e-4, 0.02]),
    gbit_per_s=st.sampled_from([1.0, 100.0]),
)
def test_the_quick_search_never_beats_the_exhaustive_one(devices, latency_s, gbit_per_s):
    places = [site(name, number) for name, number in zip("ab", devices, strict=True)]
    asked = decided(job(places, both_ways("a", "b", latency_s, gbit_per_s)))
    quick = quick_search(asked, costs_of(asked), per_use=2)
    assert quick[0].step_s >= make_plan(asked).prediction.step_s * (1 - 1e-9)


def test_the_exchange_of_separate_sites_is_its_closed_form():
    asked = decided(two_sites(fast=2.0, latency_s=0.03, gbit_per_s=8.0))
    one = separate_sites(asked, costs_of(asked), 1)
    num_bytes = asked.model.num_params * 4  # a ring of two sends 2 (n - 1) / n = 1 times the 32-bit gradients
    assert one.exchanged_bytes == pytest.approx(num_bytes)
    assert one.exchange_s == pytest.approx(num_bytes / 1e9 + 2 * 0.03)
    assert one.step_s == pytest.approx(max(each.step_s for each in one.found) + one.exchange_s)


def test_local_steps_share_the_exchange_which_is_of_32_bit():
    asked = decided(two_sites(fast=2.0))
    every, rarely = (separate_sites(asked, costs_of(asked), number) for number in (2, 500))
    assert rarely.exchange_s == pytest.approx(every.exchange_s * 2 / 500)
    assert every.exchanged_bytes == pytest.approx(4 * asked.model.num_params)


def test_a_faster_site_gets_the_larger_share_and_none_is_lost():
    one = separate_sites(decided(two_sites(fast=2.0)), costs_of(decided(two_sites(fast=2.0))), 1)
    share = dict(zip(one.sites, one.shares, strict=True))
    assert share["b"] > share["a"]
    assert sum(one.shares) == TRAINING.global_batch


@given(batch=st.integers(1, 512), times=st.lists(st.floats(0.1, 10), min_size=2, max_size=4))
def test_shares_add_up_and_are_within_a_part_of_what_speed_asks_for(batch, times):
    shares, part = shares_of_batch(batch, times), math.ceil(batch / 16)
    assert sum(shares) == batch
    for share, seconds in zip(shares, times, strict=True):
        assert abs(share - batch / seconds / sum(1 / s for s in times)) <= part


@pytest.mark.parametrize("links", [(), both_ways("a", "b")[:1]])
def test_sites_without_a_ring_of_links_exchange_nothing(links):
    asked = decided(job([site("a"), site("b")], links))
    assert separate_sites(asked, costs_of(asked), 10) is None


@pytest.mark.slow
def test_alike_sites_with_gradients_every_step_are_told_as_replicas_only_once():
    arms = advised_plan(two_sites()).arms
    assert len([arm for arm in arms if arm.kind == "replicas"]) == 1


@pytest.fixture(scope="module")
def thin():
    """A job with settings switched off, over a link that limits it; its search's results."""
    asked = decided(two_sites(pins={"sites": ("a", "b")}, gbit_per_s=0.5))
    costs = costs_of(asked)
    return asked, costs, quick_search(asked, costs)


def refined_step_s(asked, found, costs):
    """As a plan is made of what a search found."""
    return predicted(asked, refined(asked, found, costs)[1]).step_s


def all_changes(of):
    asked, costs, found = of
    return improvements(asked, found[0], costs, refined_step_s(asked, found[0], costs), most=100)


def test_changes_come_from_cheap_to_dear_and_all_are_worth_it(thin):
    changes = all_changes(thin)
    assert changes
    assert [COSTS.index(c.costs) for c in changes] == sorted(COSTS.index(c.costs) for c in changes)
    assert all(change.gain >= WORTH_TELLING for change in changes)


def test_where_the_link_limits_shorter_messages_and_bandwidth_are_among_the_changes(thin):
    told = {change.what: change for change in all_changes(thin)}
    narrow = next(change for what, change in told.items() if "wire_type" in what)
    assert narrow.training
    assert any("bandwidth between a and b" in what for what in told)


def test_the_gain_is_what_the_changed_job_takes(thin):
    """The same figures without the advisor: half the step with twice the devices is a gain of 1."""
    asked, costs, found = thin
    change = next(c for c in all_changes(thin) if "both ways" in c.what)
    links = tuple(
        link.model_copy(update={"bandwidth_bytes_per_s": 2 * link.bandwidth_bytes_per_s})
        for link in asked.cluster.links
    )
    faster = asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"links": links})})
    again = replace(found[0].candidate, sites=tuple(faster.cluster.site(s.name) for s in found[0].candidate.sites))
    after_s = refined_step_s(faster, quick_search(faster, costs, 1, 1, [again])[0], costs)
    assert change.step_s == pytest.approx(after_s)
    assert change.gain == pytest.approx(refined_step_s(asked, found[0], costs) / after_s - 1)


def test_every_change_is_compared_with_the_plan_whose_order_was_searched():
    """The quick search alone would tell of shorter messages that make steps of 538 ms out of the plan's 519 ms."""
    link = {"latency_s": 0.02, "gbit_per_s": 10.0}
    pins = {"pipeline": 4, "data": 1, "tensor": 1, "num_microbatches": 16, "sites": ("a", "b"), "virtual": 1}
    plan = advised_plan(two_sites(pins=pins, **link))
    assert plan.schedule.method == "auto (short search)"
    assert plan.changes
    for change in plan.changes:
        tokens = 2 if change.costs == "another batch" else 1
        assert change.step_s < tokens * plan.prediction.step_s
        assert change.gain == pytest.approx(tokens * plan.prediction.step_s / change.step_s - 1)


def test_changes_that_do_not_help_a_faster_order_are_dropped():
    large, small = (Change(what=str(gain), step_s=1 / (1 + gain), gain=gain, costs="devices") for gain in (0.5, 0.05))
    kept = still_helping([large, small], 0.96)
    assert [change.what for change in kept] == ["0.5"]
    assert kept[0].gain == pytest.approx(0.96 / large.step_s - 1)


def test_an_order_that_is_searched_is_in_the_plans_own_arm(unlike):
    plan = reorder(make_plan(two_sites(pins={"sites": ("a", "b"), "virtual": 1, "data": 1})), "gpipe")
    where, before_s = plan.where, plan.prediction.step_s
    own, faster = (
        unlike.arms[0].model_copy(update={"where": at, "step_s": step_s, "training": told})
        for at, step_s, told in ((where, before_s, ""), ("c", before_s * 0.999, "int8 messages"))
    )
    searched = refine(plan.model_copy(update={"arms": (faster, own)}), 1.0)
    assert searched.prediction.step_s < before_s
    told = {arm.where: arm for arm in searched.arms}
    assert (told[where].step_s, told["c"].step_s) == (searched.prediction.step_s, before_s * 0.999)
    assert told[where].tokens_per_s == searched.prediction.tokens_per_s
    assert [arm.step_s for arm in searched.arms] == sorted(arm.step_s for arm in searched.arms)


def test_a_key_that_is_left_out_is_told_with_what_is_chosen_instead():
    training = TRAINING.model_copy(update={"microbatch_size": 1})
    asked = decided(job([site("a")], training=training, tensor=4, pipeline=1))
    costs = costs_of(asked)
    told = [change.what for change in all_changes((asked, costs, quick_search(asked, costs)))]
    assert any(re.fullmatch(r"leave out training\.microbatch_size \(then microbatches of \d+\)", one) for one in told)
    assert any(re.fullmatch(r"leave out layout\.tensor \(then [12]\)", one) for one in told)
    assert any(re.fullmatch(r"leave out all of layout \(then a: pipeline . x .*\)", one) for one in told)


def test_a_switched_off_setting_that_costs_time_comes_first():
    training = TRAINING.model_copy(update={"flash_attention": False, "sequence_length": 8192})
    asked = decided(job([site("a")], training=training))
    found = quick_search(asked, costs_of(asked))
    step_s = refined_step_s(asked, found[0], costs_of(asked))
    assert improvements(asked, found[0], costs_of(asked), step_s)[0].what == "training.flash_attention = true"


def two_pairs(apart_gbit=400.0, **link):
    """Two pairs of near sites, far from each other."""
    names = "abcd"
    links = [
        *both_ways("a", "b", latency_s=1e-4, gbit_per_s=800.0),
        *both_ways("c", "d", latency_s=1e-4, gbit_per_s=800.0),
    ]
    far = [
        pair for one in "ab" for other in "cd" for pair in both_ways(one, other, latency_s=0.02, gbit_per_s=apart_gbit)
    ]
    training = TRAINING.model_copy(update={"global_batch": 64})
    return decided(job([site(name, 2) for name in names], [*links, *far], training=training, **link))


@pytest.mark.slow
def test_a_mixture_is_a_pipeline_over_each_pair_and_an_exchange_between_them():
    asked = two_pairs()
    one = mixture(asked, costs_of(asked))
    groups = [set(found.candidate.order) for found in one.found]
    assert sorted(map(sorted, groups)) == [["a", "b"], ["c", "d"]]
    assert sum(one.shares) == asked.training.global_batch
    assert one.step_s == max(found.step_s for found in one.found) + one.exchange_s
    width, model = 4, asked.model  # gradients of bf16 training are summed in 32 bit
    each_way = sum(size for name, size in one.exchanged_bytes.items() if name[0] in "ab")
    assert each_way == pytest.approx(model.num_params * width)
    slowest = max(one.exchanged_bytes.values()) / (400e9 / 8)
    assert one.exchange_s == pytest.approx(slowest + 2 * 0.02)


@pytest.mark.slow
def test_a_faster_link_between_groups_never_hurts_a_mixture_and_without_links_there_is_none():
    times = [mixture(two_pairs(rate), costs_of(two_pairs(rate))).step_s for rate in (1.0, 10.0, 100.0)]
    assert times == sorted(times, reverse=True)
    three = decided(job([site(name, 2) for name in "abc"], both_ways("a", "b")))
    assert mixture(three, costs_of(three)) is None


def test_two_sites_or_a_pinned_degree_leave_no_mixture():
    assert mixture(decided(two_sites()), costs_of(two_sites())) is None
    pinned = two_pairs(data=1)
    assert mixture(pinned, costs_of(pinned)) is None


def test_a_long_exchange_after_local_steps_is_also_told_in_8_bits():
    asked = decided(two_sites(gbit_per_s=0.2))
    told = {arm.training: arm.inter_site_bytes for arm in arms_of(asked, costs_of(asked)) if arm.kind == "local steps"}
    whole, narrow = told["100 local steps between exchanges"], told["100 local steps between 8-bit exchanges"]
    assert narrow == pytest.approx(whole / 4)
