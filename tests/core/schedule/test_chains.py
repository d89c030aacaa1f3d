"""Slices of sequences in every named order: forwards ascending, backwards descending, within memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InfeasibleError
from farpipe.core.schedule import check, peak_memory_bytes
from farpipe.core.schedule.library import ORDERS, order
from farpipe.core.simulate import simulate
from farpipe.core.step import Rank
from pipelines import pipeline
from strategies import follows

V_SHAPE = ("zbv", "zbv-late", "v-half", "v-min", "wave")


def chained(problem, follows, chain_bytes=0.5):
    stages = tuple(stage.model_copy(update={"chain_bytes": chain_bytes}) for stage in problem.stages)
    return problem.model_copy(update={"stages": stages, "follows": follows})


def with_memory(problem, memory):
    return problem.model_copy(update={"ranks": (Rank(memory_bytes=memory),) * problem.num_ranks})


@pytest.mark.parametrize("name", ORDERS)
@given(st.integers(1, 5), st.integers(1, 3), st.data())
@settings(max_examples=25, deadline=None)
def test_every_order_keeps_chains(name, num_ranks, rounds, data):
    loops = 2 if name == "bfs" or (name == "interleaved" and data.draw(st.booleans())) else 1
    problem = pipeline(num_ranks, num_ranks * rounds, loops, v_shape=name in V_SHAPE)
    problem = chained(problem, data.draw(follows(problem.num_microbatches)))
    check(problem, order(name, problem))


@pytest.mark.parametrize("name", ["zb-1p", "zb-2p", "wave"])
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 12), st.data())
@settings(max_examples=40, deadline=None)
def test_orders_that_look_at_memory_keep_it_or_say_so(name, num_ranks, num_microbatches, memory, data):
    problem = pipeline(
        num_ranks, num_microbatches, v_shape=name == "wave", stash=data.draw(st.sampled_from([0.0, 1.0]))
    )
    problem = with_memory(chained(problem, data.draw(follows(num_microbatches))), float(memory))
    try:
        schedule = order(name, problem)
    except InfeasibleError:
        return
    check(problem, schedule)


def test_the_warm_up_grows_by_the_slices_of_a_sequence_less_one():
    """Seq1F1B (arXiv 2406.03488): p - 1 - i + n - 1 forwards before the first backward, and the bubble of one slice."""
    problem = chained(pipeline(4, 16), tuple(None if j % 4 == 0 else j - 1 for j in range(16)), chain_bytes=0.0)
    schedule = order("1f1b", problem)
    assert [next(i for i, a in enumerate(row) if a.kind == "B") for row in schedule.ranks] == [7, 6, 5, 4]
    assert [str(action) for action in schedule.ranks[3][4:8]] == ["3B3", "3F4", "3B2", "3F5"]
    assert peak_memory_bytes(problem, schedule) == [7, 6, 5, 4]
    assert simulate(problem, schedule).makespan_s == pytest.approx(3 * 16 + 3 * 3, rel=0.05)


def test_without_chains_nothing_changes():
    problem = pipeline(4, 8)
    assert order("1f1b", chained(problem, (None,) * 8)).ranks == order("1f1b", problem).ranks
    assert order("zb-1p", chained(problem, (None,) * 8, 0.0)).ranks == order("zb-1p", problem).ranks
