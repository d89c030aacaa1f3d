"""Token-level 1F1B: sound whatever the chains, the quick play equal to the simulator."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.schedule import check
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Sync, Transfer
from farpipe.planning.workload.order import chunk_order, extra_forwards, makespan_s

CHAINS = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(lambda counts: sorted(counts, reverse=True))


def follows_of(counts):
    """The chains of sequences with so many slices, in order."""
    found = []
    for count in counts:
        found += [None, *range(len(found), len(found) + count - 1)]
    return tuple(found)


def problem_of(follows, num_stages, seed=0, latency_s=0.0):
    """Chunks of random times; links that take no time but latency."""
    rng = np.random.default_rng(seed)
    count = len(follows)

    def times():
        return tuple(rng.uniform(0.5, 2, count).tolist())

    stages = [Stage(rank=r, forward_s=times(), input_grad_s=times(), weight_grad_s=times()) for r in range(num_stages)]
    names = [(f"s{i}>s{i + 1}", f"s{i + 1}>s{i}") for i in range(num_stages - 1)]
    links = {name: Link(latency_s=latency_s, bandwidth_bytes_per_s=1.0) for pair in names for name in pair}
    hops = [Hop(forward=Transfer(link=a, bytes=0.0), backward=Transfer(link=b, bytes=0.0)) for a, b in names]
    return Problem(
        num_microbatches=count,
        ranks=(Rank(),) * num_stages,
        stages=tuple(stages),
        links=links,
        hops=tuple(hops),
        **({"follows": follows} if "follows" in Problem.model_fields else {}),
    )


def exchanging(problem, summed_s):
    """The same with a gather and a sum of gradients of every stage, all over one link."""
    gathers, sums = (Transfer(link="ring", bytes=seconds) for seconds in (1.0, summed_s))
    links = {**problem.links, "ring": Link(latency_s=0.25, bandwidth_bytes_per_s=1.0)}
    return problem.changed(links=links, sync=(Sync(gather=gathers, reduce=sums),) * problem.num_stages)


def test_the_order_of_two_sequences_on_two_stages():
    order = chunk_order(follows_of([3, 2, 1]), (0, 0))
    lines = [" ".join(map(str, rank)) for rank in order.schedule().ranks]
    assert lines[1] == "1F0 1F1 1F2 1B2 1F3 1B1 1F4 1B0 1F5 1B4 1B3 1B5"
    assert lines[0] == "0F0 0F1 0F2 0F3 0B2 0F4 0B1 0F5 0B0 0B4 0B3 0B5"


def test_chunks_in_flight_get_fewer_when_the_longest_sequence_is_over():
    order = chunk_order(follows_of([3, 1, 1, 1]), (0, 0), shrinks=True)
    lines = [" ".join(map(str, rank)) for rank in order.schedule().ranks]
    assert lines[1] == "1F0 1F1 1F2 1B2 1F3 1B1 1F4 1B0 1B3 1B4 1F5 1B5"
    assert lines[0] == "0F0 0F1 0F2 0F3 0B2 0F4 0B1 0F5 0B0 0B3 0B4 0B5"


def in_flight(order, stage):
    """Chunks that a stage holds when each backward begins."""
    return order.forwards_before[stage] - np.arange(order.num_chunks)


@settings(deadline=None)
@given(CHAINS, st.integers(1, 4), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_fewer_in_flight_is_never_more_and_enough_for_every_sequence(counts, num_stages, more):
    follows, extra = follows_of(counts), tuple(sorted(more[:num_stages], reverse=True))
    fewer, many = (chunk_order(follows, extra, shrinks=shrinks) for shrinks in (True, False))
    ends = np.repeat(np.cumsum(counts), counts)
    for stage in range(num_stages):
        assert (in_flight(fewer, stage) <= in_flight(many, stage)).all()
        assert (fewer.forwards_before[stage] >= ends).all()


@settings(deadline=None)
@given(CHAINS, st.integers(1, 5), st.floats(0.2, 3))
def test_fewer_in_flight_takes_no_longer_where_chunks_are_alike(counts, num_stages, backward_s):
    follows, still = follows_of(counts), np.zeros(num_stages - 1)
    times = [np.full((num_stages, len(follows)), seconds) for seconds in (1.0, backward_s)]
    traffic = problem_of(follows, num_stages).traffic
    fewer, many = (
        makespan_s(chunk_order(follows, (0,) * num_stages, shrinks=shrinks), *times, (still, still), traffic)
        for shrinks in (True, False)
    )
    assert fewer <= many + 1e-9


@settings(deadline=None, max_examples=60)
@given(
    CHAINS,
    st.integers(1, 4),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
    st.floats(0, 5),
    st.booleans(),
    st.floats(0, 9),
)
def test_every_order_is_sound_and_played_as_the_simulator_does(counts, num_stages, more, latency_s, shrinks, summed_s):
    follows = follows_of(counts)
    extra = tuple(sorted(more[:num_stages], reverse=True))
    order = chunk_order(follows, extra, shrinks=shrinks)
    problem = exchanging(problem_of(follows, num_stages, latency_s=latency_s), summed_s)
    schedule = order.schedule()
    check(problem, schedule)
    forward = problem.table("forward_s")
    backward = problem.table("input_grad_s") + problem.table("weight_grad_s")
    trips = np.full(num_stages - 1, latency_s)
    quick = makespan_s(order, forward, backward, (trips, trips), problem.traffic)
    assert quick == pytest.approx(simulate(problem, schedule).makespan_s)


@given(CHAINS)
def test_backwards_go_from_the_last_slice_to_the_first(counts):
    follows = follows_of(counts)
    order = chunk_order(follows, (0,))
    place = order.backward_place
    assert all(place[index] == place[before] - 1 for index, before in enumerate(follows) if before is not None)
    assert order.chains.lengths.tolist() == np.repeat(counts, counts).tolist()


def test_a_chain_with_something_in_between_is_refused():
    with pytest.raises(ValueError, match="follows"):
        chunk_order((None, None, 0), (0, 0))


def test_extra_forwards_hide_a_round_trip_and_leave_short_hops_alone():
    there = np.array([0.01, 1.2, 0.0])
    assert extra_forwards(there, there, 1.0, 100) == (3, 3, 0, 0)
    assert extra_forwards(there, there, 1.0, 2) == (2, 2, 0, 0)
    assert extra_forwards(there, there, 0.0, 100) == (0, 0, 0, 0)
    assert extra_forwards(there, there, 1.0, 100, whole=False) == (2, 2, 0, 0)
    assert extra_forwards(there, there, 1.2, 100, whole=False) == extra_forwards(there, there, 1.2, 100)


@pytest.mark.parametrize(("trip", "plain", "hidden"), [(0.17, 1.16, 1.04), (0.5, 1.5, 1.04), (1.0, 1.95, 1.04)])
def test_extra_warm_up_hides_what_slows_the_plain_order(trip, plain, hidden):
    """Equal chunks of 1 s (1/3 forward) on 8 stages over two sites, one-way time `trip`."""
    follows = follows_of([4] * 60)
    forward, backward = np.full((8, 240), 1 / 3), np.full((8, 240), 2 / 3)
    trips = np.where(np.arange(7) == 3, trip, 0.0)
    still, traffic = np.zeros(7), problem_of(follows, 8).traffic
    alone = makespan_s(chunk_order(follows, (0,) * 8), forward, backward, (still, still), traffic)
    far = [
        makespan_s(chunk_order(follows, extra), forward, backward, (trips, trips), traffic) / alone
        for extra in ((0,) * 8, extra_forwards(trips, trips, 1.0, 240))
    ]
    assert far[0] == pytest.approx(plain, abs=0.18)
    assert far[1] <= hidden
