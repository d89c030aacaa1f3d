import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.engine.replicas.places import Place, Places

SAME = Places((("a", "b", "b"),) * 2)
APART = Places((("a", "a"), ("a", "a"), ("b", "b"), ("b", "b")))


def test_replicas_at_the_same_sites_are_neighbours_so_that_sites_stay_together():
    assert [SAME.of(process) for process in range(6)] == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 0),
        (2, 0, 0),
        (2, 1, 0),
    ]
    assert [SAME.site(process) for process in range(6)] == ["a", "a", "b", "b", "b", "b"]


def test_of_replicas_at_different_sites_the_ranks_are_neighbours():
    assert [APART.of(process) for process in range(4)] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    assert [APART.site(process) for process in range(8)] == ["a"] * 4 + ["b"] * 4


sites = st.sampled_from(["a", "b", "c"])
places = st.integers(1, 4).flatmap(
    lambda num_ranks: st.builds(
        lambda replicas, num_twins: Places(tuple(replicas), num_twins),
        st.lists(st.tuples(*[sites] * num_ranks), min_size=1, max_size=5),
        st.integers(1, 3),
    )
)


@given(places)
def test_every_process_has_one_place(places):
    found = [places.of(process) for process in range(places.num_processes)]
    shape = (places.num_ranks, places.num_replicas, places.num_twins)
    assert sorted(found) == [Place(*place) for place in itertools.product(*map(range, shape))]
    assert [places.process(*place) for place in found] == [*range(places.num_processes)]


@given(places)
def test_all_replicas_of_a_rank_meet_level_by_level(places):
    for process in range(places.num_processes):
        reached = {process}
        for level in range(len(places.ring_levels(process))):
            reached |= {other for one in reached for other in places.ring_levels(one)[level]}
        rank, _, twin = places.of(process)
        assert reached == {places.process(rank, d, twin) for d in range(places.num_replicas)}


@given(places)
def test_twins_are_neighbours_at_one_site_and_worlds_are_blocks_of_them(places):
    for process in range(places.num_processes):
        twins = places.twins(process)
        assert process in twins
        assert twins == tuple(range(twins[0], twins[0] + places.num_twins))
        assert {places.of(twin)[:2] for twin in twins} == {places.of(process)[:2]}
        world = places.world(process)
        assert {places.site(other) for other in world} <= {places.site(process)}
        assert world == () or world[world.index(process) - places.of(process).twin] == twins[0]


@pytest.mark.parametrize(
    ("replicas", "process", "levels"),
    [
        ((("a",), ("a",)), 1, ((0, 1), (1,))),
        ((("a",), ("b",)), 1, ((1,), (0, 1))),
        ((("a",), ("a",), ("b",), ("b",)), 3, ((2, 3), (1, 3))),
        ((("a",), ("b",), ("a",)), 1, ((0, 2, 1),)),
    ],
)
def test_sums_go_inside_a_site_first_and_then_across(replicas, process, levels):
    assert Places(replicas).ring_levels(process) == levels
