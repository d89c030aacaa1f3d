import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InfeasibleError, InputError, UsageError
from farpipe.core.schedule import check
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.schedule.library import ORDERS, order
from farpipe.core.simulate import simulate
from farpipe.core.step import Rank, least_activation_bytes
from farpipe.planning.search import METHODS, search
from farpipe.planning.search.step import fits_memory, search_step, to_orders
from strategies import problems
from two_sites import two_sites


def named_s(problem):
    """Step times of all named orders that fit memory."""
    for name in ORDERS:
        try:
            schedule = order(name, problem)
        except (InputError, InfeasibleError):
            continue
        if fits_memory(search_step(problem), to_orders(schedule)):
            yield simulate(problem, schedule).makespan_s


@given(problems(max_ranks=3, max_stages=4, max_microbatches=3))
@settings(max_examples=20, deadline=None)
def test_it_is_never_worse_than_a_named_order_nor_below_the_bound(problem):
    found, named = search(problem, time_limit_s=2.0), [*named_s(problem)]
    assert named, "1F1B fits these problems"
    check(problem, found.schedule)
    assert found.timeline.makespan_s <= min(named) * (1 + 1e-9)
    assert found.timeline.makespan_s >= found.lower_bound_s >= lower_bound_s(problem) * (1 - 1e-9)
    assert found.proven == (found.gap <= 1e-9)


@pytest.mark.slow
@given(st.integers(1, 5), st.sampled_from([(0, 0), (1, 0), (2, 2)]), st.sampled_from([1, 2]))
@settings(max_examples=12, deadline=None)
def test_one_more_method_never_makes_it_worse(in_flight, delay, chunks):
    problem = two_sites((3, 4, 2), delay, num_ranks=3, num_microbatches=5, in_flight=in_flight, chunks=chunks)
    times = [search(problem, 0.5, methods=METHODS[:n]).timeline.makespan_s for n in range(1, len(METHODS) + 1)]
    assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_more_memory_never_makes_a_proven_answer_worse():
    """True of the model: what fits little memory fits more. Of the search where it finds the best of all orders."""
    proven = []

    @given(problems(max_ranks=2, max_stages=2, max_microbatches=3), st.integers(0, 3))
    @settings(max_examples=15, deadline=None)
    def never_worse(problem, seed):
        before_s, least = math.inf, least_activation_bytes(problem)
        for factor in (1.0, 1.5, 2.0, 3.0):
            ranks = tuple(Rank(memory_bytes=factor * size) for size in least.tolist())
            found = search(problem.model_copy(update={"ranks": ranks}), 2.0, seed)
            proven.append(found.proven)
            if found.proven:
                assert found.timeline.makespan_s <= before_s * (1 + 1e-9)
            before_s = min(before_s, found.timeline.makespan_s)

    never_worse()
    assert sum(proven) > len(proven) / 2, "most steps as small as these are proven"


@given(problems(max_ranks=3, max_stages=4, max_microbatches=3), st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_the_same_problem_and_seed_give_the_same_schedule(problem, seed):
    first, second = (search(problem, 1.0, seed) for _ in range(2))
    assert first.cut_by_clock or second.cut_by_clock or first.schedule == second.schedule


def test_the_same_seed_gives_the_same_order():
    problem = two_sites((76, 93, 41), (2, 0), in_flight=8)
    first, second = (search(problem, 2.0, seed=3, methods=METHODS[:3]) for _ in range(2))
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
        if math.isfinite(progress.makespan_s):
            raise KeyboardInterrupt

    found = search(two_sites((1, 1, 1), (2, 2), num_ranks=4, num_microbatches=6, in_flight=4), on_progress=interrupt)
    assert found.cut_by_clock
    assert found.interrupted
    check(two_sites((1, 1, 1), (2, 2), num_ranks=4, num_microbatches=6, in_flight=4), found.schedule)


def test_a_clock_that_ran_out_is_told_and_the_answer_still_stands():
    problem = two_sites((76, 93, 41), (2, 2), in_flight=8)
    found = search(problem, 0.0)
    assert found.cut_by_clock
    assert found.timeline.makespan_s <= min(named_s(problem))


@pytest.mark.timeout(60)
def test_the_clock_is_kept_where_the_step_is_large():
    problem = two_sites((76, 93, 41), (2, 2), num_ranks=32, num_microbatches=128, in_flight=32)
    search(two_sites(num_ranks=2, num_microbatches=2, chunks=1), 1.0)  # compile
    found = search(problem, 0.05)
    assert found.cut_by_clock
    check(problem, found.schedule)


@pytest.mark.slow
def test_a_large_step_gets_better_than_greedy_and_all_named_orders():
    problem = two_sites((76, 93, 41), (1, 0), num_ranks=16, num_microbatches=32, in_flight=16)
    found = search(problem, 4.0)
    others = [search(problem, 60.0, methods=[method]).timeline.makespan_s for method in ("named", "greedy")]
    assert found.timeline.makespan_s < min(others)


@pytest.mark.parametrize(
    ("static", "said"),
    [
        (0.0, "it would take 8 microbatches instead of 2, each 1/4 as large, or recomputation that keeps 25 % of"),
        (0.5, "even the smallest microbatch is too large"),
    ],
)
def test_a_microbatch_that_does_not_fit_is_infeasible_and_the_rank_and_what_would_fit_are_told(static, said):
    problem = two_sites((1, 1, 1), num_ranks=2, num_microbatches=2, in_flight=4)
    small = Rank(memory_bytes=0.25, static_bytes=static)
    with pytest.raises(InfeasibleError, match=r"rank 1 has 0\.25 B") as caught:
        search(problem.model_copy(update={"ranks": (problem.ranks[0], small)}))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "times", [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1e12, 1e12, 1e12), (1e15, 1e-9, 1), (1e-300, 1e-300, 1e-300)]
)
def test_empty_and_overlong_actions_are_ordered_like_others(times):
    problem = two_sites(times, (1, 1e-3), num_ranks=3, num_microbatches=6, in_flight=3)
    found = search(problem, 1.0)
    assert found.timeline.makespan_s >= found.lower_bound_s >= 0
    assert found.gap < 0.2


def test_a_stash_larger_than_the_activation_is_never_split_over_the_limit():
    problem = two_sites((1, 1, 1), (1, 0), num_ranks=2, num_microbatches=3, in_flight=1)
    stages = tuple(stage.model_copy(update={"weight_stash_bytes": 2.0}) for stage in problem.stages)
    found = search(problem.model_copy(update={"stages": stages}), 1.0)
    check(problem.model_copy(update={"stages": stages}), found.schedule)


@pytest.mark.slow
def test_a_hundred_thousand_microbatches_are_answered():
    problem = two_sites((1, 1, 1), (2, 1), num_ranks=2, num_microbatches=100_000, in_flight=4)
    assert search(problem, 1.0).gap < 1


def test_an_unknown_method_is_refused():
    with pytest.raises(UsageError, match="did you mean 'greedy'"):
        search(two_sites(num_ranks=2, num_microbatches=2), methods=["greedi"])
