"""Compiled loop of the packing."""

import numpy as np
from numba import njit


@njit(cache=True)
def pack(short_s, shorts, tail_s, tail_tokens, target_s, token_limit, literal):  # type: ignore[no-untyped-def]
    """The bin of every short sequence [num_shorts]; see `farpipe.sequences.cut.pack`.

    Literal rule: where no bin has time left, the one that ends earliest takes it, as long as it has tokens left.
    """
    num_shorts, num_bins = short_s.size, tail_s.size
    used_s = np.zeros(num_bins + num_shorts)
    used = np.zeros(num_bins + num_shorts, np.int64)
    used_s[:num_bins] = tail_s
    used[:num_bins] = tail_tokens
    bins = np.empty(num_shorts, np.int64)
    for i in range(num_shorts):
        best, loosest = -1, -1
        for b in range(num_bins):
            if used[b] + shorts[i] > token_limit:
                continue
            if used_s[b] + short_s[i] <= target_s and (best < 0 or used_s[b] > used_s[best]):
                best = b
            if loosest < 0 or used_s[b] < used_s[loosest]:
                loosest = b
        if best < 0 and literal:
            best = loosest
        if best < 0:
            best = num_bins
            num_bins += 1
        used_s[best] += short_s[i]
        used[best] += shorts[i]
        bins[i] = best
    return bins
