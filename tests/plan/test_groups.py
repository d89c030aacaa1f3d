"""Groups of replicas that are not alike: shares of the batch, the joined step, plans from pins."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.cost import JobCosts
from farpipe.cost.groups import GroupReduce, group_costs, group_reduces
from farpipe.errors import InfeasibleError, InputError
from farpipe.plan import Plan, make_plan
from farpipe.plan.engine import plan_obstacle
from farpipe.plan.grouped_plan import replay
from farpipe.plan.groups import joined_s, play_groups, shaped_group
from farpipe.plan.shares import Pace, balanced_counts
from farpipe.spec import parse_job
from plan.jobs import MODEL, TRAINING, both_ways, device, job, site

SLOW = device("slow", flops=156e12)
PLACES = [site("a"), site("b", on=SLOW)]
LINKS = both_ways("a", "b")
SPEC = TRAINING.model_copy(update={"microbatch_size": 1, "recompute": "none"})


def grouped(*groups, **more):
    return job(PLACES, LINKS, more.pop("training", SPEC), groups=groups, **more)


paces = st.lists(
    st.builds(
        Pace,
        sequences=st.sampled_from([1, 2, 4]),
        fixed_s=st.floats(0, 5),
        each_s=st.floats(0.1, 3),
        pinned=st.none(),
    ),
    min_size=1,
    max_size=3,
)


@given(st.integers(1, 24), paces)
def test_shares_are_the_best_of_all_that_add_up(batch, groups):
    counts = product(*(range(1, batch // pace.sequences + 1) for pace in groups))
    fits = [c for c in counts if sum(n * p.sequences for n, p in zip(c, groups, strict=True)) == batch]
    if not fits:
        with pytest.raises(InfeasibleError, match="global_batch"):
            balanced_counts(batch, groups)
        return
    slowest = [max(p.seconds(n) for n, p in zip(c, groups, strict=True)) for c in fits]
    found = balanced_counts(batch, groups)
    assert tuple(found) in fits
    assert max(p.seconds(n) for n, p in zip(found, groups, strict=True)) == pytest.approx(min(slowest))


def test_equal_groups_have_nearly_equal_shares_and_pinned_ones_their_own():
    pace = Pace(1, 0.0, 1.0)
    assert sorted(balanced_counts(7, [pace] * 3)) == [2, 2, 3]
    assert balanced_counts(7, [replace(pace, pinned=5), pace]) == [5, 2]
    with pytest.raises(InfeasibleError, match="with those pinned"):
        balanced_counts(7, [replace(pace, pinned=5), replace(pace, pinned=3)])


def test_a_site_half_as_fast_gets_about_half_as_much():
    spec = SPEC.model_copy(update={"global_batch": 384, "microbatch_size": 8})
    plan = make_plan(grouped({"sites": ["a"], "data": 4}, {"sites": ["b"], "data": 4}, training=spec))
    shares = [at.data * at.microbatch_size * at.num_microbatches for at, _ in plan.all_groups]
    assert sum(shares) == 384
    assert 1.5 < shares[0] / shares[1] < 2.6


def test_sums_of_gradients_wait_for_the_last_group_and_for_their_links():
    costs = JobCosts(MODEL, SPEC)
    spec = job(PLACES, LINKS, SPEC)
    groups = [with_count(shaped_group(spec, costs, [name] * 2, [1, 1], [1, 1], 1), 8) for name in ("a", "b")]
    played = play_groups(spec, costs, groups, "1f1b")
    ends = [played.groups[1].timeline.actions, played.groups[0].timeline.actions]
    ready = [max(a["end_s"][a["stage"] == stage].max() for a in ends) for stage in (0, 1)]
    assert [one.stages for one in played.reduces] == [(0, 0), (1, 1)]
    first, second = sorted(zip(ready, played.reduces, strict=True), key=lambda pair: pair[0])
    done = first[0] + first[1].seconds
    assert played.makespan_s == pytest.approx(max(done, second[0]) + second[1].seconds)


def with_count(group, count):
    return replace(group, layout=replace(group.layout, num_microbatches=count))


def test_every_link_of_the_ring_carries_its_share_once():
    spec, costs = job(PLACES, LINKS, SPEC), JobCosts(MODEL, SPEC)
    one = shaped_group(spec, costs, ["a"], [2], [1], 1)
    two = shaped_group(spec, costs, ["b", "b"], [1, 2], [2, 1], 1)
    reduces = group_reduces(costs, [one, two], spec.cluster)
    assert [reduce.stages for reduce in reduces] == [(0, 0), (0, 1)]
    assert sum(reduce.bytes for reduce in reduces) == pytest.approx(
        MODEL.num_params * 4
    )  # 2 (n - 1)/n is 1 for two sites
    assert {reduce.links for reduce in reduces} == {("a>b", "b>a")}


def test_one_group_sums_nothing_more():
    plan = make_plan(grouped({"sites": ["a", "b"], "tensor": [1, 2], "data": [2, 1]}))
    assert plan.groups == ()
    whole = replay(plan, plan.schedule)
    assert whole.reduces == ()
    assert plan.prediction.makespan_s == pytest.approx(joined_s([whole.groups[0].timeline], []))


def test_a_later_reduce_waits_for_a_busy_link():
    plan = make_plan(grouped({"sites": ["a"]}))
    (timeline,) = (played.timeline for played in replay(plan, plan.schedule).groups)
    reduces = [GroupReduce((0,), ("a>b",), 1.0, 3.0), GroupReduce((0,), ("a>b",), 1.0, 2.0)]
    assert joined_s([timeline], reduces) == pytest.approx(timeline.makespan_s + 5.0)


def test_a_plan_of_groups_survives_its_file_and_an_ordinary_one_says_nothing_of_them():
    plan = make_plan(grouped({"sites": ["a", "b"], "tensor": [1, 2], "data": [2, 1]}, {"sites": ["a"], "data": 2}))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.where == "a > b + a"
    assert plan.devices == {"a": 4, "b": 2}
    assert plan_obstacle(plan)[0].startswith("ranks or replicas that differ")
    plain = make_plan(job(training=SPEC)).to_data()
    assert "groups" not in plain
    assert "shapes" not in plain["layout"]
    assert "groups" not in plain["job"]["layout"]


def test_ranks_that_are_alike_after_all_make_an_ordinary_plan():
    plan = make_plan(grouped({"sites": ["a", "b"], "data": 2}))
    assert plan.layout.shapes == ()
    assert plan_obstacle(plan) == ("", "")


def test_the_job_survives_its_file():
    spec = grouped({"sites": ["a", "b"], "tensor": [1, 2], "data": 2, "layers": [5, 3]}, {"sites": ["a"]})
    assert parse_job(spec.to_toml()).layout == spec.layout


@pytest.mark.parametrize(
    ("groups", "more", "message"),
    [
        ([], {}, "expected one group at least"),
        ([{"sites": ["a", "c"]}], {}, "there is no site 'c'"),
        ([{"sites": ["a"], "tensor": [1, 2]}], {}, "expected one number for each of 1 ranks, found 2"),
        ([{"sites": ["a"], "tensor": 3}], {}, "3 does not divide model.num_heads"),
        ([{"sites": ["a", "b"], "layers": [3, 3]}], {}, "they sum to 6, the model has 8 layers"),
        ([{"sites": ["a"]}], {"tensor": 2}, "not beside layout.groups"),
    ],
)
def test_groups_that_can_t_be_are_told(groups, more, message):
    with pytest.raises(ValueError, match=message):
        grouped(*groups, **more)


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([{"sites": ["a"], "data": 4}, {"sites": ["a"]}], InfeasibleError, "all groups' ranks there need 5"),
        ([{"sites": ["a", "b"], "data": [2, 3]}], InputError, "data 2 of rank 0 does not divide the 3 sequences"),
        ([{"sites": ["a"], "num_microbatches": 7}], InfeasibleError, "no whole numbers of microbatches"),
    ],
)
def test_groups_that_do_not_fit_are_told(groups, error, message):
    with pytest.raises(error, match=message):
        make_plan(grouped(*groups))


def test_shares_that_do_not_add_up_are_told():
    spec, costs = job(PLACES, LINKS, SPEC), JobCosts(MODEL, SPEC)
    group = shaped_group(spec, costs, ["a"], [1], [1], 1)
    with pytest.raises(InputError, match=r"their shares are 1 = 1 sequences; training\.global_batch is 16"):
        group_costs(costs, [group], spec.cluster)
