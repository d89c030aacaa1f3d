from itertools import pairwise, permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.planning.planner.site_paths import MAX_EXACT, best_paths, promising_sites


def by_hand(weight, chosen):
    """The least sum there and back over all orders of the chosen sites."""
    sums = [sum(weight[a, b] + weight[b, a] for a, b in pairwise(order)) for order in permutations(chosen)]
    return min(sums)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_the_path_of_every_set_is_the_best_of_all_orders(num_sites, seed):
    draw = np.random.default_rng(seed)
    weight = draw.random((num_sites, num_sites))
    weight[draw.random((num_sites, num_sites)) < 0.2] = np.inf
    paths = {frozenset(path): path for path in best_paths(weight, np.ones(num_sites, np.int64), num_sites)}
    for size in range(1, num_sites + 1):
        for chosen in {frozenset(order) for order in permutations(range(num_sites), size)}:
            least = by_hand(weight, chosen)
            if np.isinf(least):
                assert chosen not in paths
            else:
                path = paths[chosen]
                assert np.isclose(sum(weight[a, b] + weight[b, a] for a, b in pairwise(path)), least)


def test_of_many_sites_those_with_the_most_devices_are_looked_at():
    devices = np.arange(10_000)
    assert sorted(promising_sites(devices)) == list(range(10_000 - MAX_EXACT, 10_000))
    assert len(best_paths(np.ones((4, 4)), np.array([1, 0, 1, 1]), 2)) == 6
