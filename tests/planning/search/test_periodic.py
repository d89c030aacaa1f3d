import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.schedule import check
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop
from farpipe.core.step.player import Player
from farpipe.planning.search import periodic, search
from farpipe.planning.search.greedy import greedy_orders
from farpipe.planning.search.periodic import extended, find_periods, short_microbatches, shortened
from farpipe.planning.search.step import search_step, to_schedule
from two_sites import two_sites


@pytest.mark.slow
@given(
    st.sampled_from([(1, 1, 1), (3, 4, 2), (76, 93, 41)]),
    st.sampled_from([(0, 0), (1, 0), (2, 2)]),
    st.integers(2, 4),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.integers(100, 300),
)
@settings(max_examples=25, deadline=None)
def test_a_repeated_period_is_a_sound_order_of_any_length(times, delay, in_flight, chunks, split, num_microbatches):
    problem = two_sites(
        times, delay, num_ranks=3, num_microbatches=num_microbatches, in_flight=in_flight, chunks=chunks
    )
    short = search_step(shortened(problem, 60))
    _, orders = greedy_orders(short, split=split)[0]
    for period in find_periods(short, orders, Player(short.arrays).start_s(orders)):
        repeated = to_schedule(extended(short, orders, period, num_microbatches), num_microbatches, "repeated")
        check(problem, repeated)
        assert simulate(problem, repeated).makespan_s >= lower_bound_s(problem)


def test_a_steady_state_costs_what_it_costs_in_the_short_step():
    """1F1B-like steps on two ranks: every further microbatch takes F + I + W, no more."""
    problem = two_sites((1, 1, 1), (0, 0), num_ranks=2, num_microbatches=5_000, in_flight=4)
    short = search_step(shortened(problem, 100))
    makespan_s, orders = greedy_orders(short)[0]
    period = find_periods(short, orders, Player(short.arrays).start_s(orders))[0]
    whole_s = Player(search_step(problem).arrays).makespan_s(extended(short, orders, period, 5_000))
    assert whole_s == pytest.approx(makespan_s + 4_900 * 3, abs=3 * period.count)


def test_a_shortened_step_has_the_figures_of_the_long_one():
    problem = two_sites((3, 4, 2), (1, 1), num_ranks=2, num_microbatches=8, in_flight=2)
    rows = {"forward_s": (3.0,) * 8, "activation_bytes": (1.0,) * 8}
    forward = problem.hops[0].forward.model_copy(update={"bytes": (3.0,) * 8, "link": ("a>b",) * 8})
    listed = problem.model_copy(
        update={
            "stages": tuple(stage.model_copy(update=rows) for stage in problem.stages),
            "hops": (Hop(forward=forward, backward=problem.hops[0].backward),),
        }
    )
    assert shortened(listed, 3) == problem.model_copy(update={"num_microbatches": 3})


def test_steps_that_are_short_or_whose_microbatches_differ_are_left_alone():
    long = two_sites(num_ranks=2, num_microbatches=100_000)
    assert short_microbatches(search_step(long)) == 256
    assert short_microbatches(search_step(two_sites(num_ranks=2, num_microbatches=1_000))) is None
    times = tuple(np.linspace(1, 2, 100_000).tolist())
    stages = (long.stages[0].model_copy(update={"forward_s": times}), *long.stages[1:])
    assert short_microbatches(search_step(long.model_copy(update={"stages": stages}))) is None


@pytest.mark.slow
@pytest.mark.parametrize("split", [True, False])
def test_a_long_step_is_answered_by_repetition(monkeypatch, split):
    monkeypatch.setattr(periodic, "LONG_ACTIONS", 5_000)
    problem = two_sites((76, 93, 41), (2, 0), num_ranks=3, num_microbatches=2_000, in_flight=6)
    found = search(problem, 2.0, split=split)
    check(problem, found.schedule)
    assert found.gap < 0.05
    assert {action.kind for row in found.schedule.ranks for action in row} == set("FIW" if split else "FB")
    assert "repeated" in found.schedule.method
