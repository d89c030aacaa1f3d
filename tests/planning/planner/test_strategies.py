"""Strategies on one cost model, what limits them, and the changes that would help."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe import planning
from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Device, LocalSteps, load_job
from farpipe.planning import Explanation, Plan, PlanDocument
from farpipe.planning.cost import JobCosts
from farpipe.planning.explain import after_search, explain, with_alternatives
from farpipe.planning.explain.changes import COSTS, WORTH_LISTING, changes_that_help, still_helping
from farpipe.planning.explain.limits import limit_of
from farpipe.planning.explain.separate_sites import planned_in_full, separate_sites, shares_of_batch
from farpipe.planning.planner.candidates import decided, near_batches
from farpipe.planning.planner.find import refine, reorder
from farpipe.planning.planner.plan import Change
from farpipe.planning.planner.refinement import predicted, refined
from farpipe.planning.planner.search import BEST_ONLY, search, small
from farpipe.report.plan_tables import change_table, strategy_table
from farpipe.report.shown import gain_lines
from planning.planner.jobs import TRAINING, both_ways, device, job, site, why

RECIPES = Path(__file__).parents[3] / "recipes"


def costs_of(asked):
    return JobCosts(asked.model, asked.training)


def fastest_exchange(asked, steps_between=1, **local):
    """The separate sites whose step is shortest with an exchange every `steps_between` steps."""
    every = separate_sites(asked, costs_of(asked))
    steps = LocalSteps(every=steps_between, **local)
    rarely = [one if steps_between == 1 else one.exchanging(steps, asked.cluster) for one in every]
    return min(rarely, key=lambda one: one.step_s)


def two_sites(fast=1.0, pins=None, **link):
    places = [site("a"), site("b", on=device("fast", flops=312e12 * fast) if fast != 1 else None)]
    return job(places, both_ways("a", "b", **link), **(pins or {}))


def advised_plan(asked, **options):
    """The plan with its explanation, strategies and changes among it."""
    found = planning.find(asked)[0]
    why = with_alternatives(explain(found), found, **options)
    return PlanDocument(plan=found.plan, explanation=why)


def quick_search(asked, costs, per_kind=2, wanted=1, also=()):
    return search(asked, costs, small(per_kind, wanted), also=also).evaluated


@pytest.fixture
def unlike_job():
    asked = decided(two_sites(fast=2.0))
    return asked, costs_of(asked)


@pytest.fixture(scope="module")
def unlike():
    """The plan of two sites, one with twice the speed of the other."""
    return advised_plan(two_sites(fast=2.0))


@pytest.mark.slow
def test_every_way_to_use_the_sites_is_an_arm_the_fastest_first(unlike):
    kinds = {(one.kind, one.where) for one in unlike.explanation.strategies}
    assert {("one site", "a"), ("one site", "b")} <= kinds
    assert {kind for kind, _ in kinds} == {"one site", "pipeline", "replicas", "local steps"}
    assert [one.step_s for one in unlike.explanation.strategies] == sorted(
        one.step_s for one in unlike.explanation.strategies
    )


def test_the_winner_is_the_fastest_arm_that_trains_as_asked(unlike):
    first = next(one for one in unlike.explanation.strategies if one.same_training)
    assert first.step_s == pytest.approx(unlike.plan.prediction.step_s, rel=1e-9)


def test_strategies_that_train_otherwise_say_so(unlike):
    told = {
        one.training for one in unlike.explanation.strategies if one.kind == "local steps" or "int8" in one.training
    }
    assert told == {"int8 or fp8 messages", "100 local steps between exchanges"}


@pytest.mark.slow
def test_narrower_messages_that_gain_nothing_are_no_strategy():
    """Searched less than the plan, they came out 0.3 % slower than it."""
    plan = advised_plan(load_job(RECIPES / "two_sites.toml"))
    assert all(
        one.step_s < plan.plan.prediction.step_s for one in plan.explanation.strategies if "int8" in one.training
    )


def test_a_plan_with_strategies_and_changes_survives_a_round_trip(unlike):
    again = PlanDocument.from_json(unlike.to_json())
    assert again.explanation == unlike.explanation
    assert Plan.from_json(unlike.to_json()).to_json() == unlike.plan.to_json()
    assert unlike.explanation.strategies


def test_a_plan_without_them_is_as_before():
    assert why(two_sites()).strategies == ()


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
    assert limit_of(best, costs_of(asked), asked.cluster).startswith(limit)


@pytest.mark.parametrize(
    ("layers", "num_microbatches", "limit"),
    [((3, 5), 64, "uneven stages"), ((5, 3), 2, "filling and draining the pipeline")],
)
def test_uneven_stages_are_no_filling_and_draining(layers, num_microbatches, limit):
    training = TRAINING.model_copy(update={"global_batch": num_microbatches})
    pins = {"layers": layers, "pipeline": len(layers), "data": 1, "tensor": 1, "virtual": 1}
    asked = decided(job([site("a")], training=training, num_microbatches=num_microbatches, **pins))
    costs = costs_of(asked)
    assert limit_of(quick_search(asked, costs)[0], costs, asked.cluster) == limit


def test_float32_on_devices_with_tf32_is_told_of_it():
    training = TRAINING.model_copy(update={"precision": "fp32"})
    both = Device(**device().model_dump() | {"peak_flops": {"fp32": 19.5e12, "tf32": 156e12}})
    told = [change.what for change in advised_plan(job([site("a", on=both)], training=training)).explanation.changes]
    assert 'training.matmul = "tf32"' in told


def test_one_device_alone_is_limited_by_computing():
    long = TRAINING.model_copy(update={"global_batch": 512})
    asked = decided(job([site("a", 1)], training=long))
    costs = costs_of(asked)
    assert limit_of(quick_search(asked, costs)[0], costs, asked.cluster) == "computing"


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
    quick = quick_search(asked, costs_of(asked), wanted=2)
    assert quick[0].step_s >= planning.plan(asked).prediction.step_s * (1 - 1e-9)


def test_the_best_alone_is_the_first_of_a_quick_search():
    asked = decided(job([site("a", 4), site("b", 4)], both_ways("a", "b", 0.02, 1.0)))
    assert search(asked, costs_of(asked), BEST_ONLY).best.step_s == quick_search(asked, costs_of(asked), 1, 1)[0].step_s


def test_the_exchange_of_separate_sites_is_its_closed_form():
    asked = decided(two_sites(fast=2.0, latency_s=0.03, gbit_per_s=8.0))
    one = fastest_exchange(asked)
    num_bytes = asked.model.num_params * 4  # a ring of two sends 2 (n - 1) / n = 1 times the 32-bit gradients
    assert one.exchanged_bytes == pytest.approx(num_bytes)
    assert one.exchange_s == pytest.approx(num_bytes / 1e9 + 0.03), "two sites swap theirs in one latency"
    assert one.step_s == pytest.approx(max(each.step_s for each in one.found) + one.exchange_s)


def test_a_ring_of_three_sites_has_four_latencies_and_local_steps_have_one():
    links = [*both_ways("a", "b", 0.03), *both_ways("b", "c", 0.03), *both_ways("a", "c", 0.03)]
    asked = decided(
        job([site(name) for name in "abc"], links, training=TRAINING.model_copy(update={"global_batch": 48}))
    )
    one = next(one for one in separate_sites(asked, costs_of(asked)) if len(one.sites) == 3)
    through_s = one.exchanged_bytes / one.links[0].bandwidth_bytes_per_s
    assert one.exchange_s == pytest.approx(through_s + 4 * 0.03)
    rarely = one.exchanging(LocalSteps(every=10), asked.cluster)
    assert len(rarely.links) == 6, "each site sends to both others"
    assert 10 * rarely.exchange_s == pytest.approx(4 * one.num_params / rarely.links[0].bandwidth_bytes_per_s + 0.03)


def test_local_steps_share_the_exchange_which_is_of_32_bit():
    asked = decided(two_sites(fast=2.0))
    every, rarely = (fastest_exchange(asked, number) for number in (2, 500))
    assert rarely.exchange_s == pytest.approx(every.exchange_s * 2 / 500)
    assert every.exchanged_bytes == pytest.approx(4 * asked.model.num_params)


def test_steps_that_go_on_hide_the_exchange_until_the_link_is_full():
    asked = decided(two_sites(fast=2.0, latency_s=0.03, gbit_per_s=8.0))
    plain = fastest_exchange(asked, 100)
    step_s, once_s = plain.compute_s, 100 * plain.exchange_s
    hidden = fastest_exchange(asked, 100, delay_steps=99)
    assert hidden.exchange_s == pytest.approx(max(0.0, once_s - 99 * step_s) / 100)
    half = fastest_exchange(asked, 100, fragments=2, wire_type="int4")
    assert 100 * half.exchange_s == pytest.approx(asked.model.num_params * (1 / 2 + 1 / 32) / 1e9 + 2 * 0.03)
    full = fastest_exchange(decided(two_sites(fast=2.0, gbit_per_s=0.01)), 2, fragments=2, delay_steps=1)
    occupied_s = full.exchanged_bytes / 1.25e6
    assert full.step_s == pytest.approx(occupied_s / 2, rel=1e-4), "the link alone sets the pace"


def test_local_steps_say_what_one_site_alone_does_in_their_time(unlike):
    local = [one for one in unlike.explanation.strategies if one.kind == "local steps"]
    alone = min((one for one in unlike.explanation.strategies if one.kind == "one site"), key=lambda one: one.step_s)
    for one in local:
        assert (one.alone_at, one.alone_steps) == (alone.where, pytest.approx(one.step_s / alone.step_s))
    note = strategy_table(unlike.explanation.strategies).note
    assert f"100 local steps b alone does {100 * local[0].alone_steps:.0f} of the whole batch" in note
    assert all("alone_at" not in one.model_dump() for one in unlike.explanation.strategies if one.kind != "local steps")


def test_the_job_s_own_local_steps_are_the_strategy_and_others_train_otherwise():
    asked = two_sites(pins={"replicas": "across"}, gbit_per_s=0.1)
    training = asked.training.model_copy(update={"local_steps": LocalSteps(every=30)})
    found = advised_plan(asked.model_copy(update={"training": training}))
    told = {(one.kind, one.training) for one in found.explanation.strategies}
    assert ("local steps", "") in told
    assert ("local steps", "30 local steps between 8-bit exchanges") in told
    assert all(training for kind, training in told if kind != "local steps")
    own = next(one for one in found.explanation.strategies if one.same_training)
    assert own.step_s == pytest.approx(found.plan.prediction.step_s)


def test_a_faster_site_gets_the_larger_share_and_none_is_lost():
    one = fastest_exchange(decided(two_sites(fast=2.0)))
    share = dict(zip(one.sites, one.shares, strict=True))
    assert share["b"] > share["a"]
    assert sum(one.shares) == TRAINING.global_batch


@given(batch=st.integers(1, 512), times=st.lists(st.floats(0.1, 10), min_size=2, max_size=4))
def test_shares_add_up_and_are_within_a_part_of_what_speed_asks_for(batch, times):
    shares, part = shares_of_batch(batch, times), math.ceil(batch / 16)
    assert sum(shares) == batch
    for share, seconds in zip(shares, times, strict=True):
        assert abs(share - batch / seconds / sum(1 / s for s in times)) <= part


def test_three_alike_sites_that_share_a_batch_evenly_have_a_third_each():
    """768 sequences in 16 parts would be 288, 240 and 240, an eighth more than a third for the slowest."""
    training = TRAINING.model_copy(update={"global_batch": 768})
    links = [*both_ways("a", "b"), *both_ways("b", "c"), *both_ways("a", "c")]
    asked = decided(job([site(name) for name in "abc"], links, training=training))
    assert fastest_exchange(asked, 100).shares == (256, 256, 256)


def test_local_steps_take_what_a_sites_own_plan_for_its_share_takes(unlike_job):
    found = planned_in_full(*unlike_job, fastest_exchange(unlike_job[0], 100))
    for name, share in zip(found.sites, found.shares, strict=True):
        training = unlike_job[0].training.model_copy(update={"global_batch": share})
        alone = unlike_job[0].model_copy(update={"training": training, "cluster": unlike_job[0].cluster.within([name])})
        (of_site,) = (one for one in found.found if one.candidate.order == (name,))
        assert of_site.step_s <= 1.02 * planning.plan(alone).prediction.step_s, "but for the short search of an order"
    alike = decided(two_sites())
    both = planned_in_full(alike, costs_of(alike), fastest_exchange(alike, 100))
    assert both.devices == {"a": 4, "b": 4}
    assert both.found[0].step_s == both.found[1].step_s


@pytest.mark.parametrize("links", [(), both_ways("a", "b")[:1]])
def test_sites_without_a_ring_of_links_exchange_nothing(links):
    asked = decided(job([site("a"), site("b")], links))
    assert list(separate_sites(asked, costs_of(asked))) == []


@pytest.mark.slow
def test_alike_sites_with_gradients_every_step_are_told_as_replicas_only_once():
    strategies = advised_plan(two_sites()).explanation.strategies
    assert len([one for one in strategies if one.kind == "replicas"]) == 1


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
    return changes_that_help(asked, costs, found[:1], refined_step_s(asked, found[0], costs), most=100)[0]


def test_changes_come_from_cheap_to_dear_and_all_are_worth_it(thin):
    changes = all_changes(thin)
    assert changes
    assert [COSTS.index(c.costs) for c in changes] == sorted(COSTS.index(c.costs) for c in changes)
    assert all(change.gain >= WORTH_LISTING for change in changes)


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
    assert plan.plan.schedule.method == "auto (short search)"
    assert plan.explanation.changes
    for change in plan.explanation.changes:
        tokens = 2 if change.costs == "another batch" else 1
        assert change.step_s < tokens * plan.plan.prediction.step_s
        assert change.gain == pytest.approx(tokens * plan.plan.prediction.step_s / change.step_s - 1)


def test_of_pins_whose_loss_has_the_same_answer_the_first_is_listed():
    asked = decided(two_sites(pins={"tensor": 4, "virtual": 1, "sites": ("a",)}))
    costs = costs_of(asked)
    found = quick_search(asked, costs, 1, 1)
    free = [change for change in all_changes((asked, costs, found)) if change.what.startswith("leave out")]
    assert any("layout.tensor" in change.what for change in free)
    assert len({f"{change.step_s:.9g}" for change in free}) == len(free)


def test_changes_that_do_not_help_a_faster_order_are_dropped():
    large, small = (Change(what=str(gain), step_s=1 / (1 + gain), gain=gain, costs="devices") for gain in (0.5, 0.05))
    kept = still_helping([large, small], 0.96)
    assert [change.what for change in kept] == ["0.5"]
    assert kept[0].gain == pytest.approx(0.96 / large.step_s - 1)


def test_an_order_that_is_searched_is_in_the_plans_own_arm(unlike):
    plan = reorder(planning.plan(two_sites(pins={"sites": ("a", "b"), "virtual": 1, "data": 1})), "gpipe")
    where, before_s = plan.where, plan.prediction.step_s
    own, faster = (
        unlike.explanation.strategies[0].model_copy(update={"where": at, "step_s": step_s, "training": told})
        for at, step_s, told in ((where, before_s, ""), ("c", before_s * 0.999, "int8 messages"))
    )
    searched, order = refine(plan, 1.0)
    assert searched.prediction.step_s < before_s
    strategies = after_search(Explanation(strategies=(faster, own)), plan, searched, order).strategies
    told = {one.where: one for one in strategies}
    assert (told[where].step_s, told["c"].step_s) == (searched.prediction.step_s, before_s * 0.999)
    assert told[where].tokens_per_s == searched.prediction.tokens_per_s
    assert [one.step_s for one in strategies] == sorted(one.step_s for one in strategies)


def test_a_key_that_is_left_out_is_told_with_what_is_chosen_instead():
    training = TRAINING.model_copy(update={"microbatch_size": 1})
    asked = decided(job([site("a")], training=training, tensor=2, pipeline=2))
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
    changes, _ = changes_that_help(asked, costs_of(asked), found[:1], step_s)
    assert changes[0].what == "training.flash_attention = true"


def test_changes_and_strategies_that_there_is_no_time_for_are_named():
    plan = advised_plan(two_sites(pins={"schedule": "1f1b"}), limit_s=-1.0)
    assert plan.explanation.changes == ()
    assert {one.kind for one in plan.explanation.strategies} <= {"one site", "pipeline", "replicas"}
    assert any(line.startswith("Changes that there was no time to try: ") for line in plan.explanation.advice)
    left = next(
        line for line in plan.explanation.advice if line.startswith("Strategies that there was no time to search for: ")
    )
    assert "sites with layouts of their own" in left


def test_a_search_that_is_out_of_time_ends_with_what_it_has():
    asked = decided(two_sites())
    found = search(asked, costs_of(asked), until_s=0.0).evaluated
    assert 0 < len(found) < len(search(asked, costs_of(asked)).evaluated)


@pytest.mark.parametrize("batch", [255, 126, 66])
def test_a_batch_nearby_that_divides_better_is_a_setting(batch):
    """Of 255 sequences nothing divides: one more is what to change first."""
    training = TRAINING.model_copy(update={"global_batch": batch, "microbatch_size": 1})
    asked = decided(job([site("a", 8), site("b", 8)], both_ways("a", "b"), training))
    costs = costs_of(asked)
    near = [one for one in all_changes((asked, costs, quick_search(asked, costs))) if one.costs == "a setting"]
    told = {int(one.what.rpartition(" ")[2]): one for one in near if "global_batch" in one.what}
    assert len(told) == 1, "of one key the best"
    (size, change), *_ = told.items()
    assert abs(size - batch) <= 0.1 * batch
    assert math.gcd(size, 16) > math.gcd(batch, 16)
    assert "a step" in change.training
    changed = decided(job([site("a", 8), site("b", 8)], both_ways("a", "b"), with_batch(training, size)))
    after_s = planning.plan(changed).prediction.step_s
    assert change.step_s == pytest.approx(after_s, rel=0.05)


def with_batch(training, size):
    return training.model_copy(update={"global_batch": size})


def test_batches_nearby_are_more_divisible_and_near():
    for batch in range(1, 300):
        near = near_batches(job([site("a", 8), site("b", 8)], both_ways("a", "b"), with_batch(TRAINING, batch)))
        assert all(0 < abs(n - batch) <= 0.1 * batch and math.gcd(n, 16) > math.gcd(batch, 16) for n in near)
        assert (near == []) >= (batch % 16 == 0)


@pytest.mark.parametrize("batch", [255, 16, 60])
def test_identical_sites_take_equally_long(batch):
    """The search looks longer at the first of them; that was told as a difference between the sites."""
    training = TRAINING.model_copy(update={"global_batch": batch, "microbatch_size": 1})
    places = [site("a", 8), site("b", 8), site("c", 8)]
    links = [link for one, other in (("a", "b"), ("b", "c"), ("a", "c")) for link in both_ways(one, other)]
    plan = advised_plan(job(places, links, training))
    alone = [one.step_s for one in plan.explanation.strategies if one.kind == "one site"]
    assert len(alone) > 1
    assert len(set(alone)) == 1
    over_several = [one for one in plan.explanation.strategies if one.kind != "one site"]
    several = [(one.kind, len(one.where.split()), "(" in one.where, one.training) for one in over_several]
    assert len(several) == len(set(several)), "the same sites in another order"


def test_sites_that_differ_keep_their_own_steps(unlike):
    alone = [one.step_s for one in unlike.explanation.strategies if one.kind == "one site"]
    assert len(set(alone)) == 2


def test_what_only_an_export_can_run_is_marked_unless_the_plan_is_the_same():
    able = {"same": ("farpipe", "megatron"), "fp8": ("megatron",)}
    asked = two_sites(pins={"sites": ("a",), "tensor": 1})
    ask = lambda plan: able[plan.job.training.matmul]  # noqa: E731
    plan = advised_plan(with_fp8(asked), runs_on=ask)
    marks = {change.what: change.runs_on for change in plan.explanation.changes}
    assert marks['training.matmul = "fp8"'] == ("megatron",)
    assert all(names is None for what, names in marks.items() if "fp8" not in what)
    assert "farpipe can't train this yet; export to megatron." in change_table(plan.explanation.changes).note
    assert "by export only" in gain_lines(with_changes(plan, fp8_of(plan)))[0]
    nothing = advised_plan(with_fp8(asked), runs_on=lambda plan: ())
    assert all(change.runs_on is None for change in nothing.explanation.changes)


def with_fp8(asked):
    rates = asked.cluster.sites[0].device.peak_flops
    fast = [
        one.device.model_copy(update={"peak_flops": rates | {"fp8": 2 * rates["bf16"]}}) for one in asked.cluster.sites
    ]
    sites = [one.model_copy(update={"device": on}) for one, on in zip(asked.cluster.sites, fast, strict=True)]
    return asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"sites": tuple(sites)})})


def with_changes(plan, changes):
    return PlanDocument(plan=plan.plan, explanation=plan.explanation.model_copy(update={"changes": changes}))


def fp8_of(plan):
    return tuple(change for change in plan.explanation.changes if "fp8" in change.what)


def test_pins_of_the_user_are_no_cheapest_gain():
    plan = advised_plan(two_sites(pins={"sites": ("a",), "data": 1, "pipeline": 1, "tensor": 1}))
    assert plan.explanation.changes[0].costs in ("a setting", "a pin")
    pins = [change for change in plan.explanation.changes if change.costs == "a pin"]
    assert pins
    (line,) = gain_lines(with_changes(plan, tuple(pins)))
    assert not line.startswith("Cheapest gain")
    assert pins[0].what in line


def test_a_strategy_that_beats_the_plan_is_told_and_the_plans_own_row_stays_the_chosen_one():
    """Three sites share 255 sequences unevenly; no pipeline has unlike replicas."""
    training = TRAINING.model_copy(update={"global_batch": 255, "microbatch_size": 1})
    pairs = (("a", "b"), ("b", "c"), ("a", "c"))
    links = [link for one, other in pairs for link in both_ways(one, other, gbit_per_s=200.0)]
    plan = advised_plan(job([site(name, 8) for name in "abc"], links, training))
    same = [one for one in plan.explanation.strategies if one.same_training]
    told = [line for line in plan.explanation.advice if line.startswith("Faster than this plan")]
    assert bool(told) == (same[0].step_s < 0.99 * plan.plan.prediction.step_s)
    assert told, "else the test shows nothing"
    assert same[0].where in told[0]
    view = strategy_table(plan.explanation.strategies, chosen=plan.plan.where)
    assert plan.explanation.strategies[view.chosen].where == plan.plan.where
    assert view.chosen != plan.explanation.strategies.index(same[0])


@pytest.mark.parametrize("link", [{"loss": 0.001}, {"jitter_s": 0.01}])
def test_over_links_that_lose_packets_the_plans_own_row_and_verdict_have_the_plans_step(link):
    links = [one.model_copy(update=link) for one in both_ways("a", "b", 0.01, 100.0)]
    training = TRAINING.model_copy(update={"global_batch": 512})
    plan = advised_plan(job([site("a"), site("b")], links, training, tensor=1))
    assert plan.plan.prediction.spread is not None
    own = next(one for one in plan.explanation.strategies if one.same_training and one.where == plan.plan.where)
    assert own.step_s == plan.plan.prediction.step_s
    alone = next(one for one in plan.explanation.strategies if one.kind == "one site")
    gain = float(re.search(r"([\d.]+) times as fast", plan.explanation.verdict)[1])
    assert gain == pytest.approx(alone.step_s / plan.plan.prediction.step_s, abs=0.006)
    assert all(choice.step_s >= plan.plan.prediction.step_s for choice in plan.explanation.runners_up if choice.step_s)


@pytest.mark.parametrize(("batch", "pins", "works"), [(63, {"data": 1}, 64), (126, {"data": 2}, 128)])
def test_of_a_batch_that_the_schedule_can_not_divide_the_one_nearby_is_the_smallest_change(batch, pins, works):
    training = TRAINING.model_copy(update={"global_batch": batch, "microbatch_size": 1, "zero": 1})
    asked = job([site("a", 8)], (), training, "interleaved", pipeline=4, virtual=2, tensor=1, **pins)
    with pytest.raises(InfeasibleError, match=rf"smallest change that works: training\.global_batch = {works}"):
        planning.plan(asked)


def test_where_no_change_works_it_says_which_were_tried(monkeypatch):
    monkeypatch.setattr("farpipe.planning.planner.infeasible._works", lambda changed, costs: False)
    tiny = device(memory_gib=0.5)
    with pytest.raises(InfeasibleError) as found:
        planning.plan(job([site("a", 1, on=tiny)], (), TRAINING))
    last = str(found.value).splitlines()[-1]
    assert "none of the changes that were tried works alone: recomputation, ZeRO" in last
    assert "no single change" not in str(found.value)


def test_a_plan_with_local_steps_waits_for_differences_now_and_then():
    local = LocalSteps(every=20)
    base = two_sites(pins={"replicas": "across"}, latency_s=0.03, gbit_per_s=1.0)
    asked = base.model_copy(update={"training": base.training.model_copy(update={"local_steps": local})})
    exact, rarely = planning.plan(base), planning.plan(asked)
    assert rarely.problem.sync is None, "no gradient crosses"
    assert "a>b" in rarely.problem.links, "the sites have a link all the same"
    once_s = 4 * base.model.num_params / 1.25e8 + 0.03
    assert rarely.prediction.overhead_s == pytest.approx(once_s / 20, rel=0.2)
    assert rarely.prediction.step_s < exact.prediction.step_s - once_s / 2
