from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.report.axis import MEMORY, PLAIN, SHARE, TIME, Scale, ticks

POSITIVE = st.floats(1e-8, 1e6)


def labels(*arguments, **options):
    return [tick.label.replace("\N{NO-BREAK SPACE}", " ") for tick in ticks(*arguments, **options)]


def test_ticks_are_round_and_the_last_carries_the_unit():
    assert labels(0, 1.0, TIME, 5) == ["0", "0.2", "0.4", "0.6", "0.8", "1.0 s"]
    assert labels(0, 0.083, TIME, 5) == ["0", "20", "40", "60", "80 ms"]
    assert labels(0, 40 * 2.0**30, MEMORY, 4) == ["0", "10", "20", "30", "40 GiB"]
    assert labels(0, 1, SHARE, 2) == ["0", "50", "100 %"]


def test_an_axis_that_counts_has_no_fractions():
    assert labels(0, 3, PLAIN, 8, whole=True) == ["0", "1", "2", "3"]


@given(st.floats(-1e6, 1e6), POSITIVE, st.integers(1, 12))
def test_ticks_lie_within_the_axis_evenly_and_not_too_many(low, size, about):
    found = [tick.value for tick in ticks(low, low + size, TIME, about)]
    assert len(found) <= about + 1
    tolerance = 1e-6 * max(abs(low), size)
    assert all(low - tolerance <= value <= low + size + tolerance for value in found)
    steps = [b - a for a, b in pairwise(found)]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-3, abs=tolerance) if steps else True


def test_an_axis_without_extent_has_a_tick_and_maps_to_its_start():
    assert len(ticks(0, 0, TIME)) == 1
    scale = Scale(2, 2, 10, 20)
    assert scale(2) == 10
    assert scale.map(np.array([2.0])).tolist() == [10]
