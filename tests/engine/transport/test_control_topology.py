"""Control connections: few, and every message gets to everybody exactly once."""

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.engine.transport.control_plane import FAN_OUT, ControlTopology

SITES = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=60)


def all_of(sites):
    return [ControlTopology(rank, sites) for rank in range(len(sites))]


@given(SITES)
def test_connections_are_known_at_both_ends(sites):
    ranks = all_of(sites)
    assert all(rank.rank in ranks[other].neighbours for rank in ranks for other in rank.neighbours)


@given(SITES, st.data())
def test_a_message_reaches_its_target_along_few_hops(sites, data):
    ranks = all_of(sites)
    source, target = (data.draw(st.integers(0, len(sites) - 1)) for _ in range(2))
    at, num_hops = source, 0
    while at != target:
        at, num_hops = ranks[at].next_hop(target), num_hops + 1
        assert num_hops <= 7


@given(SITES, st.data())
def test_the_farthest_come_before_those_on_the_way_to_them(sites, data):
    ranks = all_of(sites)
    source = data.draw(st.integers(0, len(sites) - 1))
    order = ranks[source].farthest_first()
    assert sorted([*order, source]) == list(range(len(sites)))
    for place, target in enumerate(order):
        at = source
        while (at := ranks[at].next_hop(target)) != target:
            assert order.index(at) > place, (source, target, at)


@given(SITES, st.data())
def test_a_message_for_all_comes_to_everybody_once_and_between_sites_once(sites, data):
    ranks = all_of(sites)
    origin = data.draw(st.integers(0, len(sites) - 1))
    received, between = Counter([origin]), Counter()
    on_the_way = deque((origin, other) for other in ranks[origin].flood(origin, None))
    while on_the_way:
        source, target = on_the_way.popleft()
        received[target] += 1
        between[sites[source], sites[target]] += sites[source] != sites[target]
        on_the_way.extend((target, other) for other in ranks[target].flood(origin, source))
    assert received == Counter(range(len(sites)))
    assert max(between.values(), default=0) <= 1


@pytest.mark.parametrize(("num_ranks", "num_sites", "num_connections"), [(64, 1, 63), (64, 2, 63), (64, 4, 66)])
def test_the_number_of_connections_grows_with_the_ranks_not_their_square(num_ranks, num_sites, num_connections):
    sites = [str(rank * num_sites // num_ranks) for rank in range(num_ranks)]
    ranks = all_of(sites)
    assert sum(len(rank.neighbours) for rank in ranks) == 2 * num_connections
    assert max(len(rank.neighbours) for rank in ranks) <= FAN_OUT + max(1, num_sites - 1)


def test_the_height_is_that_of_the_tree_below():
    ranks = all_of(["a"] * 64)
    assert [ranks[rank].height for rank in (0, 1, 9, 63)] == [2, 1, 0, 0]
