import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InfeasibleError, UsageError
from farpipe.core.schedule import check, peak_memory_bytes
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.core.step.player import makespan_s, period_s
from pipelines import bubble_s, longest_s, pipeline, two_sites, work_s
from strategies import problems

PUBLISHED = [
    # hidden, heads, microbatches, (F, I, W) ms, message ms, bubbles of 1F1B, ZB-1p and ZB-2p
    (2304, 24, 24, (18.522, 18.086, 9.337), 0.601, 0.2431, 0.1585, 0.0433),
    (2304, 24, 32, (18.513, 18.086, 9.331), 0.626, 0.1985, 0.1242, 0.0039),
    (2304, 24, 64, (18.546, 18.097, 9.321), 0.762, 0.1240, 0.0674, 0.0026),
    (4096, 32, 24, (29.718, 29.444, 19.927), 0.527, 0.2347, 0.1323, 0.0029),
    (4096, 32, 32, (29.802, 29.428, 19.530), 0.577, 0.1898, 0.1045, 0.0022),
    (4096, 32, 64, (29.935, 29.621, 19.388), 0.535, 0.1091, 0.0554, 0.0010),
]
"""Zero Bubble Pipeline Parallelism (arXiv 2401.10241), tables 5 and 9: 8 ranks, microbatches of 1 x 1024 tokens."""
OF_16_RANKS = (5120, 40, 128, (11.325, 11.308, 8.109), 0.378)
"""A row of the same tables with the bubble 0.0028 of ZB-2p."""


def published_problem(hidden, heads, num_microbatches, milliseconds, message_ms, num_ranks=8):
    """One latency for every hop; an activation is s(34h + 5as) bytes, the stash after I 32sh."""
    forward, inputs, weights = milliseconds
    figures = {"forward_s": forward, "input_grad_s": inputs, "weight_grad_s": weights}
    figures |= {"activation_bytes": 1024 * (34 * hidden + 5 * heads * 1024), "weight_stash_bytes": 32 * 1024 * hidden}
    ends = [(s, s + d) for s in range(num_ranks) for d in (1, -1)]
    link = {f"{s}>{t}": Link(latency_s=message_ms, bandwidth_bytes_per_s=1) for s, t in ends}
    hops = [
        Hop(forward=Transfer(link=f"{s}>{s + 1}", bytes=0), backward=Transfer(link=f"{s + 1}>{s}", bytes=0))
        for s in range(num_ranks - 1)
    ]
    stages = tuple(Stage(rank=s, **figures) for s in range(num_ranks))
    ranks = (Rank(),) * num_ranks
    return Problem(num_microbatches=num_microbatches, ranks=ranks, stages=stages, links=link, hops=tuple(hops))


def bubble(problem, schedule):
    """As the paper defines it: (t - m(F + I + W)) / t, t the longest that any rank takes."""
    return 1 - work_s(problem) / longest_s(problem, schedule)


@pytest.mark.parametrize("row", PUBLISHED)
def test_1f1b_has_the_published_bubble(row):
    problem = published_problem(*row[:5])
    assert round(bubble(problem, order("1f1b", problem)), 4) == row[5]


@pytest.mark.parametrize("row", PUBLISHED)
@pytest.mark.parametrize(("name", "factor", "column"), [("zb-1p", 1, 6), ("zb-2p", 2, 7)])
def test_memory_limited_zero_bubble_is_at_or_below_the_published_bubble(row, name, factor, column):
    problem = published_problem(*row[:5])
    schedule = order(name, problem)
    check(problem, schedule)
    assert round(bubble(problem, schedule), 4) <= row[column]
    limit = factor * 8 * problem.stages[0].activation_bytes
    assert max(peak_memory_bytes(problem, schedule)) <= limit * (1 + 1e-9)


def test_of_orders_that_take_as_long_the_one_of_the_shorter_period_is_taken():
    problem = published_problem(*OF_16_RANKS, num_ranks=16)
    found, pattern = order("zb-2p", problem), order("zb-h2", problem)
    assert makespan_s(problem, found) == pytest.approx(makespan_s(problem, pattern), rel=1e-3)
    assert period_s(problem, found) < 0.98 * period_s(problem, pattern)
    assert round(bubble(problem, found), 4) <= 0.0028


@pytest.mark.parametrize("row", PUBLISHED)
@pytest.mark.parametrize("name", ["1f1b", "zb-1p", "zb-2p"])
def test_the_published_bubble_is_that_of_the_period(row, name):
    problem = published_problem(*row[:5])
    schedule = order(name, problem)
    assert 1 - work_s(problem) / period_s(problem, schedule) == pytest.approx(bubble(problem, schedule), abs=1e-4)


@pytest.mark.parametrize("seconds", [(1, 1, 1), (2, 2, 1), (76, 93, 41), (10, 12, 9), (4, 3, 3)])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (4, 20), (8, 16)])
@pytest.mark.parametrize(("limited", "pattern"), [("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")])
def test_memory_limited_zero_bubble_is_never_longer_than_the_pattern_in_the_same_memory(
    limited, pattern, num_ranks, num_microbatches, seconds
):
    problem = pipeline(num_ranks, num_microbatches, seconds=seconds, stash=1.0)
    assert makespan_s(problem, order(limited, problem)) <= makespan_s(problem, order(pattern, problem)) * (1 + 1e-9)


@pytest.mark.parametrize("seconds", [(1, 1, 1), (2, 2, 1), (76, 93, 41), (10, 12, 9), (4, 3, 3)])
@pytest.mark.parametrize(("num_ranks", "rounds"), [(2, 2), (4, 2), (4, 5), (8, 2), (8, 3)])
def test_handcrafted_orders_have_the_published_bubble_and_memory(seconds, num_ranks, rounds):
    forward, inputs, weights = seconds
    problem = pipeline(num_ranks, rounds * num_ranks, seconds=seconds, stash=1.0)
    h1, h2 = order("zb-h1", problem), order("zb-h2", problem)
    assert bubble_s(problem, h1) == pytest.approx((num_ranks - 1) * (forward + inputs - weights))
    assert bubble_s(problem, h2) == pytest.approx((num_ranks - 1) * (forward + inputs - 2 * weights))
    assert max(peak_memory_bytes(problem, h1)) == num_ranks
    assert max(peak_memory_bytes(problem, h2)) == 2 * num_ranks - 1


def test_golden_zb_h1_and_h2():
    problem = pipeline(2, 4)
    assert repr(order("zb-h1", problem)).splitlines()[1:] == [
        "rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3",
        "rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3",
    ]
    assert repr(order("zb-h2", problem)).splitlines()[1:] == [
        "rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


@pytest.mark.parametrize(
    ("seconds", "delay", "makespan"),
    [
        ((1, 1, 1), (1, 0), 1.35),
        ((1, 1, 1), (2, 2), 2.23),
        ((76, 93, 41), (0, 0), 1.267),
        ((76, 93, 41), (2, 0), 1.851),
        ((76, 93, 41), (2, 2), 2.485),
    ],
)
def test_a_delay_that_the_order_knows_costs_less(seconds, delay, makespan):
    """`makespan`: of zero bubble in the memory of 1F1B, made without knowledge of delays, in units of the work."""
    latency, size = (d * seconds[0] for d in delay)
    problem = two_sites(8, 16, seconds=seconds, latency=latency, size=size, stash=1.0)
    unaware, aware = order("zb-h1", problem), order("zb-1p", problem)
    assert simulate(problem, unaware).makespan_s / work_s(problem) == pytest.approx(makespan, abs=0.005)
    assert simulate(problem, aware).makespan_s <= simulate(problem, unaware).makespan_s * (1 + 1e-9)
    if delay != (0, 0):
        assert simulate(problem, aware).makespan_s / work_s(problem) < 0.95 * makespan


def test_any_limit_between_1p_and_unlimited():
    problem = two_sites(4, 24, latency=5.0, stash=1.0)
    found = [order("zb-1p", problem, limit=limit) for limit in (1, 1.5, 2, 3, math.inf)]
    assert found[2].ranks == order("zb-2p", problem).ranks
    for limit, schedule in zip((1, 1.5, 2, 3), found, strict=False):
        assert max(peak_memory_bytes(problem, schedule)) <= 4 * limit
    spans = [simulate(problem, schedule).makespan_s for schedule in found]
    assert spans[-1] < spans[1] < spans[0]
    with pytest.raises(UsageError, match=r"at least 1 on the memory of 1F1B, found 0\.5"):
        order("zb-1p", problem, limit=0.5)


@given(st.sampled_from(["zb-1p", "zb-2p"]), st.integers(1, 6), st.integers(1, 12), st.integers(2, 16))
@settings(max_examples=100, deadline=None)
def test_memory_of_the_ranks_is_kept(name, num_ranks, num_microbatches, halves):
    problem = two_sites(max(2, num_ranks), num_microbatches, latency=3.0, memory=halves / 2, stash=0.5)
    check(problem, order(name, problem))


def test_no_room_for_one_microbatch_is_told():
    with pytest.raises(InfeasibleError, match=r"rank 0 has 0\.75 B for activations, one microbatch takes 1 B there"):
        order("zb-1p", pipeline(2, 4, memory=0.75))


@pytest.mark.slow
@given(problems(max_stages=1), st.sampled_from(["zb-h1", "zb-h2", "zb-1p", "zb-2p"]))
@settings(max_examples=100, deadline=None)
def test_stages_may_differ_in_every_figure(problem, name):
    schedule = order(name, problem)
    check(problem, schedule)
    assert simulate(problem, schedule).makespan_s >= lower_bound_s(problem) * (1 - 1e-9)
