"""Bytes that the forwards of a stage keep for their backwards, now and at most."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class HeldBytes:
    """Counts the storages that autograd keeps, each once however many tensors share it; parameters don't count."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._owned = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._holders: dict[int, int] = {}
        self.now = self.peak = 0

    def counting(self) -> AbstractContextManager[Any]:
        """Within it, what autograd saves is counted until it lets go of it."""
        return saved_tensors_hooks(lambda tensor: Held(self, tensor), lambda held: held.tensor)

    def note(self, more: int = 0) -> None:
        """Remember the most that was held, with so many bytes that somebody else counts."""
        self.peak = max(self.peak, self.now + more)

    def take(self, storage: torch.UntypedStorage) -> None:
        """One more holder of it."""
        place = storage.data_ptr()
        if place in self._owned:
            return
        self._holders[place] = self._holders.get(place, 0) + 1
        self.now += storage.nbytes() if self._holders[place] == 1 else 0

    def give(self, storage: torch.UntypedStorage) -> None:
        """One holder less."""
        place = storage.data_ptr()
        if place in self._owned:
            return
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._holders[place]
            self.now -= storage.nbytes()


class Held:
    """A tensor that is counted as long as this lives."""

    def __init__(self, counter: HeldBytes, tensor: Tensor) -> None:
        self._counter, self.tensor = counter, tensor
        counter.take(tensor.untyped_storage())

    def __del__(self) -> None:
        self._counter.give(self.tensor.untyped_storage())
