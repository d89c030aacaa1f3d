"""Rules of `step` as functions that compiled loops inline: codes of actions, the queue of a link, a heap of events."""

from typing import Any, Final

import numpy as np

from farpipe.core.step import codes
from farpipe.core.step.jit import jit

_inlined: Final[Any] = jit(inline="always")

encode = _inlined(codes.encode)
kind_of = _inlined(codes.kind_of)
slot_of = _inlined(codes.slot_of)
direction_of = _inlined(codes.direction_of)
message_of = _inlined(codes.message_of)
next_stage = _inlined(codes.next_stage)
arrival_of = _inlined(codes.arrival_of)


@_inlined
def put(link, ready_s, occupies_s, link_free_s):  # type: ignore[no-untyped-def]
    """Start on its link of a message that is ready; a message without a link starts at once.

    The queue of a link: it carries one message at a time, in the order in which this is called. For many messages in
    arrays see `links.free_again_s`.
    """
    if link < 0:
        return ready_s
    start_s = max(ready_s, link_free_s[link])
    link_free_s[link] = start_s + occupies_s
    return start_s


@_inlined
def lacks(used, takes, spare, headroom):  # type: ignore[no-untyped-def]
    """True if an action that takes bytes does not fit beside `used` and `spare` ones; one that takes none does."""
    return takes > 0 and used + takes + spare > headroom


@_inlined
def level_after(used, takes, frees):  # type: ignore[no-untyped-def]
    """Bytes that a rank holds after an action, given those before it."""
    return used + (takes - frees)


@_inlined
def settle(heap, place, ready_s, tie, item):  # type: ignore[no-untyped-def]
    """Put a pending message at `place` or above it, wherever nothing later is above."""
    keys, ties, items = heap
    while place > 0:
        parent = (place - 1) >> 1
        if ready_s > keys[parent] or (ready_s == keys[parent] and tie > ties[parent]):
            break
        keys[place], ties[place], items[place] = keys[parent], ties[parent], items[parent]
        place = parent
    keys[place], ties[place], items[place] = ready_s, tie, item


@_inlined
def pop(heap, size):  # type: ignore[no-untyped-def]
    """Take the earliest of the `size` pending messages off: the gap sinks to the bottom, where the last one settles."""
    keys, ties, items = heap
    size -= 1
    ready_s, tie, item = keys[size], ties[size], items[size]
    place, child = 0, 1
    while child < size:
        other = child + 1
        if other < size and (keys[other] < keys[child] or (keys[other] == keys[child] and ties[other] < ties[child])):
            child = other
        keys[place], ties[place], items[place] = keys[child], ties[child], items[child]
        place, child = child, 2 * child + 1
    settle(heap, place, ready_s, tie, item)


@_inlined
def stage_of(slot, per_microbatch):  # type: ignore[no-untyped-def]
    """Stage of a slot; `per_microbatch`: 1 / M. Exact below 2**51 slots, and faster than dividing integers."""
    return np.int64((slot + 0.5) * per_microbatch)


@_inlined
def figure_place(tables, stage, slot):  # type: ignore[no-untyped-def]
    """Place of the figures of stage * M + microbatch = `slot` among those of one kind or direction."""
    return slot if tables.width > 1 else stage
