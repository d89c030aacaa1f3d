"""The compiled loop of `rounds`, which says what it does.

Kinds are passed as `np.int64`: numba compiles a function anew for every literal that it is called with.
"""

import numpy as np
from numba import njit

from farpipe.schedule.library.list_kernel import F, I, W, send


@njit(cache=True)
def _put(stage, kind, step, wires, state):  # type: ignore[no-untyped-def]
    """Do the next action of this kind as soon as its input is there."""
    duration, taken, freed = step[:3]
    done, arrival, free, used, idle, began, link_free, codes = state
    num_microbatches = duration.shape[2]
    j = done[kind, stage]
    start = free[stage] if kind == W else max(free[stage], arrival[kind, stage, j])
    place = done[:, stage].sum()
    if place == 0:
        began[stage] = start
    else:
        idle[stage] += start - free[stage]
    codes[stage, place] = 4 * (stage * num_microbatches + j) + kind
    done[kind, stage] += 1
    free[stage] = start + duration[kind, stage, j]
    used[stage] += taken[stage, j, kind] - freed[stage, j, kind]
    if kind != W:
        send(kind, stage, j, free[stage], arrival, wires, link_free)


@njit(cache=True)
def _make_room(stage, kind, step, wires, state):  # type: ignore[no-untyped-def]
    """Do W's until the next action of this kind fits memory; whether it does."""
    taken, freed, headroom = step[1:]
    done, used = state[0], state[3]
    j = done[kind, stage]
    needed = taken[stage, j, kind] - min(freed[stage, j, kind], 0.0)
    while used[stage] + needed > headroom[stage]:
        if done[W, stage] == done[I, stage]:
            return False
        _put(stage, np.int64(W), step, wires, state)
    return True


@njit(cache=True)
def _fill_gap(stage, kind, step, wires, state, greedy, tolerance_s):  # type: ignore[no-untyped-def]
    """Do W's until the input of the next action of this kind is there; `rounds` says when one that is longer."""
    duration = step[0]
    done, arrival, free, idle = state[0], state[1], state[2], state[4]
    until = arrival[kind, stage, done[kind, stage]]
    while done[W, stage] < done[I, stage] and free[stage] < until - tolerance_s:
        fits = free[stage] + duration[W, stage, done[W, stage]] <= until + tolerance_s
        if not (fits or greedy or until - free[stage] > idle.max() - idle[stage] + tolerance_s):
            break
        _put(stage, np.int64(W), step, wires, state)


@njit(cache=True)
def _hop_s(kind, stage, j, wires):  # type: ignore[no-untyped-def]
    """From the end of an F or I until its message has arrived, if the link is free."""
    link, _, arrives_after_s, _ = wires
    return 0.0 if link[kind, stage, j] < 0 else arrives_after_s[kind, stage, j]


@njit(cache=True)
def _warm_up(step, wires, state, bubble_first, tolerance_s):  # type: ignore[no-untyped-def]
    """The number of forwards beyond the first that every stage does before its first I: [S]."""
    duration, taken, _, headroom = step
    free, used = state[2], state[3]
    num_stages, num_microbatches = duration.shape[1:]
    more = np.zeros(num_stages, np.int64)
    first_end = free[num_stages - 1] + duration[I, num_stages - 1, 0]
    for stage in range(num_stages - 2, -1, -1):
        arrival, end, held = first_end + _hop_s(I, stage + 1, np.int64(0), wires), free[stage], used[stage]
        for j in range(1, num_microbatches):
            late = end + duration[F, stage, j] > arrival + tolerance_s if bubble_first else end >= arrival - tolerance_s
            if late or held + taken[stage, j, F] > headroom[stage]:
                break
            end, held = end + duration[F, stage, j], held + taken[stage, j, F]
            more[stage] += 1
        first_end = max(end, arrival) + duration[I, stage, 0]
    for stage in range(1, num_stages):
        before = more[stage - 1]
        more[stage] = min(more[stage], before if 1 + before == num_microbatches else max(0, before - 1))
    return more


@njit(cache=True)
def _waits(stage, step, wires, state, tolerance_s):  # type: ignore[no-untyped-def]
    """True if a stage that is two forwards ahead of the next one had better leave out its next forward."""
    duration, taken, freed, headroom = step
    done, free, used, idle = state[0], state[2], state[3], state[4]
    if done[F, stage] < done[F, stage + 1] + 2:
        return False
    due = free[stage + 1] + duration[F, stage + 1, done[F, stage + 1]] + duration[I, stage + 1, done[I, stage + 1]]
    due += _hop_s(I, stage + 1, done[I, stage + 1], wires)
    if free[stage] >= due - tolerance_s:
        return True
    j, w = done[F, stage], done[W, stage]
    end, held = free[stage] + duration[F, stage, j], used[stage] + taken[stage, j, F]
    while held > headroom[stage] and w < done[I, stage]:
        end, held, w = end + duration[W, stage, w], held - freed[stage, w, W], w + 1
    return end > due + tolerance_s and due - free[stage] <= idle.max() - idle[stage] + tolerance_s


@njit(cache=True)
def _forwards(step, wires, state, prioritize, tolerance_s):  # type: ignore[no-untyped-def]
    """Stages that do an F in the next round: one only if the next stage does, for it would only hold more: [S]."""
    done = state[0]
    num_stages, num_microbatches = step[0].shape[1:]
    goes = np.zeros(num_stages, np.int64)
    for stage in range(num_stages - 1, -1, -1):
        is_last = stage == num_stages - 1
        if done[F, stage] < num_microbatches and (is_last or goes[stage + 1]):
            waits = prioritize and not is_last and _waits(stage, step, wires, state, tolerance_s)
            goes[stage] = not waits
    return goes


@njit(cache=True)
def _round(forwards, step, wires, state, greedy, tolerance_s):  # type: ignore[no-untyped-def]
    """So many F on every stage, then one I from last to first; whether all of them fit memory."""
    done = state[0]
    num_stages, num_microbatches = step[0].shape[1:]
    for stage in range(num_stages):
        for _ in range(forwards[stage]):
            if not _make_room(stage, np.int64(F), step, wires, state):
                return False
            _fill_gap(stage, np.int64(F), step, wires, state, greedy, tolerance_s)
            _put(stage, np.int64(F), step, wires, state)
    for stage in range(num_stages - 1, -1, -1):
        if not _make_room(stage, np.int64(I), step, wires, state):
            return False
        _fill_gap(stage, np.int64(I), step, wires, state, greedy, tolerance_s)
        while stage == 0 and done[F, 0] == num_microbatches and done[W, 0] < done[I, 0]:
            _put(stage, np.int64(W), step, wires, state)
        _put(stage, np.int64(I), step, wires, state)
    return True


@njit(cache=True)
def build(step, wires, bubble_first, prioritize, greedy, tolerance_s, codes):  # type: ignore[no-untyped-def]
    """Write the orders of the stages into `codes` [S, 3M]; (makespan, longest time of any stage), or infinity.

    `step` = (duration_s [3, S, M], taken and freed bytes [S, M, 4], headroom bytes of the stages [S]).
    """
    num_stages, num_microbatches = step[0].shape[1:]
    done, arrival = np.zeros((3, num_stages), np.int64), np.full((2, num_stages, num_microbatches), np.inf)
    arrival[F, 0] = 0.0
    free, used, idle, began = np.zeros(num_stages), np.zeros(num_stages), np.zeros(num_stages), np.zeros(num_stages)
    state = (done, arrival, free, used, idle, began, np.zeros(wires[3]), codes)
    for stage in range(num_stages):
        _put(stage, np.int64(F), step, wires, state)
    forwards = _warm_up(step, wires, state, bubble_first, tolerance_s)
    for _ in range(num_microbatches):
        if not _round(forwards, step, wires, state, greedy, tolerance_s):
            return np.inf, np.inf
        forwards = _forwards(step, wires, state, prioritize, tolerance_s)
    for stage in range(num_stages):
        while done[W, stage] < num_microbatches:
            _put(stage, np.int64(W), step, wires, state)
    return free.max(), (free - began).max()
