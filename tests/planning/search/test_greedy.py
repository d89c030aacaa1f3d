import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.schedule import check
from farpipe.core.simulate import simulate
from farpipe.core.step import Rank, least_activation_bytes
from farpipe.planning.search.greedy import greedy_orders
from farpipe.planning.search.step import search_step, to_schedule
from pipelines import pipeline
from strategies import problems
from two_sites import two_sites


@pytest.mark.parametrize(
    ("times", "delay", "published"),
    [
        ((1, 1, 1), (1, 0), 1.25),
        ((1, 1, 1), (2, 2), 1.50),
        ((76, 93, 41), (0, 0), 1.315),
        ((76, 93, 41), (2, 0), 1.507),
        ((76, 93, 41), (2, 2), 1.654),
    ],
)
def test_greedy_is_as_good_as_was_measured(times, delay, published):
    step = search_step(two_sites(times, delay, in_flight=8))
    makespan_s, _ = greedy_orders(step)[0]
    assert makespan_s / (16 * sum(times)) <= published + 5e-4


def with_memory(problem, factor):
    """The problem with memory for `factor` times what one sequence needs on a rank."""
    ranks = tuple(Rank(memory_bytes=factor * need) for need in least_activation_bytes(problem).tolist())
    return problem.model_copy(update={"ranks": ranks})


@pytest.mark.slow
@given(problems(), st.sampled_from([1.0, 1.5, 2.0, 3.0]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_it_finds_with_chains_is_sound(problem, factor, split):
    tight = with_memory(problem, factor)
    for makespan_s, orders in greedy_orders(search_step(tight), split=split):
        schedule = to_schedule(orders, tight.num_microbatches, "greedy")
        check(tight, schedule)
        assert simulate(tight, schedule).makespan_s == makespan_s


@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 4), st.booleans())
@settings(max_examples=20, deadline=None)
def test_it_finds_an_order_of_sequences_of_equally_many_slices_in_little_memory(num_ranks, num_chains, slices, split):
    problem = pipeline(num_ranks, num_chains * slices, stash=1.0)
    stages = tuple(stage.model_copy(update={"chain_bytes": 0.5}) for stage in problem.stages)
    follows = tuple(None if j % slices == 0 else j - 1 for j in range(num_chains * slices))
    problem = with_memory(problem.model_copy(update={"stages": stages, "follows": follows}), 1.0)
    found = greedy_orders(search_step(problem), split=split)
    assert found
    check(problem, to_schedule(found[0][1], problem.num_microbatches, "greedy"))


@pytest.mark.slow
@given(problems(with_chains=False), st.sampled_from([1.0, 1.5, 2.0, 3.0]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_where_one_microbatch_fits_every_try_ends_in_a_sound_order(problem, factor, split):
    tight = with_memory(problem, factor)
    found = greedy_orders(search_step(tight), split=split)
    assert found
    for makespan_s, orders in found:
        schedule = to_schedule(orders, tight.num_microbatches, "greedy")
        check(tight, schedule)
        assert simulate(tight, schedule).makespan_s == makespan_s
        assert {action.kind for row in schedule.ranks for action in row} == set("FIW" if split else "FB")


@given(problems())
@settings(max_examples=10, deadline=None)
def test_where_no_microbatch_fits_there_is_no_order(problem):
    assert greedy_orders(search_step(with_memory(problem, 0.9))) == []


def test_two_stages_on_a_rank_share_its_memory_without_a_deadlock():
    problem = two_sites((1, 1, 1), (1, 1), num_ranks=4, num_microbatches=12, in_flight=1, chunks=2)
    makespan_s, orders = greedy_orders(search_step(problem))[0]
    check(problem, to_schedule(orders, 12, "greedy"))
    assert makespan_s < 12 * 30
