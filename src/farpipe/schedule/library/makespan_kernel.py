"""The compiled loop of `makespan`: plays orders without writing down what happens."""

from heapq import heappop, heappush

import numpy as np
from numba import njit

_F, _W = 0, 2


@njit(cache=True)
def last_end(codes, begin, duration, rank_of_stage, messages, collectives, opens, link_free):  # type: ignore[no-untyped-def]  # noqa: C901
    """When the last action or reduce is over; infinite where ranks wait for each other in a circle.

    `messages` and `collectives` = (link or below zero for none, seconds on it, seconds until the arrival) [2, S, M] and
    [C], and where those begin that wait for each stage [S + 1]; `opens` [S] when a stage may begin; `link_free` [L]
    when a link is free.
    """
    link, occupies, arrives = messages
    num_stages, num_microbatches = link.shape[1:]
    num_ranks = begin.size - 1
    arrival = np.full((2, num_stages, num_microbatches), -1.0)
    for j in range(num_microbatches):
        arrival[0, 0, j] = arrival[1, num_stages - 1, j] = 0.0
    free, place, left = np.zeros(num_ranks), begin[:-1].copy(), np.full(num_stages, num_microbatches)
    runnable, last, num_played = list(range(num_ranks)), 0.0, 0
    after, num_ties = collectives[3], num_microbatches + collectives[0].size
    pending = [(0.0, 0, 0, 0)]  # ready, place among those ready together, direction, stage * M + microbatch
    pending.clear()
    while len(runnable) > 0 or len(pending) > 0:
        if len(runnable) == 0:  # nobody can go on: nothing can be ready before the earliest message
            ready, _, way, slot = heappop(pending)
            if way == 2:  # a collective, `slot` is its place
                name = collectives[0][slot]
                start = max(ready, link_free[name])
                link_free[name] = start + collectives[1][slot]
                last = max(last, start + collectives[2][slot])
                continue
            stage, j = slot // num_microbatches, slot % num_microbatches
            name, target = link[way, stage, j], stage + 1 - 2 * way
            there = ready
            if name >= 0:
                start = max(ready, link_free[name])
                link_free[name] = start + occupies[way, stage, j]
                there = start + arrives[way, stage, j]
            arrival[way, target, j] = there
            runnable.append(rank_of_stage[target])
            continue
        rank = runnable.pop()
        while place[rank] < begin[rank + 1]:
            kind, slot = codes[place[rank]] & 3, codes[place[rank]] >> 2
            stage, j = slot // num_microbatches, slot % num_microbatches
            way = 0 if kind == _F else 1
            if kind != _W:
                if arrival[way, stage, j] < 0.0:
                    break
                free[rank] = max(free[rank], arrival[way, stage, j])
                if kind == _F:
                    free[rank] = max(free[rank], opens[stage])
            free[rank] += duration[kind, stage, j]
            place[rank] += 1
            num_played += 1
            target, tie = stage + 1 - 2 * way, stage * num_ties
            if kind != _W and 0 <= target < num_stages:
                heappush(pending, (free[rank], tie + j, way, slot))
            if kind >= _W:
                left[stage] -= 1
                if left[stage] == 0:
                    for at in range(after[stage], after[stage + 1]):
                        heappush(pending, (free[rank], tie + num_microbatches + at, 2, at))
        last = max(last, free[rank])
    return last if num_played == codes.size else np.inf
