"""Compiled operations on spectra, and the heap of events: what the kernels of `optical` share.

Spectra are bit masks of free slots in words of 64, the lowest slot in the lowest bit. A heap is (times, ranks, items,
count): earliest first, ties by rank; `count` is an array of one.
"""

from typing import Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from farpipe.core.step import jit
from farpipe.core.step.inlined import pop as pop_first
from farpipe.core.step.inlined import settle

subroutine: Final = jit.inner(forceinline=False)
"""Decorator of functions that only kernels call: as parts of their callers they would take twice as long to compile."""


@subroutine
def push(heap, at_s, rank, item):  # type: ignore[no-untyped-def]
    """Put an event on the heap; it must have space for it."""
    count = heap[3]
    settle((heap[0], heap[1], heap[2]), count[0], at_s, rank, item)
    count[0] += 1


@subroutine
def pop(heap):  # type: ignore[no-untyped-def]
    """(time, rank, item) of the earliest event, taken off."""
    times_s, ranks, items, count = heap
    found = (times_s[0], ranks[0], items[0])
    pop_first((times_s, ranks, items), count[0])
    count[0] -= 1
    return found


_ONE, _ALL = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)


@intrinsic
def _trailing_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    """Number of zeros below the lowest one of a word that is not zero: one instruction."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def _leading_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    """Number of zeros above the highest one of a word that is not zero."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@subroutine
def is_free(mask, slot):  # type: ignore[no-untyped-def]
    """True if a slot is free; slots below zero are not."""
    return slot >= 0 and (mask[slot >> 6] >> np.uint64(slot & 63)) & _ONE != 0


@subroutine
def flip(mask, start, count):  # type: ignore[no-untyped-def]
    """Turn `count` slots from `start` on: free ones are taken, taken ones are free."""
    slot, end = start, start + count
    while slot < end:
        bit = slot & 63
        here = min(64 - bit, end - slot)
        ones = _ALL if here == 64 else (_ONE << np.uint64(here)) - _ONE
        mask[slot >> 6] ^= ones << np.uint64(bit)
        slot += here


@subroutine
def common(free, begin, fibres, path, out):  # type: ignore[no-untyped-def]
    """The slots that are free on every fibre of a path, into `out`; returns whether there are any."""
    low, high = begin[path], begin[path + 1]
    any_free = np.uint64(0)
    for word in range(out.size):
        bits = free[fibres[low], word]
        for place in range(low + 1, high):
            bits &= free[fibres[place], word]
        out[word] = bits
        any_free |= bits
    return any_free != 0


@subroutine
def keep_starts(mask, count):  # type: ignore[no-untyped-def]
    """Leave only the slots with which `count` free ones begin; each round doubles the length that is known."""
    have, words = 1, mask.size
    while have < count:
        step = min(have, count - have)
        offset, bit = step >> 6, np.uint64(step & 63)
        for word in range(words):
            bits = np.uint64(0)
            if word + offset < words:
                bits = mask[word + offset] >> bit
                if bit and word + offset + 1 < words:
                    bits |= mask[word + offset + 1] << (np.uint64(64) - bit)
            mask[word] &= bits
        have += step


@subroutine
def lowest(mask):  # type: ignore[no-untyped-def]
    """The lowest slot of a mask, or -1."""
    for word in range(mask.size):
        if mask[word]:
            return 64 * word + np.int64(_trailing_zeros(mask[word]))  # type: ignore[call-arg]
    return -1


@subroutine
def highest(mask):  # type: ignore[no-untyped-def]
    """The highest slot of a mask, or -1."""
    for word in range(mask.size - 1, -1, -1):
        if mask[word]:
            return 64 * word + 63 - np.int64(_leading_zeros(mask[word]))  # type: ignore[call-arg]
    return -1


@subroutine
def next_set(mask, slot, num_slots):  # type: ignore[no-untyped-def]
    """The lowest free slot from `slot` on, or `num_slots`."""
    word = slot >> 6
    if slot >= num_slots:
        return num_slots
    bits = mask[word] & (_ALL << np.uint64(slot & 63))
    while bits == 0:
        word += 1
        if word == mask.size:
            return num_slots
        bits = mask[word]
    return 64 * word + np.int64(_trailing_zeros(bits))  # type: ignore[call-arg]


@subroutine
def next_clear(mask, slot, num_slots):  # type: ignore[no-untyped-def]
    """The lowest taken slot from `slot` on, or `num_slots`."""
    word = slot >> 6
    if slot >= num_slots:
        return num_slots
    bits = ~mask[word] & (_ALL << np.uint64(slot & 63))
    while bits == 0:
        word += 1
        if word == mask.size:
            return num_slots
        bits = ~mask[word]
    return min(num_slots, 64 * word + np.int64(_trailing_zeros(bits)))  # type: ignore[call-arg]


@subroutine
def largest_block(mask, num_slots):  # type: ignore[no-untyped-def]
    """(length of the longest run of free slots, number of free slots, number of runs)."""
    longest, total, blocks = 0, 0, 0
    start = next_set(mask, 0, num_slots)
    while start < num_slots:
        end = next_clear(mask, start, num_slots)
        longest, total, blocks = max(longest, end - start), total + end - start, blocks + 1
        start = next_set(mask, end, num_slots)
    return longest, total, blocks
