import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from farpipe.schedule import check
from farpipe.schedule.bounds import lower_bound_s
from farpipe.search import window_kernel
from farpipe.search.greedy import greedy_orders
from farpipe.search.step import Player, search_step, to_orders, to_schedule
from farpipe.search.windows import _play, improve_windows
from farpipe.simulate import simulate
from strategies import POSITIVE_SECONDS, problems_with_schedules
from two_sites import two_sites


@pytest.mark.slow
@given(problems_with_schedules(), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_any_windows_end_in_a_sound_order_that_is_no_worse(pair, seed):
    problem, schedule = pair
    step, orders = search_step(problem), to_orders(schedule)
    before_s = Player(step).makespan_s(orders)
    makespan_s, better = improve_windows(step, (before_s, orders), num_windows=4, target_s=0.0, seed=seed)
    found = to_schedule(better, problem.num_microbatches, "windows")
    check(problem, found, memory=False)
    assert simulate(problem, found).makespan_s == makespan_s <= before_s


@given(st.integers(1, 4), st.sampled_from([1, 2]))
@settings(max_examples=10, deadline=None)
def test_windows_keep_memory(in_flight, chunks):
    problem = two_sites((1, 2, 1), (1, 1), num_ranks=3, num_microbatches=6, in_flight=in_flight, chunks=chunks)
    step = search_step(problem)
    makespan_s, orders = improve_windows(step, greedy_orders(step)[-1], num_windows=4, target_s=0.0)
    check(problem, to_schedule(orders, 6, "windows"))
    assert makespan_s <= greedy_orders(step)[-1][0]


@pytest.mark.slow
@given(problems_with_schedules(with_sync=False, seconds=POSITIVE_SECONDS))
@settings(max_examples=40, deadline=None)
def test_nothing_in_an_order_has_to_begin_before_it_does_for_the_step_to_end_when_it_does(pair):
    problem, schedule = pair
    player, orders = Player(search_step(problem)), to_orders(schedule)
    assume(not player.step.arrays.shared.any())  # there the sequence on a link is only about that of the ends
    now = _play(player, orders, player.makespan_s(orders))
    assert (now.due_s >= now.start_s * (1 - 1e-9) - 1e-9).all()
    last = now.end_s.argmax()
    assert now.due_s[last] == pytest.approx(now.start_s[last])


def test_the_end_of_a_step_is_put_right_where_greedy_wastes_a_slot():
    problem = two_sites((1, 1, 1), (1, 0), num_ranks=16, num_microbatches=64, in_flight=16)
    step, bound_s = search_step(problem), lower_bound_s(problem)
    greedy = greedy_orders(step)[0]
    makespan_s, orders = improve_windows(step, greedy, num_windows=8, target_s=bound_s)
    check(problem, to_schedule(orders, 64, "windows"))
    assert makespan_s < greedy[0]
    assert makespan_s == pytest.approx(bound_s)


def test_the_same_seed_and_number_of_windows_give_the_same_order():
    step = search_step(two_sites((76, 93, 41), (2, 0), num_ranks=6, num_microbatches=24, in_flight=6))
    first, second = (
        improve_windows(step, greedy_orders(step)[0], num_windows=4, target_s=0.0, seed=5) for _ in range(2)
    )
    assert first[0] == second[0]
    assert first[1][0].tolist() == second[1][0].tolist()


def test_it_stops_when_told_to():
    step, calls = search_step(two_sites((3, 4, 2), (2, 0), num_ranks=4, num_microbatches=8, in_flight=4)), []

    def report(makespan_s, orders):
        calls.append(makespan_s)
        return len(calls) < 2

    improve_windows(step, greedy_orders(step)[-1], num_windows=9, target_s=0.0, report=report)
    assert len(calls) == 2


def test_every_message_has_its_consumer():
    problem = two_sites(num_ranks=3, num_microbatches=2, in_flight=3)
    codes, _ = greedy_orders(search_step(problem))[0][1]
    place = window_kernel.places(codes, 4 * 3 * 2)
    targets = {int(code): int(window_kernel.consumer(code, place, (3, 2))) for code in codes}
    assert codes[targets[4 * (0 * 2 + 1)]] == 4 * (1 * 2 + 1)  # 0F1 -> 1F1
    assert codes[targets[4 * (2 * 2 + 0) + 1]] == 4 * (1 * 2 + 0) + 1  # 2I0 -> 1I0
    assert {targets[4 * (2 * 2 + 1)], targets[4 * 1 + 1], targets[4 * 3 + 2]} == {-1}  # 2F1, 0I1, 1W1
