import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.schedule import check
from farpipe.core.simulate import simulate
from farpipe.core.step.player import Player
from farpipe.planning.search import local_kernel
from farpipe.planning.search.greedy import greedy_orders
from farpipe.planning.search.local import improve
from farpipe.planning.search.step import search_step, to_orders, to_schedule
from strategies import POSITIVE_SECONDS, problems_with_schedules
from two_sites import two_sites


@pytest.mark.slow
@given(problems_with_schedules(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_walk_ends_in_a_sound_order_that_is_no_worse(pair, seed):
    problem, schedule = pair
    step, orders = search_step(problem), to_orders(schedule)
    before_s = Player(step.arrays).makespan_s(orders)
    makespan_s, better = improve(step, [(before_s, orders)], num_evaluations=400, num_rounds=2, seed=seed)
    found = to_schedule(better, problem.num_microbatches, "local")
    check(problem, found)
    assert simulate(problem, found).makespan_s == makespan_s <= before_s


@given(st.integers(1, 4), st.sampled_from([1, 2]), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_a_walk_keeps_memory(in_flight, chunks, seed):
    problem = two_sites((1, 2, 1), (1, 1), num_ranks=3, num_microbatches=5, in_flight=in_flight, chunks=chunks)
    step = search_step(problem)
    makespan_s, orders = improve(step, greedy_orders(step), num_evaluations=2000, num_rounds=2, seed=seed)
    check(problem, to_schedule(orders, 5, "local"))
    assert makespan_s <= greedy_orders(step)[0][0]


@pytest.mark.slow
@given(problems_with_schedules(with_sync=False, seconds=POSITIVE_SECONDS))
@settings(max_examples=60, deadline=None)
def test_the_critical_path_leads_from_the_first_action_to_the_last_to_end(pair):
    problem, schedule = pair
    step, (codes, begin) = search_step(problem), to_orders(schedule)
    player = Player(step.arrays)
    makespan_s, out = player.play((codes, begin))
    place = np.full(4 * problem.num_stages * problem.num_microbatches, -1, np.int32)
    place[codes] = np.arange(codes.size)
    path = np.empty(codes.size, np.int64)
    chain = path[: local_kernel._critical_path.py_func(codes, begin, step.tables, out, place, path)]
    start_s = out[0][chain]
    end_s = start_s + step.arrays.duration_s.reshape(4, -1)[codes[chain] & 3, codes[chain] >> 2]
    assert end_s[0] == makespan_s
    assert np.all(end_s[1:] <= start_s[:-1])
    assert start_s[-1] == problem.traffic.opens_s.max()
    assert codes[chain[-1]] & 3 == 0


def test_the_same_seed_and_number_of_evaluations_give_the_same_order():
    step = search_step(two_sites((76, 93, 41), (2, 0), in_flight=8))
    seeds = greedy_orders(step)
    found = [improve(step, seeds, num_evaluations=20_000, seed=s) for s in (5, 5, 6)]
    assert np.array_equal(found[0][1][0], found[1][1][0])
    assert not np.array_equal(found[0][1][0], found[2][1][0])


def test_annealing_beats_greedy_and_reaches_the_best_known():
    step = search_step(two_sites((76, 93, 41), (0, 0), in_flight=8))
    seeds = greedy_orders(step)
    makespan_s, _ = improve(step, seeds, num_evaluations=200_000)
    assert seeds[0][0] > makespan_s
    assert makespan_s / (16 * 210) <= 1.279


def test_it_stops_when_told_to():
    step = search_step(two_sites((76, 93, 41), (2, 0), in_flight=8))
    calls = []
    improve(step, greedy_orders(step), num_evaluations=1000, report=lambda s, o: calls.append(s) or len(calls) < 3)
    assert len(calls) == 3
