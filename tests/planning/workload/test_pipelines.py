"""Grouping: pipelines end between sequences, hold no more than fits, and are found wherever there are any."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from farpipe.planning.workload.pipelines import _as_many_as_fit


@given(st.lists(st.integers(1, 9), min_size=1, max_size=25), st.integers(1, 30))
def test_pipelines_of_as_many_sequences_as_fit(sizes, room):
    """Content of a pipeline: here the sum of its sequences' sizes; one more would never fit."""
    borders = np.cumsum([0, *sizes])
    seconds, ends = _as_many_as_fit(borders, lambda a, b: 1.0 if b - a <= room else np.inf, 0.25)
    if max(sizes) > room:
        assert seconds == np.inf
        return
    assert seconds == len(ends) + 0.25 * (len(ends) - 1)
    assert ends[-1] == borders[-1]
    assert set(ends) <= set(borders.tolist())
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        assert 0 < end - begin <= room
        later = borders[borders > end]
        assert not later.size or later[0] - begin > room
