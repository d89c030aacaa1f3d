"""Compilation of the kernels of `optical`, and the heap of events that they share.

A heap is (times, ranks, items, count): earliest first, ties by rank; `count` is an array of one.
"""

from typing import Any, Final

from farpipe.step.inlined import pop as pop_first
from farpipe.step.inlined import settle
from farpipe.step.jit import jit

_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

inner: Final[Any] = jit(**_OPTIONS)
"""Decorator of functions that only kernels call: their wrappers for so many arrays would take longer to compile."""


@inner
def push(heap, at_s, rank, item):  # type: ignore[no-untyped-def]
    """Put an event on the heap; it must have space for it."""
    count = heap[3]
    settle((heap[0], heap[1], heap[2]), count[0], at_s, rank, item)
    count[0] += 1


@inner
def pop(heap):  # type: ignore[no-untyped-def]
    """(time, rank, item) of the earliest event, taken off."""
    times_s, ranks, items, count = heap
    found = (times_s[0], ranks[0], items[0])
    pop_first((times_s, ranks, items), count[0])
    count[0] -= 1
    return found
