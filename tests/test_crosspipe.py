"""Claims against CrossPipe, on the points of its grid that decide it."""

import itertools

import pytest

from benchmarks.orders import crosspipe_grid as grid
from farpipe.core.schedule import check
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate


@pytest.mark.slow
def test_a_third_less_time_than_the_best_traditional_order_in_the_same_memory():
    """At latency = message = 2 F; the order is proven the best of those with one stage per rank."""
    row = grid.point(grid.EQUAL, (2.0, 2.0), {"one": 20.0, "v": 1.0})
    assert row["less than the best traditional"] >= 0.336
    assert row["gap in its placement"] < 1e-6
    assert row["less than 1f1b"] > row["less than the best traditional"]


def test_without_delay_the_named_orders_take_what_is_published():
    for name in ("1f1b", "zb-h1"):
        ours = grid.named_s(name, grid.TRADITIONAL[name], (0.0, 0.0), grid.EQUAL)
        assert ours == pytest.approx(grid.PUBLISHED[0, 0][name], abs=0.0005)


def test_every_placement_is_the_same_model_in_the_same_memory():
    whole = grid.two_sites("one", (1.0, 1.0), grid.EQUAL)
    for shape in ("v", "round"):
        halves = grid.two_sites(shape, (1.0, 1.0), grid.EQUAL)
        for figure in ("forward_s", "input_grad_s", "weight_grad_s", "activation_bytes", "weight_stash_bytes"):
            per_rank = [halves.table(figure)[list(stages)].sum(axis=0) for stages in halves.stages_of_rank]
            assert per_rank == [pytest.approx(row) for row in whole.table(figure)]
        assert halves.ranks == whole.ranks
        assert [hop is not None for hop in halves.hops].count(True) == {"v": 2, "round": 3}[shape]


def test_memory_that_1f1b_needs_is_too_little_for_interleaved():
    assert grid.named_s("interleaved", "round", (0.0, 0.0), grid.EQUAL) is None
    assert grid.named_s("interleaved", "round", (0.0, 0.0), grid.TWICE) is not None


WAVES = {(0.0, 0.0): 0.119, (0.25, 0.25): 0.127, (0.25, 2.0): 0.250, (2.0, 0.25): 0.148, (2.0, 2.0): 0.256}
"""Seconds per microbatch of CrossPipe's own wave order in the memory of 1F1B (Table 5)."""


@pytest.mark.parametrize("delay", WAVES)
def test_the_named_wave_takes_no_longer_than_the_published_one(delay):
    assert round(grid.named_s("wave", "v", delay, grid.EQUAL), 3) <= WAVES[delay]


def test_a_wave_over_four_sites_shares_memory_between_the_ways_down_and_up():
    """At latency 2 F and messages of F / 4; with nearly all memory for the way down it takes 0.268 s."""
    problem = four_sites((2.0, 0.25))
    schedule = order("wave", problem)
    check(problem, schedule)
    assert simulate(problem, schedule).makespan_s / grid.NUM_MICROBATCHES <= 0.2182


def four_sites(delay):
    """Two ranks of the grid's V at each of four sites."""
    problem = grid.two_sites("v", delay, grid.EQUAL)
    sites = ["abcd"[stage.rank // 2] for stage in problem.stages]
    hops = tuple(grid._hop(*ends, delay[1] * grid.FORWARD_S) for ends in itertools.pairwise(sites))
    names = {transfer.link for hop in hops if hop for transfer in (hop.forward, hop.backward)}
    link = problem.links["a>b"]
    return problem.model_copy(update={"hops": hops, "links": dict.fromkeys(sorted(names), link)})
