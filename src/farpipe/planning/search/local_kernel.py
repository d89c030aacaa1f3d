"""The compiled local search: simulated annealing over the orders of all ranks.

A move swaps two neighbouring blocks of a rank's order (a block of one action is a shift); a chained move shifts the
same microbatch on several ranks in a row. Where microbatches are identical, those of one stage and kind keep their
sequence: what a move carries past its like is renumbered. The rules on a rank and its memory are checked over the
changed stretch only, the rest (deadlock, time) by the compiled player.

There is no move that joins I and W into B: in our model B is never faster than I at once followed by W.
"""

import numpy as np

from farpipe.core.step.codes import NUM_KINDS, B, F, I, W
from farpipe.core.step.inlined import (
    arrival_of,
    direction_of,
    encode,
    figure_place,
    kind_of,
    lacks,
    level_after,
    message_of,
    next_stage,
    slot_of,
)
from farpipe.core.step.jit import inner, jit
from farpipe.core.step.player_kernel import makespan

MAX_STRETCH = 64
"""Actions between the ends of a move, at most."""
_MAX_CHAIN = 8
_ON_PATH = 0.95
"""The share of the moves that begin on the critical path."""


@jit(nogil=True)
def anneal(  # type: ignore[no-untyped-def]
    codes,
    begin,
    tables,
    out,
    scratch,
    memory,
    slices,
    rank_work_s,
    temperatures_s,
    num_evaluations,
    renumber,
    target_s,
    seed,
):
    """Improve `codes` in place into the best orders found; returns (makespan_s, evaluations done).

    `memory` = (taken, freed, both by code, headroom [R]); `slices` = (the slice before, the one after) [M];
    temperatures fall from the first to the second of `temperatures_s`. Stops early at `target_s`.
    """
    np.random.seed(seed)
    (num_stages, num_microbatches), num_ranks = tables.shape, begin.size - 1
    num_slots = num_stages * num_microbatches
    current, level, place = codes.copy(), np.empty(codes.size), np.empty(NUM_KINDS * num_slots, np.int32)
    _lay_out(current, begin, memory, level, place)
    state = (current, begin, memory, level, place, num_microbatches, tables.rank_of_stage, slices)
    stretches, saved = np.empty((_MAX_CHAIN, 3), np.int64), np.empty((_MAX_CHAIN, MAX_STRETCH), np.int32)
    undo = (stretches, saved, np.empty(_MAX_CHAIN, np.int64))
    cursor = np.empty(NUM_KINDS * num_stages, np.int64)
    path = np.empty(codes.size, np.int64)
    no_limit = np.full(num_ranks, np.inf)
    now_s = makespan(current, begin, tables, out, scratch, no_limit)
    length = _critical_path(current, begin, tables, out, place, path)
    best_s, cooling = now_s, np.log(temperatures_s[1] / temperatures_s[0]) / max(num_evaluations, 1)
    for evaluation in range(num_evaluations):
        if best_s <= target_s:
            return best_s, evaluation
        touched = _move(state, undo, cursor, renumber, path[:length])
        if touched == 0:
            continue
        # Metropolis' rule, with its random number drawn before the play instead of after it: what may at most come out
        # is then known, and a play ends as soon as one rank has idled longer than that leaves room for. Most moves of a
        # cold search are worse, so most plays end early; which moves are taken stays the same.
        temperature_s = temperatures_s[0] * np.exp(cooling * evaluation)
        limit_s = now_s - temperature_s * np.log(1.0 - np.random.random())
        limit_s = max(limit_s, now_s * (1 + 1e-12))
        new_s = makespan(current, begin, tables, out, scratch, limit_s - rank_work_s) if touched > 0 else np.inf
        if new_s > limit_s:
            _take_back(state, undo, abs(touched))
            continue
        now_s = new_s
        length = _critical_path(current, begin, tables, out, place, path)
        if new_s < best_s * (1 - 1e-12):
            best_s = new_s
            for at in range(codes.size):  # as fast as a slice, and three seconds less to compile
                codes[at] = current[at]
    return best_s, num_evaluations


@inner
def _lay_out(codes, begin, memory, level, place):  # type: ignore[no-untyped-def]
    """Bytes in use before every action, and the place of every action in the orders (-1: it does not exist)."""
    place[:] = -1
    for rank in range(begin.size - 1):
        used = 0.0
        for at in range(begin[rank], begin[rank + 1]):
            level[at] = used
            used = level_after(used, memory[0][codes[at]], memory[1][codes[at]])
            place[codes[at]] = at


@inner
def _critical_path(codes, begin, tables, out, place, path):  # type: ignore[no-untyped-def]
    """Write the places of a chain of actions of which each waited for the one before, up to the last to end, into
    `path`; returns how many they are. Only what changes something on this path can make the step shorter."""
    shape, rank_of_stage = tables.shape, tables.rank_of_stage
    start_s, arrival_s = out[0], out[2]
    per_kind, last_s, at = shape[0] * shape[1], -1.0, -1
    for rank in range(begin.size - 1):
        final = begin[rank + 1] - 1
        if final >= begin[rank]:
            slot = slot_of(codes[final])
            row = figure_place(tables, slot // shape[1], slot)
            end_s = start_s[final] + tables.duration_s[kind_of(codes[final]) * shape[0] * tables.width + row]
            if end_s > last_s:
                last_s, at = end_s, final
    length = 0
    while at >= 0 and length < path.size:
        path[length] = at
        length += 1
        code = codes[at]
        kind, slot = kind_of(code), slot_of(code)
        stage, direction = slot // shape[1], direction_of(kind)
        source = next_stage(stage, 1 - direction)
        there_s = arrival_s[message_of(direction, slot, per_kind)]
        sent = kind != W and 0 <= source < shape[0] and there_s == start_s[at]
        if not sent:
            at = at - 1 if at > begin[rank_of_stage[stage]] else -1
            continue
        made = arrival_of(slot, 1 - direction, shape[1])
        at = place[encode(kind, made)]
        if at < 0:
            at = place[encode(I + B - kind, made)]
    return length


@inner
def _move(state, undo, cursor, renumber, path):  # type: ignore[no-untyped-def]
    """Make a random move, mostly on the critical path; returns the number of ranks changed: 0 nothing, negative: it
    broke a rule on the last."""
    codes, begin, num_microbatches, rank_of_stage = state[0], state[1], state[5], state[6]
    num_ranks = begin.size - 1
    if np.random.random() < _ON_PATH:
        at = path[np.random.randint(path.size)]
        rank = np.int64(rank_of_stage[slot_of(codes[at]) // num_microbatches])
    else:
        rank = np.random.randint(num_ranks)
        at = begin[rank] + np.random.randint(max(begin[rank + 1] - begin[rank], 1))
    if begin[rank + 1] - begin[rank] < 2:
        return 0
    reach = 1 + int(-np.log(1.0 - np.random.random()) * 5.0)
    reach = min(reach, MAX_STRETCH // 2)
    shift = reach if np.random.random() < 0.5 else -reach
    if num_ranks > 1 and np.random.random() < 0.25:
        return _chain(state, undo, cursor, renumber, at, shift)
    block = 1
    if np.random.random() < 0.3:
        block += int(-np.log(1.0 - np.random.random()) * 3.0)
    if shift > 0:
        low, middle, high = at, at + min(block, MAX_STRETCH // 2), at + min(block, MAX_STRETCH // 2) + shift
    else:
        low, middle, high = at + shift, at, at + min(block, MAX_STRETCH // 2)
    low, high = max(low, begin[rank]), min(high, begin[rank + 1])
    return _swap_blocks(state, undo, cursor, renumber, np.int64(0), rank, low, middle, high)


@inner
def _chain(state, undo, cursor, renumber, at, shift):  # type: ignore[no-untyped-def]
    """Shift an action and the same microbatch's action of the following stages by the same number of places."""
    codes, begin, _, _, place, num_microbatches, rank_of_stage, _ = state
    code, touched = codes[at], 0
    length = 2 + np.random.randint(_MAX_CHAIN - 1)
    seen = undo[2]
    for link in range(length):
        stage = slot_of(code) // num_microbatches + link
        if stage >= rank_of_stage.size:
            break
        rank = np.int64(rank_of_stage[stage])
        here = place[encode(kind_of(code), slot_of(code) + link * num_microbatches)]
        known = here < 0
        for before in range(link):
            known |= seen[before] == rank
        if known:
            break
        seen[link] = rank
        low, middle, high = (here, here + 1, here + 1 + shift) if shift > 0 else (here + shift, here, here + 1)
        low, high = max(low, begin[rank]), min(high, begin[rank + 1])
        if low >= middle or middle >= high:
            continue
        changed = _swap_blocks(state, undo, cursor, renumber, touched, rank, low, middle, high)
        if changed < 0:
            return changed
        touched = max(touched, changed)
    return touched


@inner
def _swap_blocks(state, undo, cursor, renumber, touched, rank, low, middle, high):  # type: ignore[no-untyped-def]
    """Swap codes[low:middle] and codes[middle:high]; returns touched + 1, its negative if a rule is broken, or 0."""
    codes, _, memory, level, place, num_microbatches, _, slices = state
    stretches, saved, _ = undo
    if low >= middle or middle >= high or high - low > MAX_STRETCH:
        return 0
    size, first = high - low, middle - low
    for i in range(size):
        saved[touched, i] = codes[low + i]
    stretches[touched, 0], stretches[touched, 1], stretches[touched, 2] = low, high, rank
    for i in range(size):
        codes[low + i] = saved[touched, i + first if i + first < size else i + first - size]
    if renumber:
        _keep_sequence(codes, low, high, saved[touched], cursor, num_microbatches)
    for at in range(low, high):
        place[codes[at]] = at
    return touched + 1 if _sound(codes, low, high, memory, level, place, rank, slices) else -touched - 1


@inner
def _keep_sequence(codes, low, high, before, cursor, num_microbatches):  # type: ignore[no-untyped-def]
    """Give the actions of each stage and kind the microbatches in the sequence in which they stood before."""
    for at in range(low, high):
        cursor[encode(kind_of(codes[at]), slot_of(codes[at]) // num_microbatches)] = 0
    for at in range(low, high):
        token = encode(kind_of(codes[at]), slot_of(codes[at]) // num_microbatches)
        i = cursor[token]
        while encode(kind_of(before[i]), slot_of(before[i]) // num_microbatches) != token:
            i += 1
        codes[at] = before[i]
        cursor[token] = i + 1


@inner
def _sound(codes, low, high, memory, level, place, rank, slices):  # type: ignore[no-untyped-def]
    """True if codes[low:high] keep F before I before W, chains, and memory; brings `level` up to date as far as they
    do."""
    taken, freed, headroom = memory[0], memory[1], memory[2][rank]
    used = level[low]
    for at in range(low, high):
        code = codes[at]
        kind, slot = kind_of(code), slot_of(code)
        level[at] = used
        if lacks(used, taken[code], 0.0, headroom):
            return False
        used = level_after(used, taken[code], freed[code])
        if used > headroom and kind == I:
            return False
        if not _in_turn(kind, slot, at, place, slices):
            return False
    return True


@jit(inline="always")
def _in_turn(kind, slot, at, place, slices):  # type: ignore[no-untyped-def]
    """True if what has to come before an action on its own stage does: F before I before W, slices in their order."""
    if kind == W:
        return place[encode(I, slot)] <= at
    microbatch = slot % slices[0].size
    other = slices[0][microbatch] if kind == F else slices[1][microbatch]
    if other >= 0:
        before = slot + other - microbatch
        if kind == F and place[encode(F, before)] > at:
            return False
        if kind != F and max(place[encode(I, before)], place[encode(B, before)]) > at:
            return False
    return kind == F or place[encode(F, slot)] <= at


@inner
def _take_back(state, undo, touched):  # type: ignore[no-untyped-def]
    codes, _, memory, level, place, _, _, _ = state
    stretches, saved, _ = undo
    for change in range(touched - 1, -1, -1):
        low, high = stretches[change, 0], stretches[change, 1]
        used = level[low]
        for at in range(low, high):
            codes[at] = saved[change, at - low]
            place[codes[at]] = at
            level[at] = used
            used = level_after(used, memory[0][codes[at]], memory[1][codes[at]])
