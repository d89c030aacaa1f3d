"""Memory that is used again: new memory for every long message costs 0.5 s of CPU per GB in page faults."""

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

LEAST_BYTES: Final = 64 << 10
"""Shorter messages get new memory, which is cheaper than to account for it."""


class Buffers:
    """Writable memory by size, from `make`; memory that nothing refers to any more is handed out again.

    It never has more than was in use at once so far: for another size, what was let go of first is given up. May be
    called by any thread.
    """

    def __init__(self, make: Callable[[int], memoryview]) -> None:
        self._make, self._lock = make, threading.RLock()  # memory may be let go of while a thread has the lock
        self._free: dict[int, list[memoryview]] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}
        self._lent_bytes = self._free_bytes = self._most_bytes = 0

    def __call__(self, num_bytes: int) -> memoryview:
        """Uninitialised memory."""
        if num_bytes < LEAST_BYTES:
            return self._make(num_bytes)
        with self._lock:
            self._lent_bytes += num_bytes
            self._most_bytes = max(self._most_bytes, self._lent_bytes)
            memory = self._take(num_bytes)
            while self._lent_bytes + self._free_bytes > self._most_bytes:
                self._take(next(iter(self._free)))
        return self._lend(self._make(num_bytes) if memory is None else memory)

    def _take(self, num_bytes: int) -> memoryview | None:
        """Free memory of this size, the newest."""
        blocks = self._free.get(num_bytes)
        if blocks is None:
            return None
        self._free_bytes -= num_bytes
        memory = blocks.pop()
        if not blocks:
            del self._free[num_bytes]
        return memory

    def _lend(self, memory: memoryview) -> memoryview:
        """The memory behind an object of its own, which lives as long as anything that shares it."""
        import numpy as np

        owner = np.frombuffer(memory, np.uint8)

        def let_go(reference: Any) -> None:
            with self._lock:
                del self._lent[id(reference)]
                self._lent_bytes -= len(memory)
                self._free_bytes += len(memory)
                self._free.setdefault(len(memory), []).append(memory)

        reference = weakref.ref(owner, let_go)
        with self._lock:
            self._lent[id(reference)] = reference
        return owner.data
