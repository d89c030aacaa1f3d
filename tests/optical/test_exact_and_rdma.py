"""The exact assignment as a yardstick, and long-haul RDMA by its formulas."""

import numpy as np
import pytest

from farpipe.errors import InputError
from farpipe.optical import POLICIES, Grid, find_modulation, find_network, k_shortest
from farpipe.optical.exact import assign_exactly, assign_in_turn
from farpipe.optical.network import build_network
from farpipe.optical.rdma import LongHaul, over_long_hauls, window_for
from farpipe.step import BACKWARD, FORWARD
from two_sites import two_sites

DEEPRMSA, BPSK = find_modulation("deeprmsa"), find_modulation("bpsk")


def requests_of(paths, count, seed):
    random, pairs = np.random.default_rng(seed), list(paths.of_pair)
    return [(pairs[random.integers(len(pairs))], float(random.integers(25, 101))) for _ in range(count)]


def test_the_exact_program_finds_what_first_fit_misses():
    # Line a-b-c with 2 slots: first fit gives a-c both, so that a-b and b-c find nothing.
    line = build_network("line", [("0", {"a": "a", "b": "b", "km": 1}), ("1", {"a": "b", "b": "c", "km": 1})])
    paths, grid = k_shortest(line, k=1), Grid(2, 1.0, 0)
    requests = [(("a", "c"), 2.0), (("a", "b"), 2.0), (("b", "c"), 2.0)]
    assert assign_in_turn(requests, paths, grid, BPSK, POLICIES["ksp-ff"]) == 1
    found = assign_exactly(requests, paths, grid, BPSK)
    assert (found.accepted, found.upper_bound) == (2, 2)
    assert found.blocks[0] is None


@pytest.mark.parametrize("seed", [0, 1])
def test_no_policy_carries_more_than_the_exact_program(seed):
    paths = k_shortest(find_network("nsfnet"), k=2)
    requests = requests_of(paths, 30, seed)
    grid = Grid(12)
    exact = assign_exactly(requests, paths, grid, DEEPRMSA, time_limit_s=3)
    carried = {name: assign_in_turn(requests, paths, grid, DEEPRMSA, policy) for name, policy in POLICIES.items()}
    assert max(carried.values()) <= exact.upper_bound
    assert exact.accepted <= exact.upper_bound
    taken = set()
    for block in filter(None, exact.blocks):
        path, start, count = block
        for fibre in paths.fibres[paths.begin[path] : paths.begin[path + 1]]:
            for slot in range(start, start + count):
                assert (fibre, slot) not in taken
                taken.add((fibre, slot))


def test_too_large_a_program_is_refused():
    paths = k_shortest(find_network("nsfnet"), k=5)
    with pytest.raises(InputError, match="variables, more than"):
        assign_exactly(requests_of(paths, 1000, 0), paths, Grid(100), DEEPRMSA)


def test_plain_rdma_is_bound_by_window_over_round_trip():
    link = LongHaul(1000, 400e9 / 8, 16e6, site_rtt_s=1e-9)
    assert link.plain_rate * 8 == pytest.approx(16e6 * 8 / 9.8e-3, rel=1e-6)  # 13 Gbit/s
    assert link.acknowledged_at_source() == 400e9 / 8
    assert LongHaul(0, 1e9, 16e6).plain_rate == 1e9


def test_a_window_of_rate_times_round_trip_fills_the_link():
    link = LongHaul(3000, 5e10, 1.0)
    assert LongHaul(3000, 5e10, window_for(5e10, link.rtt_s)).plain_rate == pytest.approx(5e10)


def test_a_budget_bounds_the_rate_and_spares_the_buffer():
    link = LongHaul(1000, 5e10, 16e6)
    assert link.acknowledged_at_source(1e10) == 1e10
    assert link.pause_buffer_bytes == pytest.approx(5e10 * 9.8e-3)
    assert link.budget_buffer_bytes(1e-3) == pytest.approx(5e7)


@pytest.mark.parametrize(("at_source", "seconds"), [(False, 16.0), (True, 6.0)])
def test_a_step_over_a_long_haul_waits_for_its_window_and_its_delay(at_source, seconds):
    problem = two_sites((1, 1, 0), (0, 6), num_ranks=2, num_microbatches=2)
    haul = LongHaul(1e6, 1e9, window_bytes=6.0 / 16 * 2 * 1e6 * 4.9e-6, site_rtt_s=1e-9)
    messages = over_long_hauls(problem, {"a>b": haul}, at_source=at_source).traffic.messages
    assert messages.occupies_s[FORWARD, 0].tolist() == pytest.approx([seconds] * 2, rel=1e-6)
    assert messages.arrives_after_s[FORWARD, 0].tolist() == pytest.approx([seconds + 4.9] * 2, rel=1e-6)
    assert messages.arrives_after_s[BACKWARD, 1].tolist() == [6.0, 6.0]


@pytest.mark.parametrize("options", [{"km": -1}, {"window_bytes": 0}, {"rate_bytes_per_s": float("nan")}])
def test_senseless_links_are_refused(options):
    with pytest.raises(InputError):
        LongHaul(**({"km": 1, "rate_bytes_per_s": 1e9, "window_bytes": 1e6} | options))
