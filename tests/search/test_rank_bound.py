import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.schedule.bounds import lower_bound_s
from farpipe.search import search
from farpipe.search.exact import solve
from farpipe.search.greedy import greedy_orders
from farpipe.search.rank_bound import rank_bound_s
from farpipe.search.step import search_step
from two_sites import two_sites


@given(
    st.sampled_from([(1, 1, 1), (3, 4, 2)]),
    st.sampled_from([(0, 0), (2, 0), (1, 1)]),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.integers(0, 1),
)
@settings(max_examples=25, deadline=None)
def test_no_rank_alone_takes_longer_than_the_best_of_all_orders(times, delay, in_flight, chunks, rank):
    problem = two_sites(times, delay, num_ranks=2, num_microbatches=3, in_flight=in_flight, chunks=chunks)
    step = search_step(problem)
    worst = greedy_orders(step)[-1]
    found = solve(step, worst, 0.0, time_limit_s=5)
    assert found.proven
    bound_s, cut = rank_bound_s(step, rank, worst, 0.0, effort=1.0, limit_s=math.inf)
    assert not cut
    assert bound_s <= found.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize(("num_ranks", "optimum"), [(2, 39.5), (3, 29.5)])
def test_where_a_v_turns_its_memory_says_how_fast_the_step_can_be(num_ranks, optimum):
    num_microbatches = 8 if num_ranks == 2 else 6
    problem = two_sites(
        (1, 1, 1), (2, 0), num_ranks=num_ranks, num_microbatches=num_microbatches, in_flight=num_ranks, chunks=2
    )
    step = search_step(problem)
    best = (optimum, greedy_orders(step)[0][1])
    assert lower_bound_s(problem) < 0.9 * optimum
    found = rank_bound_s(step, num_ranks - 1, best, lower_bound_s(problem), effort=5.0, limit_s=60.0)
    assert found == (pytest.approx(optimum), False)


def test_the_portfolio_proves_a_v_over_three_ranks():
    found = search(two_sites((1, 1, 1), (2, 0), num_ranks=3, num_microbatches=6, in_flight=3, chunks=2), 20.0)
    assert found.proven
    assert found.timeline.makespan_s == pytest.approx(29.5)
