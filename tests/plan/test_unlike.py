"""The search for replicas and ranks that differ."""

from collections import Counter
from dataclasses import replace

import pytest

from farpipe.cost import JobCosts
from farpipe.errors import FarpipeError, InfeasibleError
from farpipe.plan import make_plan
from farpipe.plan.engine import within_engine
from farpipe.plan.spreads import GroupDegrees, Spread, spreads
from farpipe.plan.unlike import _Bound, find_unlike, play_spread
from plan.jobs import TRAINING, both_ways, device, job, site

SLOW = device("slow", memory_gib=24.0, flops=156e12)
SPEC = TRAINING.model_copy(update={"microbatch_size": 2, "global_batch": 32, "recompute": "none"})
PAIR = job([site("a", 2), site("b", 2, SLOW)], both_ways("a", "b"), SPEC)
COSTS = JobCosts(PAIR.model, SPEC)


def played(spread):
    try:
        return play_spread(PAIR, COSTS, spread)
    except FarpipeError:
        return None


@pytest.fixture(scope="module")
def every():
    """Every spread of the small cluster with what it would do."""
    return {spread: result for spread in spreads(PAIR) if (result := played(spread)) is not None}


@pytest.mark.slow
def test_no_spread_is_faster_than_its_bound(every):
    bound = _Bound(PAIR, COSTS)
    assert len(every) > 30
    for spread, result in every.items():
        assert bound.seconds(spread) <= result.step_s * (1 + 1e-9), spread


@pytest.mark.slow
def test_the_search_finds_the_best_of_all(every):
    found = find_unlike(PAIR, COSTS)
    best = min(result.step_s for result in every.values())
    assert found.played.step_s <= best * (1 + found.gap) * (1 + 1e-9)
    assert found.bound_s <= best * (1 + 1e-9)


@pytest.mark.slow
def test_spreads_fit_the_sites_and_each_comes_once(every):
    names = [(one.groups, one.microbatch_size) for one in spreads(PAIR)]
    assert len(names) == len(set(names))
    for spread in every:
        used = Counter()
        for group in spread.groups:
            for name, tensor, data in zip(group.sites, group.tensor, group.data, strict=True):
                used[name] += tensor * data
        assert all(used[s.name] <= s.num_devices for s in PAIR.cluster.sites), spread
    assert any(len({*g.tensor}) > 1 or len({*g.data}) > 1 for spread in every for g in spread.groups)
    assert any(len(spread.groups) == 2 for spread in every)


def test_two_pipelines_over_two_sites_each():
    places = [site("a", 2), site("b", 2), site("c", 2), site("d", 2)]
    links = [link for pair in ("ab", "ac", "ad", "bc", "bd", "cd") for link in both_ways(*pair)]
    found = list(spreads(job(places, links, SPEC)))
    wanted = (GroupDegrees(("a", "b"), (1, 1), (2, 2)), GroupDegrees(("c", "d"), (1, 1), (2, 2)))
    assert Spread(wanted, 2) in found
    without = [link for link in links if {link.source, link.target} != {"a", "c"}]
    assert Spread(wanted, 2) not in list(spreads(job(places, without, SPEC)))


def test_it_is_never_slower_than_the_usual_plan_and_says_what_it_looked_at():
    usual = make_plan(PAIR)
    asked = PAIR.model_copy(update={"layout": PAIR.layout.model_copy(update={"replicas": "unlike"})})
    plan = make_plan(asked)
    assert plan.job == asked
    assert plan.prediction.step_s <= usual.prediction.step_s
    assert "spreads of replicas that differ were looked at" in plan.advice[-1]


def test_it_plans_what_no_pipeline_of_equal_ranks_can():
    """The slow site's memory needs two devices for a layer's share, and one link is too slow for a pipeline."""
    places = [site("a", 4), site("b", 4, device("tiny", memory_gib=6.0, flops=300e12))]
    spec = SPEC.model_copy(update={"global_batch": 96})
    asked = job(places, both_ways("a", "b", gbit_per_s=400.0), spec, replicas="unlike")
    plan = make_plan(asked)
    alike = make_plan(asked.model_copy(update={"layout": asked.layout.model_copy(update={"replicas": None})}))
    assert plan.unlike
    assert plan.prediction.step_s < alike.prediction.step_s
    assert sum(at.data * at.microbatch_size * at.num_microbatches for at, _ in plan.all_groups) == 96


def test_where_nothing_fits_the_reason_is_the_usual_one():
    tiny = device("tiny", memory_gib=0.5)
    asked = job([site("a", 2, tiny), site("b", 2, tiny)], both_ways("a", "b"), SPEC, replicas="unlike")
    with pytest.raises(InfeasibleError, match="memory"):
        make_plan(asked)


def test_training_plans_replicas_that_are_alike():
    asked = job(PAIR.cluster.sites, PAIR.cluster.links, SPEC, replicas="unlike")
    assert within_engine(asked)[0].layout.replicas is None


def test_a_spread_in_words():
    group = GroupDegrees(("a", "b"), (1, 4), (4, 2))
    assert str(Spread((group, replace(group, sites=("c", "c"))), 2)) == (
        "a > b: p2 t1,4 d4,2 + c: p2 t1,4 d4,2, microbatches of 2"
    )
