import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.errors import InfeasibleError, InputError, UsageError
from farpipe.schedule import check
from farpipe.schedule.bounds import lower_bound_s
from farpipe.schedule.library import ORDERS, order
from farpipe.search import METHODS, search
from farpipe.search.step import fits_memory
from farpipe.simulate import simulate
from strategies import problems
from two_sites import two_sites


def named_s(problem):
    """Step times of all named orders that fit memory."""
    for name in ORDERS:
        try:
            schedule = order(name, problem)
        except (InputError, InfeasibleError):
            continue
        if fits_memory(problem, schedule):
            yield simulate(problem, schedule).makespan_s


@given(problems(max_ranks=3, max_stages=4, max_microbatches=3))
@settings(max_examples=20, deadline=None)
def test_it_is_never_worse_than_a_named_order_nor_below_the_bound(problem):
    found = search(problem, time_limit_s=0.5)
    check(problem, found.schedule)
    assert found.timeline.makespan_s <= min(named_s(problem), default=float("inf")) * (1 + 1e-9)
    assert found.timeline.makespan_s >= found.lower_bound_s >= lower_bound_s(problem) * (1 - 1e-9)
    assert found.proven == (found.gap <= 1e-9)


@given(st.integers(1, 5), st.sampled_from([(0, 0), (1, 0), (2, 2)]), st.sampled_from([1, 2]))
@settings(max_examples=12, deadline=None)
def test_one_more_method_never_makes_it_worse(in_flight, delay, chunks):
    problem = two_sites((3, 4, 2), delay, num_ranks=3, num_microbatches=5, in_flight=in_flight, chunks=chunks)
    times = [search(problem, 0.5, methods=METHODS[:n]).timeline.makespan_s for n in range(1, 5)]
    assert times == sorted(times, reverse=True)


def test_the_same_seed_gives_the_same_order():
    problem = two_sites((76, 93, 41), (2, 0), in_flight=8)
    first, second = (search(problem, 60.0, seed=3, methods=METHODS[:3]) for _ in range(2))
    assert not first.cut_by_clock
    assert first.schedule == second.schedule


def test_small_steps_are_proven_optimal():
    found = search(two_sites((1, 1, 1), (1, 1), num_ranks=4, num_microbatches=6, in_flight=4), 30.0)
    assert found.proven
    assert found.history[-1].makespan_s == pytest.approx(found.history[-1].lower_bound_s)


def test_without_split_backwards_there_are_none():
    found = search(two_sites((3, 4, 2), (2, 1), num_ranks=3, num_microbatches=5, in_flight=3), 1.0, split=False)
    assert {action.kind for row in found.schedule.ranks for action in row} == {"F", "B"}


def test_ctrl_c_returns_the_best_so_far():
    def interrupt(progress):
        raise KeyboardInterrupt

    found = search(two_sites((1, 1, 1), (2, 2), num_ranks=4, num_microbatches=6, in_flight=4), on_progress=interrupt)
    assert found.cut_by_clock
    check(two_sites((1, 1, 1), (2, 2), num_ranks=4, num_microbatches=6, in_flight=4), found.schedule)


def test_a_clock_that_ran_out_is_told_and_the_answer_still_stands():
    problem = two_sites((76, 93, 41), (2, 2), in_flight=8)
    found = search(problem, 0.0)
    assert found.cut_by_clock
    assert found.timeline.makespan_s <= min(named_s(problem))


def test_a_microbatch_that_does_not_fit_is_infeasible_and_names_the_rank():
    with pytest.raises(InfeasibleError, match="rank 0"):
        search(two_sites((1, 1, 1), num_ranks=2, num_microbatches=2, in_flight=0.5))


def test_an_unknown_method_is_refused():
    with pytest.raises(UsageError, match="did you mean 'greedy'"):
        search(two_sites(num_ranks=2, num_microbatches=2), methods=["greedi"])
