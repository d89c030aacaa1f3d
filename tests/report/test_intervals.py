from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.report.axis import covered, lanes

INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=12)


def arrays(intervals):
    rows = sorted((begin, begin + length) for begin, length in intervals)
    return tuple(np.array(rows, dtype=np.float64).reshape(-1, 2).T)


@given(INTERVALS)
def test_covered_time_is_what_a_slow_count_finds(intervals):
    start, end = arrays(intervals)
    edges = np.linspace(0, 26, 9)
    slow = [
        sum(max(0.0, min(e, right) - max(s, left)) for s, e in zip(start, end, strict=True))
        for left, right in pairwise(edges)
    ]
    assert covered(start, end, edges) == pytest.approx(slow)


@given(INTERVALS)
def test_nothing_overlaps_on_a_lane_and_no_lane_is_wasted(intervals):
    start, end = arrays(intervals)
    lane = lanes(start, end)
    for a, b in combinations(range(len(lane)), 2):
        if lane[a] == lane[b]:
            assert end[a] <= start[b]
    deepest = max((int(((start <= s) & (end > s)).sum()) for s in start), default=0)
    assert int(lane.max(initial=0)) + 1 <= max(deepest, 1) + int((start == end).any())
