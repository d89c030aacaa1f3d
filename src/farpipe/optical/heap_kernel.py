"""A compiled heap of events: (time, rank, item), earliest first, ties by rank; `count` is an array of one."""

from farpipe.optical.compiled import inner


@inner
def _earlier(time_s, rank, one, other):  # type: ignore[no-untyped-def]
    return time_s[one] < time_s[other] or (time_s[one] == time_s[other] and rank[one] < rank[other])


@inner
def _swap(heap, one, other):  # type: ignore[no-untyped-def]
    time_s, rank, item, _ = heap
    time_s[one], time_s[other] = time_s[other], time_s[one]
    rank[one], rank[other] = rank[other], rank[one]
    item[one], item[other] = item[other], item[one]


@inner
def push(heap, at_s, rank_of, what):  # type: ignore[no-untyped-def]
    """Put an event on the heap; it must have space for it."""
    time_s, rank, item, count = heap
    place = count[0]
    time_s[place], rank[place], item[place] = at_s, rank_of, what
    count[0] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if not _earlier(time_s, rank, place, parent):
            break
        _swap(heap, place, parent)
        place = parent


@inner
def pop(heap):  # type: ignore[no-untyped-def]
    """(time, rank, item) of the earliest event, taken off."""
    time_s, rank, item, count = heap
    found = (time_s[0], rank[0], item[0])
    count[0] -= 1
    size = count[0]
    time_s[0], rank[0], item[0] = time_s[size], rank[size], item[size]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            return found
        if child + 1 < size and _earlier(time_s, rank, child + 1, child):
            child += 1
        if not _earlier(time_s, rank, child, place):
            return found
        _swap(heap, place, child)
        place = child
