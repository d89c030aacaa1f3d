"""The exact assignment as a yardstick."""

import numpy as np
import pytest

from farpipe.errors import InputError
from farpipe.optical import POLICIES, Grid, find_modulation, find_network, k_shortest
from farpipe.optical.exact import assign_exactly, assign_in_turn
from farpipe.optical.network import build_network

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
