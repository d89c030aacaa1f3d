import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.errors import InputError, UsageError
from farpipe.problem import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.schedule import Schedule, check, peak_memory_bytes
from farpipe.schedule.library import ORDERS, extra_forwards, order
from farpipe.simulate import simulate

ONE_STAGE_PER_RANK = ["gpipe", "1f1b", "eager"]


def pipeline(num_ranks, num_microbatches, stages_per_rank=1, memory=None, cuts=(), latency=0.0, size=0.0):
    num_stages = num_ranks * stages_per_rank
    link = {"a>b": Link(latency_s=latency, bandwidth_bytes_per_s=1)}
    slow = Hop(forward=Transfer(link="a>b", bytes=size), backward=Transfer(link="a>b", bytes=size))
    return Problem(
        num_microbatches=num_microbatches,
        ranks=(Rank(memory_bytes=memory),) * num_ranks,
        stages=tuple(
            Stage(rank=s % num_ranks, forward_s=1, input_grad_s=1, weight_grad_s=1, activation_bytes=1)
            for s in range(num_stages)
        ),
        links=link,
        hops=tuple(slow if s in cuts else None for s in range(num_stages - 1)),
    )


@given(st.sampled_from(ONE_STAGE_PER_RANK), st.integers(1, 9), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_every_order_is_valid_for_any_number_of_ranks_and_microbatches(name, num_ranks, num_microbatches):
    problem = pipeline(num_ranks, num_microbatches)
    schedule = order(name, problem)
    check(problem, schedule)
    assert schedule.method == name


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_interleaved_is_valid_where_it_is_defined(num_ranks, rounds, stages_per_rank):
    problem = pipeline(num_ranks, num_ranks * rounds, stages_per_rank)
    check(problem, order("interleaved", problem))


@given(st.integers(1, 6), st.integers(1, 12), st.data())
@settings(max_examples=100, deadline=None)
def test_eager_is_valid_for_any_extra_that_does_not_grow_downstream(num_ranks, num_microbatches, data):
    steps = data.draw(st.lists(st.integers(0, 4), min_size=num_ranks, max_size=num_ranks))
    extra = [sum(steps[i:]) for i in range(num_ranks)]
    problem = pipeline(num_ranks, num_microbatches)
    check(problem, order("eager", problem, extra=extra))


def test_golden_orders():
    problem = pipeline(3, 4)
    assert repr(order("1f1b", problem)).splitlines()[1:] == [
        "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert repr(order("gpipe", problem)).splitlines()[1] == "rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"
    assert repr(order("eager", problem, extra=[2, 1, 0])).splitlines()[1:] == [
        "rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "rank 1: 1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
        "rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_two_ranks_two_stages_each():
    problem = pipeline(2, 2, 2)
    assert order("interleaved", problem) == Schedule.from_text(
        ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"], 2, "interleaved"
    )


def test_peak_memory_is_the_warm_up_plus_one():
    problem = pipeline(4, 16)
    assert peak_memory_bytes(problem, order("1f1b", problem)) == [4, 3, 2, 1]
    assert peak_memory_bytes(problem, order("gpipe", problem)) == [16] * 4
    assert peak_memory_bytes(problem, order("eager", problem, extra=[3, 2, 2, 0])) == [7, 5, 4, 1]


def test_eager_warms_up_by_the_round_trip_of_every_cut_at_or_downstream():
    problem = pipeline(4, 64, cuts=(0, 2), latency=2.0, size=1.0)
    assert extra_forwards(problem) == [4, 2, 2, 0]  # ceil(2 (1 + 2) / 3) for each cut
    assert order("eager", problem).ranks[0][7].kind == "F"


def test_eager_keeps_within_the_memory_of_a_rank():
    problem = pipeline(4, 64, cuts=(0, 2), latency=9.0, memory=5.0)
    schedule = order("eager", problem)
    check(problem, schedule)
    assert max(peak_memory_bytes(problem, schedule)) == 5.0


@given(st.integers(2, 6), st.integers(1, 24), st.floats(0, 10), st.integers(2, 12))
@settings(max_examples=100, deadline=None)
def test_eager_is_never_over_memory_where_1f1b_is_not(num_ranks, num_microbatches, latency, memory):
    problem = pipeline(num_ranks, num_microbatches, cuts=(0,), latency=latency, memory=max(memory, num_ranks))
    check(problem, order("1f1b", problem))
    check(problem, order("eager", problem))


def test_orders_that_are_not_defined_say_for_which_problems_they_are():
    with pytest.raises(InputError, match="needs one stage on every rank; rank 0 has 2"):
        order("1f1b", pipeline(2, 4, 2))
    with pytest.raises(InputError, match="2 ranks divide; it is 3"):
        order("interleaved", pipeline(2, 3, 2))
    with pytest.raises(UsageError, match="did you mean 'eager'"):
        order("egar", pipeline(2, 3))
    with pytest.raises(UsageError, match="expected 2 counts"):
        order("eager", pipeline(2, 3), extra=[1])


@pytest.mark.parametrize(
    ("num_microbatches", "milliseconds", "message_ms", "bubble"),
    [
        (24, (18.522, 18.086, 9.337), 0.601, 0.2431),
        (32, (18.513, 18.086, 9.331), 0.626, 0.1985),
        (64, (18.546, 18.097, 9.321), 0.762, 0.1240),
        (24, (29.718, 29.444, 19.927), 0.527, 0.2347),
        (32, (29.802, 29.428, 19.530), 0.577, 0.1898),
        (64, (29.935, 29.621, 19.388), 0.535, 0.1091),
    ],
)
def test_1f1b_bubble_equals_the_published_one(num_microbatches, milliseconds, message_ms, bubble):
    """Zero Bubble Pipeline Parallelism (arXiv 2401.10241), tables 5 and 9: 8 ranks, one latency for every hop.

    Its bubble is (t - m(F + I + W)) / t with t the longest time that any rank spends from its first to its last action.
    """
    forward, inputs, weights = milliseconds
    link = {f"{s}>{s + d}": Link(latency_s=message_ms, bandwidth_bytes_per_s=1) for s in range(8) for d in (1, -1)}
    hops = [
        Hop(forward=Transfer(link=f"{s}>{s + 1}", bytes=0), backward=Transfer(link=f"{s + 1}>{s}", bytes=0))
        for s in range(7)
    ]
    stages = [Stage(rank=s, forward_s=forward, input_grad_s=inputs, weight_grad_s=weights) for s in range(8)]
    problem = Problem(
        num_microbatches=num_microbatches, ranks=(Rank(),) * 8, stages=tuple(stages), links=link, hops=tuple(hops)
    )
    actions = simulate(problem, order("1f1b", problem)).actions
    spans = [mine["end_s"].max() - mine["start_s"].min() for mine in (actions[actions["rank"] == r] for r in range(8))]
    longest = max(spans)
    assert round((longest - num_microbatches * sum(milliseconds)) / longest, 4) == bubble


def test_every_order_is_tested_here():
    assert set(ORDERS) == {*ONE_STAGE_PER_RANK, "interleaved"}
