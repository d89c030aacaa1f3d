from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.spec import Device, LocalLink, Site, SiteLink
from farpipe.planning.workload.layout import place_ranks

DEVICE = Device(name="d", peak_flops={"bf16": 1e12}, memory_bytes=1e9, memory_bandwidth_bytes_per_s=1e12)
LOCAL = LocalLink(latency_s=1e-6, bandwidth_bytes_per_s=1e10)


def site(name, num_devices):
    return Site(
        name=name, device=DEVICE, num_devices=num_devices, devices_per_machine=1, machine_link=LOCAL, site_link=LOCAL
    )


def both_ways(*pairs):
    ends = [(a, b) for one, other in pairs for a, b in ((one, other), (other, one))]
    return tuple(SiteLink(source=a, target=b, latency_s=0.01, bandwidth_bytes_per_s=1e9) for a, b in ends)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 40), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_every_rank_has_room_and_every_site_a_rank(sizes, num_ranks, devices_per_rank):
    order = [site(f"s{i}", size) for i, size in enumerate(sizes)]
    placed = place_ranks(order, num_ranks, devices_per_rank)
    room = [size // devices_per_rank for size in sizes]
    possible = sum(room) >= num_ranks >= len(sizes) and min(room) >= 1
    assert (placed is not None) == possible
    if placed is not None:
        names = [p.name for p in placed]
        assert len(names) == num_ranks
        assert list(dict.fromkeys(names)) == [s.name for s in order]
        assert names == sorted(names)
        assert all(names.count(s.name) * devices_per_rank <= s.num_devices for s in order)


def test_ranks_are_placed_in_proportion():
    order = [site("a", 12), site("b", 4)]
    assert [s.name for s in place_ranks(order, 8, 1)] == ["a"] * 6 + ["b"] * 2
