"""The compiled part of `bounds.relaxation_s`: earliest start and least rest of the i-th action of a stage and kind."""

import numpy as np

from farpipe.core.step.jit import jit


@jit
def heads(durations_s, travel_s, gates_s, windows, num_microbatches):  # type: ignore[no-untyped-def]
    """[3, S, M]: no schedule starts the i-th F, I or W of a stage (counted in their own order) before this.

    `durations_s` [3, S] and `travel_s` [2, S] (from a stage onwards, forward and backward) are the least of any
    microbatch; `windows` [3, S]: how many microbatches fit between F and the end of I, of W, and in all stages of the
    rank up to this one between F and the end of I.
    """
    num_stages = durations_s.shape[1]
    head = np.zeros((3, num_stages, num_microbatches))
    for i in range(num_microbatches):
        for s in range(num_stages):
            start = gates_s[s] if i == 0 else head[0, s, i - 1] + durations_s[0, s]
            if s > 0:
                start = max(start, head[0, s - 1, i] + durations_s[0, s - 1] + travel_s[0, s - 1])
            for kind, window in ((1, min(windows[0, s], windows[2, s])), (2, windows[1, s])):
                if i >= window:
                    start = max(start, head[kind, s, i - window] + durations_s[kind, s])
            head[0, s, i] = start
        for s in range(num_stages - 1, -1, -1):
            start = head[0, s, i] + durations_s[0, s]
            if s + 1 < num_stages:
                start = max(start, head[1, s + 1, i] + durations_s[1, s + 1] + travel_s[1, s + 1])
            if i > 0:
                start = max(start, head[1, s, i - 1] + durations_s[1, s])
            head[1, s, i] = start
            start += durations_s[1, s]
            head[2, s, i] = start if i == 0 else max(start, head[2, s, i - 1] + durations_s[2, s])
    return head


@jit
def tails(durations_s, travel_s, ends_s, windows, num_microbatches):  # type: ignore[no-untyped-def]
    """[3, S, M]: what is left of the step at least when the i-th F, I or W of a stage ends: `heads` read backwards."""
    num_stages = durations_s.shape[1]
    tail = np.zeros((3, num_stages, num_microbatches))
    for i in range(num_microbatches - 1, -1, -1):
        last = i == num_microbatches - 1
        for s in range(num_stages):
            rest = ends_s[s] if last else tail[2, s, i + 1] + durations_s[2, s]
            if i + windows[1, s] < num_microbatches:
                rest = max(rest, tail[0, s, i + windows[1, s]] + durations_s[0, s])
            tail[2, s, i] = rest
            rest += durations_s[2, s]
            if not last:
                rest = max(rest, tail[1, s, i + 1] + durations_s[1, s])
            if s > 0:
                rest = max(rest, tail[1, s - 1, i] + durations_s[1, s - 1] + travel_s[1, s])
            window = min(windows[0, s], windows[2, s])
            if i + window < num_microbatches:
                rest = max(rest, tail[0, s, i + window] + durations_s[0, s])
            tail[1, s, i] = rest
        for s in range(num_stages - 1, -1, -1):
            rest = tail[1, s, i] + durations_s[1, s]
            if not last:
                rest = max(rest, tail[0, s, i + 1] + durations_s[0, s])
            if s + 1 < num_stages:
                rest = max(rest, tail[0, s + 1, i] + durations_s[0, s + 1] + travel_s[0, s])
            tail[0, s, i] = rest
    return tail


@jit
def one_machine(head, tail, durations_s, count):  # type: ignore[no-untyped-def]
    """The end of all that one rank or link has to do, if it might interrupt it: of what is there always that with most
    left behind it (Jackson's preemptive schedule, the best there is).

    Rows are equal things that are done one after the other: the i-th of row q is there at `head` [q, i] and takes
    `durations_s` [q], and `tail` [q, i] follows; there are `count` [q] of them.
    """
    # A rank may not interrupt an action, but the bound lets it: without interruptions the problem is NP-hard, with them
    # Jackson's rule solves it exactly in one pass, and what it gives can only be less. Rows and not single actions are
    # looked at, since equal actions of a stage come in their order anyway.
    place, left = np.zeros(count.size, np.int64), durations_s.copy()
    now, end = 0.0, 0.0
    while True:
        chosen, most, soonest = -1, -np.inf, np.inf
        for row in range(count.size):
            if place[row] == count[row]:
                continue
            released = head[row, place[row]]
            if released > now:
                soonest = min(soonest, released)
            elif tail[row, place[row]] > most:
                chosen, most = row, tail[row, place[row]]
        if chosen < 0:
            if soonest == np.inf:
                return end
            now = soonest
            continue
        work = min(left[chosen], soonest - now)
        left[chosen] -= work
        now += work
        if now >= soonest and left[chosen] > 0:
            continue
        end = max(end, now + most)
        place[chosen] += 1
        left[chosen] = durations_s[chosen]
