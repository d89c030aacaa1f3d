"""Compiled play of an order of chunks: when the last backward ends if links carry any number of messages at once."""

import numpy as np
from numba import njit


@njit(cache=True)
def makespan(duration_s, orders, there_s, back_s):  # type: ignore[no-untyped-def]
    """Seconds of `orders` [num_stages, 2 x num_chunks], each entry a chunk (forward), or a chunk and their number.

    `duration_s` [num_stages, 2 x num_chunks] by entry; `there_s` and `back_s` [num_stages]: from the producer's end to
    the arrival at the stage. All ranks run ahead until a message is missing, again and again; infinite on a deadlock.
    """
    num_stages, count = orders.shape[0], orders.shape[1] // 2
    end = np.full(duration_s.shape, np.inf)
    now, place = np.zeros(num_stages), np.zeros(num_stages, np.int64)
    left, before = orders.size, orders.size + 1
    while left < before:
        before = left
        for turn in range(2 * num_stages):
            s = min(turn, 2 * num_stages - 1 - turn)
            while place[s] < 2 * count:
                entry = orders[s, place[s]]
                source = s - 1 if entry < count else s + 1
                ready = 0.0
                if 0 <= source < num_stages:
                    ready = end[source, entry] + (there_s[s] if entry < count else back_s[s])
                if ready == np.inf:
                    break
                now[s] = max(now[s], ready) + duration_s[s, entry]
                end[s, entry] = now[s]
                place[s] += 1
                left -= 1
    return now.max() if left == 0 else np.inf
