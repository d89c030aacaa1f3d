"""A rank's state at the end of a step, on its way to the disk through memory with a bound.

Tensors make one stream of bytes, in the order of the file. The computing thread copies it into pieces of memory, and
whoever writes the file takes these and gives them back. Where all of the state fits into the bound the training goes on
as soon as it is copied; of a larger one the rest waits for the disk, and the training with it, but no memory runs out.
A GPU copies to page-locked pieces, which are kept for the next checkpoint: to make them costs a third of a second per
GB, and to copy to any other memory takes four times as long.
"""

import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from farpipe.engine.executor.staging import host_tensor

PIECE_BYTES: Final = 64 << 20
LEAST_PIECES: Final = 2
"""One is filled while the other is written."""


class Pieces:
    """The memory of a rank's snapshots."""

    def __init__(self, *, pinned: bool, cuda: Any = torch.cuda) -> None:
        """`pinned`: page-locked, for a GPU, and kept. `cuda`: another one for tests."""
        self._pinned, self._cuda = pinned, cuda
        self._free: list[Tensor] = []
        self._num_lent = 0
        self._changed = threading.Condition()

    def take(self, num_bytes: int, limit_bytes: float, may_wait: Callable[[], bool]) -> Tensor | None:
        """A piece of `num_bytes` while less than `limit_bytes` are lent; None where ``may_wait()`` ends the wait."""
        most = max(LEAST_PIECES, int(min(limit_bytes, 1 << 50) // num_bytes))
        with self._changed:
            while self._num_lent >= most:
                if not may_wait():
                    return None
                self._changed.wait(0.1)
            self._num_lent += 1
            self._free = [piece for piece in self._free if len(piece) == num_bytes]
            if self._free:
                return self._free.pop()
        return host_tensor((num_bytes,), torch.uint8, pinned=self._pinned)

    def give_back(self, piece: Tensor) -> None:
        with self._changed:
            self._num_lent -= 1
            if self._pinned:
                self._free.append(piece)
            self._changed.notify_all()

    def when_copied(self) -> Callable[[], None]:
        """A wait, for another thread, until what was copied so far is there."""
        if not self._pinned:
            return lambda: None
        copied = self._cuda.current_stream().record_event(self._cuda.Event(blocking=True))
        device = torch.device("cuda", self._cuda.current_device())

        def wait() -> None:
            self._cuda.set_device(device)  # a new thread's is the machine's first
            copied.synchronize()

        return wait


class Slice(NamedTuple):
    """Consecutive bytes of one tensor."""

    key: str
    values: Tensor


class _Filled(NamedTuple):
    """A piece that is being filled, or is full."""

    piece: Tensor
    slices: list[Slice]
    wait: Callable[[], None]


class Snapshot:
    """Tensors by key, to be read once. One thread fills it, another takes the slices."""

    def __init__(self, tensors: Mapping[str, Tensor], pieces: Pieces, limit_bytes: float = math.inf) -> None:
        """Wide numbers come first, so that every tensor begins at a multiple of its numbers."""
        self.tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
        self._pieces, self._limit_bytes, self._is_over = pieces, limit_bytes, False
        self._piece_bytes = min(PIECE_BYTES, max(8, sum(tensor.nbytes for tensor in tensors.values())))
        self._full: queue.SimpleQueue[_Filled | None] = queue.SimpleQueue()

    def fill(self) -> None:
        """Copy all tensors, which may change afterwards; waits for memory where there is less than they need."""
        self._fill()
        if self._is_over:  # and what was passed on since will not be taken
            self.end()

    def _fill(self) -> None:
        filled, used = None, 0
        for key, tensor in self.tensors.items():
            data, at = tensor.detach().contiguous().reshape(-1).view(torch.uint8), 0
            while at < len(data):
                if filled is None:
                    if (filled := self._begin()) is None:
                        return
                    used = 0
                size = min(len(data) - at, self._piece_bytes - used)
                target = filled.piece[used : used + size]
                target.copy_(data[at : at + size], non_blocking=tensor.is_cuda)
                filled.slices.append(Slice(key, target.view(tensor.dtype)))
                at, used = at + size, used + size
                if used == self._piece_bytes:
                    self._pass_on(filled)
                    filled = None
        if filled is not None:
            self._pass_on(filled)
        self._full.put(None)

    def _begin(self) -> _Filled | None:
        if self._is_over:
            return None
        piece = self._pieces.take(self._piece_bytes, self._limit_bytes, lambda: not self._is_over)
        return None if piece is None else _Filled(piece, [], lambda: None)

    def _pass_on(self, filled: _Filled) -> None:
        self._full.put(filled._replace(wait=self._pieces.when_copied()))

    def slices(self) -> Iterator[Slice]:
        """Every tensor's bytes, in order; a slice is overwritten after the next one was asked for."""
        while (filled := self._full.get()) is not None:
            try:
                filled.wait()
                yield from filled.slices
            finally:
                self._pieces.give_back(filled.piece)

    def end(self) -> None:
        """Nobody takes the rest: whoever fills need not wait."""
        self._is_over = True
        while not self._full.empty():
            if (filled := self._full.get()) is not None:
                self._pieces.give_back(filled.piece)
