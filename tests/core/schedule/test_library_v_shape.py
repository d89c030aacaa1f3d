from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InfeasibleError
from farpipe.core.schedule import check, peak_memory_bytes
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from pipelines import bubble_s, pipeline, two_sites

RANKS = [1, 2, 3, 4, 5, 6, 8, 12, 16]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("rounds", [2, 3])
def test_zbv_has_no_bubble_in_the_memory_of_1f1b(num_ranks, rounds):
    problem = pipeline(num_ranks, rounds * num_ranks, v_shape=True, stash=1.0)
    schedule = order("zbv", problem)
    assert bubble_s(problem, schedule) == pytest.approx(0, abs=1e-9)
    assert max(peak_memory_bytes(problem, schedule)) == num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_v_half_and_v_min_need_the_published_memory(num_ranks):
    problem = pipeline(num_ranks, 4 * num_ranks, v_shape=True, stash=1.0)
    assert max(peak_memory_bytes(problem, order("v-half", problem))) == (num_ranks + 2) // 2
    assert max(peak_memory_bytes(problem, order("v-min", problem))) == (num_ranks + 4) // 3


@pytest.mark.parametrize("num_ranks", RANKS)
def test_v_half_has_about_half_and_v_min_about_two_thirds_of_the_bubble_of_1f1b(num_ranks):
    problem = pipeline(num_ranks, 4 * num_ranks, v_shape=True, stash=1.0)
    of_1f1b = 3 * (num_ranks - 1)
    assert bubble_s(problem, order("v-half", problem)) <= of_1f1b / 2
    assert bubble_s(problem, order("v-min", problem)) <= of_1f1b * 2 / 3 + 0.5


def beside_a_head(problem, factor=5.0):
    """The step with a last stage that takes so many times as long, and whose activations free most of theirs at I."""
    *others, last = problem.stages
    times = {name: factor * getattr(last, name) for name in ("forward_s", "input_grad_s", "weight_grad_s")}
    head = last.model_copy(update={"activation_bytes": factor * last.activation_bytes, **times})
    return problem.model_copy(update={"stages": (*others, head)})


def most_held(schedule):
    """The largest number of microbatches between F and W on any rank, counted once a stage."""
    steps = {"F": 1, "I": 0, "W": -1, "B": -1}
    return max(max(accumulate(steps[action.kind] for action in row)) for row in schedule.ranks)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_patterns_hold_what_they_publish_beside_a_heavy_head_too(num_ranks):
    """Counted, not by bytes: a head frees most of its activations before its W, which made room for more stages."""
    problem = beside_a_head(pipeline(num_ranks, 4 * num_ranks, v_shape=True, stash=0.9))
    published = {"zbv": num_ranks, "v-half": (num_ranks + 2) // 2, "v-min": (num_ranks + 4) // 3}
    assert {name: most_held(order(name, problem)) for name in published} == {
        name: 2 * count for name, count in published.items()
    }
    plain, late = order("zbv", problem), order("zbv-late", problem)
    assert max(peak_memory_bytes(problem, plain)) <= num_ranks + 2.0  # one head of 2.5 in place of half a microbatch
    assert most_held(late) > 2 * num_ranks
    assert simulate(problem, late).makespan_s <= simulate(problem, plain).makespan_s


def test_golden_v_min():
    problem = pipeline(2, 3, v_shape=True)
    assert repr(order("v-min", problem)).splitlines()[1:] == [
        "rank 0: 0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 ..",
        "rank 1: 1F0 2F0 2I0 1I0 1F1 2F1 1W0 2W0 2I1 1I1 1F2 2F2 1W1 2W1 ..",
    ]


@given(st.integers(1, 6), st.integers(1, 12), st.integers(2, 24))
@settings(max_examples=60, deadline=None)
def test_wave_keeps_the_memory_of_the_ranks(num_ranks, num_microbatches, halves):
    problem = two_sites(max(2, num_ranks), num_microbatches, latency=3.0, memory=halves / 2, v_shape=True, stash=0.5)
    schedule = order("wave", problem)
    check(problem, schedule)
    assert simulate(problem, schedule).makespan_s >= lower_bound_s(problem) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["zbv", "zbv-late", "v-half", "v-min"])
def test_a_pattern_that_does_not_fit_memory_is_told_with_the_place(name):
    problem = pipeline(4, 16, v_shape=True, memory=1.5)
    with pytest.raises(InfeasibleError, match=f"'{name}' needs too much memory: rank 0 needs 2 B"):
        check(problem, order(name, problem))


@given(st.sampled_from(["zbv", "zbv-late", "v-half", "v-min", "wave"]), st.integers(1, 4), st.integers(1, 6), st.data())
@settings(max_examples=60, deadline=None)
def test_stages_and_microbatches_may_differ(name, num_ranks, num_microbatches, data):
    figures = st.lists(st.integers(0, 6).map(float), min_size=num_microbatches, max_size=num_microbatches).map(tuple)
    names = ("forward_s", "input_grad_s", "weight_grad_s")
    problem = pipeline(num_ranks, num_microbatches, v_shape=True, stash=0.5)
    stages = tuple(s.model_copy(update={n: data.draw(figures) for n in names}) for s in problem.stages)
    problem = problem.model_copy(update={"stages": stages})
    schedule = order(name, problem)
    check(problem, schedule)
    assert simulate(problem, schedule).makespan_s >= lower_bound_s(problem) * (1 - 1e-9)
