import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.schedule import peak_memory_bytes
from farpipe.core.schedule.bounds import period_bound_s
from farpipe.core.schedule.library import order
from farpipe.core.step import Action, Exchange, Problem, Rank, Schedule, Sync, Transfer
from farpipe.core.step.player import makespan_s, period_s
from farpipe.planning.planner.orders import best_order
from farpipe.planning.search import search
from pipelines import two_sites, work_s
from strategies import problems, schedules

ORDERS = ["1f1b", "eager", "zb-h1", "zb-h2", "zb-1p", "zb-2p"]


def joined(schedule, num_steps):
    """As many steps as one: every rank goes on with the next as soon as it is done."""
    count = schedule.num_microbatches
    ranks = [
        tuple(Action(a.stage, a.kind, a.microbatch + step * count) for step in range(num_steps) for a in mine)
        for mine in schedule.ranks
    ]
    return Schedule(num_steps * count, ranks)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("latency", [0.0, 3.0, 20.0])
@pytest.mark.parametrize(("seconds", "num_ranks"), [((1, 1, 1), 4), ((20, 22, 17), 4), ((4, 3, 3), 8)])
def test_the_period_is_what_a_joined_step_takes(name, latency, seconds, num_ranks):
    one = two_sites(num_ranks, 12, latency=latency, size=0.5, seconds=seconds, stash=0.5)
    schedule, steps = order(name, one), (20, 24)
    ends_s = [makespan_s(one.model_copy(update={"num_microbatches": 12 * k}), joined(schedule, k)) for k in steps]
    assert period_s(one, schedule) == pytest.approx((ends_s[1] - ends_s[0]) / 4)


@given(st.data(), problems())
@settings(max_examples=150, deadline=None)
def test_no_period_is_below_its_bound(data, problem):
    schedule = data.draw(schedules(problem))
    has = peak_memory_bytes(problem, schedule)  # and no more
    problem = problem.changed(ranks=tuple(Rank(memory_bytes=most or None) for most in has))
    assert period_s(problem, schedule) >= period_bound_s(problem) * (1 - 1e-9)


def test_zb_2p_has_no_bubble_between_steps_where_one_step_has():
    problem = two_sites(4, 20, latency=3.0, seconds=(20, 22, 17), stash=0.5)
    schedule = order("zb-2p", problem)
    assert makespan_s(problem, schedule) > 1.03 * work_s(problem)
    assert period_s(problem, schedule) == pytest.approx(period_bound_s(problem), rel=5e-3)


def test_the_bound_knows_how_many_weight_gradients_memory_lets_wait():
    """Two fit behind the last rank's last I; its way to the first rank and back takes five seconds."""
    ample = two_sites(2, 12, latency=1.5, seconds=(1, 1, 1), stash=1.0)
    tight = ample.changed(ranks=tuple(rank.model_copy(update={"memory_bytes": 2.0}) for rank in ample.ranks))
    assert period_bound_s(ample) == pytest.approx(36)
    assert period_bound_s(tight) == pytest.approx(36 + 6 - 2)
    found = [period_s(tight, order(name, tight)) for name in ("1f1b", "zb-h1", "zb-1p")]
    assert min(found) >= period_bound_s(tight)


@pytest.mark.parametrize("sent", ["reduce", "exchange"])
def test_a_rank_waits_for_what_its_optimizer_needs(sent):
    one = two_sites(2, 6, seconds=(1, 1, 1))
    late = Transfer(link="b>a", bytes=7.0)
    more = {"sync": (Sync(reduce=late), None)}
    if sent == "exchange":
        more = {"exchanges": (Exchange(link="b>a", bytes=7.0, source_stage=1, target_stage=0),)}
    schedule = order("1f1b", one)
    assert period_s(one.changed(**more), schedule) > period_s(one, schedule) + 4


def test_without_a_barrier_the_order_of_the_shorter_period_is_taken():
    one = two_sites(4, 20, latency=3.0, seconds=(20, 22, 17), stash=0.5)
    free = one.changed(barrier=False)
    schedules = [best_order(problem)[0] for problem in (one, free)]
    assert period_s(one, schedules[1]) <= period_s(one, schedules[0])
    assert makespan_s(one, schedules[0]) <= makespan_s(one, schedules[1])
    assert free.to_json() != one.to_json(), "the flag is part of the document"
    assert "barrier" not in one.to_json()
    assert Problem.from_json(free.to_json(), "a test") == free


@pytest.mark.parametrize(
    ("options", "gain"),
    [
        ({"latency": 60.0}, 0.06),
        ({"latency": 10.0, "memory": 9.0}, 0.02),
        ({"latency": 10.0, "memory": 6.0, "v_shape": True}, 0.01),
    ],
)
def test_orders_are_searched_for_their_period(options, gain):
    one = two_sites(4, 20, seconds=(20, 22, 17), stash=0.5, **options)
    free = one.changed(barrier=False)
    found, other = (search(problem, 1.0, methods=["named", "greedy", "local"]) for problem in (free, one))
    assert found.period_s == period_s(free, found.schedule) <= (1 - gain) * period_s(one, other.schedule)
    assert found.timeline.makespan_s == pytest.approx(makespan_s(one, found.schedule))
    assert found.lower_bound_s == period_bound_s(free)
    assert found.gap == pytest.approx(found.period_s / found.lower_bound_s - 1)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_any_step_without_a_barrier_is_searched(problem):
    free, told = problem.changed(barrier=False), []
    found = search(free, 0.2, methods=["greedy", "local"], on_progress=told.append)
    assert told
    assert found.period_s >= found.lower_bound_s * (1 - 1e-9)
    assert found.period_s <= period_s(free, order("gpipe", free)) if not free.chains.any else True
