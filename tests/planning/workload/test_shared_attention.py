"""SlimPipe's attention as the benchmark prices it: even between stages at a time, never between times."""

import numpy as np
import pytest

from benchmarks.sequences.shared_attention import shared_pairs
from farpipe.planning.workload.chunk import SliceTable

STAGES = 4


def batch(*slices_of: int) -> SliceTable:
    """Sequences of so many slices of 8 tokens."""
    rows = [(i, 8 * k, 8, 8 * n) for i, n in enumerate(slices_of) for k in range(n)]
    columns = np.array(rows, np.int64).T
    return SliceTable(*columns, np.arange(len(rows)))


def test_stages_have_equally_many_pairs_at_a_time_and_all_of_them_together():
    """Forwards only, a stage is a chunk behind the one before; in 1F1B half a chunk."""
    load = batch(20).load
    forward, _ = shared_pairs(load, (range(STAGES),))
    for chunk in range(STAGES, 12):
        at_a_time = [forward[stage, chunk - stage] for stage in range(STAGES)]
        assert at_a_time == pytest.approx([load.pairs[chunk - STAGES + 1 : chunk + 1].mean()] * STAGES)


def test_backwards_come_in_reverse_along_a_sequence():
    load = batch(20).load
    _, backward = shared_pairs(load, (range(STAGES),))
    for chunk in range(STAGES, 12):
        at_a_time = [backward[stage, chunk - stage] for stage in range(STAGES)]
        assert at_a_time == pytest.approx([load.pairs[chunk - STAGES + 1 : chunk + 1].mean()] * STAGES)


def test_attention_of_a_long_sequence_is_not_done_beside_short_ones_that_run_later():
    load = batch(12, *[1] * 30).load
    forward, backward = shared_pairs(load, (range(STAGES),))
    for pairs in (forward, backward):
        assert pairs[:, 12 + STAGES : -STAGES] == pytest.approx(np.full((STAGES, 30 - 2 * STAGES), load.pairs[-1]))
        assert pairs[:, :12].sum() > 0.9 * STAGES * load.pairs[:12].sum()


def test_a_pool_of_one_stage_shares_nothing():
    load = batch(5, 2, 1).load
    for pairs in shared_pairs(load, (range(1), range(1, 2))):
        assert pairs == pytest.approx(np.stack([load.pairs] * 2))
