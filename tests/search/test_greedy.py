import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.schedule import check
from farpipe.search.greedy import greedy_orders
from farpipe.search.step import search_step, to_schedule
from farpipe.simulate import simulate
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
    """The problem with room for `factor` times what one microbatch needs on a rank."""
    ranks = tuple(
        rank.model_copy(update={"memory_bytes": factor * 2.0 * len(stages)})
        for rank, stages in zip(problem.ranks, problem.stages_of_rank, strict=True)
    )
    return problem.model_copy(update={"ranks": ranks})


@given(problems(), st.sampled_from([1.0, 1.5, 2.0, 3.0]), st.booleans())
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
