"""Collectives and the effective links inside a site."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_jobs import A100, layout, llama, site, training
from farpipe.planning.cost import calibration_of, transfer

LAW = calibration_of(A100)
INSIDE, ACROSS = 300e9 * LAW.machine_link_fraction, 25e9 * LAW.site_link_fraction


@given(size=st.integers(2, 512), num_bytes=st.floats(1, 1e12))
def test_an_all_reduce_moves_what_a_reduce_scatter_and_an_all_gather_move(size, num_bytes):
    parts = [transfer.ring_bytes(kind, num_bytes, size) for kind in ("reduce-scatter", "all-gather")]
    assert transfer.ring_bytes("all-reduce", num_bytes, size) == pytest.approx(sum(parts))
    assert sum(parts) < 2 * num_bytes


@pytest.mark.parametrize(
    ("size", "stride", "bandwidth"),
    [
        (8, 1, INSIDE),  # one machine
        (2, 4, INSIDE),
        (2, 8, ACROSS),  # one member per machine
        (4, 4, 2 * ACROSS),  # two per machine share two network ports
        (16, 1, 8 * ACROSS),  # whole machines
        (3, 16, ACROSS),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_part(size, stride, bandwidth):
    assert transfer.ring_link(site(), LAW, size, stride).bandwidth_bytes_per_s == pytest.approx(bandwidth)


@pytest.mark.parametrize(
    ("size", "stride", "seconds"),
    [
        (1, 1, 0.0),
        (8, 1, 7 / 8 / INSIDE),
        (2, 8, 1 / 2 / ACROSS),
        (16, 1, max(7 / 16 / INSIDE, 8 / 16 / ACROSS)),  # half of every buffer leaves by the device's own port
        (8, 2, max(3 / 8 / INSIDE, 4 / 8 / ACROSS)),
    ],
)
def test_an_all_to_all_sends_an_equal_part_to_each_other_device(size, stride, seconds):
    link = transfer.all_to_all_link(site(), LAW, size, stride)
    assert 1e9 / link.bandwidth_bytes_per_s == pytest.approx(1e9 * seconds)
    assert link.latency_s == (3e-6 if size * stride <= 8 else 10e-6)


def test_a_ring_of_one_has_nothing_to_wait_for():
    assert transfer.ring_link(site(), LAW, 1).latency_s == 0
    assert transfer.tensor_collective_s(site(), LAW, layout(), 1e9) == 0


def test_tensor_parallelism_across_machines_is_slow():
    inside, across = (transfer.tensor_collective_s(site(), LAW, layout(tensor=t), 1e9) for t in (8, 16))
    assert across > 1.3 * inside


@pytest.mark.parametrize(
    ("tensor", "data", "ranks", "bandwidth"),
    [
        (2, 2, (0, 1), 2 * INSIDE),  # two ranks of four devices share a machine
        (2, 2, (1, 2), 2 * ACROSS),
        (8, 1, (0, 1), 8 * ACROSS),
        (1, 1, (0, 7), INSIDE),
        (1, 1, (7, 8), ACROSS),
    ],
)
def test_ranks_talk_inside_their_machine_where_they_can(tensor, data, ranks, bandwidth):
    for source, target in (ranks, ranks[::-1]):
        effective = transfer.rank_link(site(), LAW, layout(tensor=tensor, data=data), source, target)
        assert effective.bandwidth_bytes_per_s == pytest.approx(bandwidth)


@pytest.mark.parametrize(
    ("wire_type", "num_bytes"), [("none", 4000), ("bf16", 28 + 2000), ("fp8", 28 + 1000 + 32), ("int8", 28 + 1000 + 32)]
)
def test_narrower_numbers_make_shorter_messages(wire_type, num_bytes):
    assert transfer.wire_bytes(1000, 4, wire_type) == num_bytes


@pytest.mark.parametrize("tensor", [1, 2])
def test_ulysses_sends_queries_keys_values_and_results_of_its_heads(tensor):
    """2 bytes each of 512 queries, 2 x 128 keys and values, 512 results (arXiv 2309.14509)."""
    assert transfer.head_exchange_bytes(llama(), training(), tensor, 100.0) == 100 * 2 * (512 + 256 + 512) / tensor
