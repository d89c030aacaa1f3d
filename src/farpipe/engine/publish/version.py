"""Versions of weights: what each process has of them, in one array of bits, and the few that a publisher keeps."""

import hashlib
import threading
import time
import weakref
from math import prod
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from farpipe.core.spec.part import Natural, Part, Text
from farpipe.engine.publish.coding import Numbers

WeightType = Literal["bfloat16", "float32"]
BITS: Final[dict[WeightType, type[np.unsignedinteger[Any]]]] = {"bfloat16": np.uint16, "float32": np.uint32}
TORCH_TYPES: Final[dict[WeightType, torch.dtype]] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_AS_INTEGERS: Final = {"bfloat16": torch.uint16, "float32": torch.uint32}


class PieceForm(Part):
    """Part of a tensor of the whole model: a run of the flattened tensor's elements, or a box."""

    name: Text
    """Name in the whole model."""
    shape: tuple[Natural, ...]
    """Shape of the whole tensor."""
    offset: tuple[Natural, ...]
    """First element of a run: one number; of a box one per dimension."""
    sizes: tuple[Natural, ...]
    """Shape of the piece."""

    @property
    def num_elements(self) -> int:
        """Elements of the piece."""
        return prod(self.sizes)


class PartForm(Part):
    """All pieces that one process publishes, in the order in which they follow each other."""

    FORMAT: ClassVar[str] = "farpipe/publish/1"

    weight_type: WeightType
    pieces: Annotated[tuple[PieceForm, ...], Field(max_length=1 << 24)]

    @property
    def num_elements(self) -> int:
        """Elements of all pieces."""
        return sum(piece.num_elements for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return self.num_elements * np.dtype(BITS[self.weight_type]).itemsize

    @property
    def sha256(self) -> str:
        """Digest of the form itself."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class Version:
    """A process's part of the weights after `step` steps, which nobody writes to any more."""

    def __init__(self, step: int, values: Numbers) -> None:
        self.step, self.values = step, values
        self._lock = threading.Lock()
        self._sha256 = ""

    @property
    def sha256(self) -> str:
        """Digest of the bits; made when it is first asked for."""
        with self._lock:
            self._sha256 = self._sha256 or digest(self.values)
            return self._sha256


def digest(values: NDArray[Any]) -> str:
    """SHA-256 of an array's bytes."""
    return hashlib.sha256(values.data).hexdigest()


def as_bits(values: torch.Tensor, weight_type: WeightType) -> Numbers:
    """The bits of a flat tensor of `weight_type`, without a copy."""
    bits: Numbers = values.view(_AS_INTEGERS[weight_type]).numpy()
    return bits


def as_weights(bits: Numbers, weight_type: WeightType) -> torch.Tensor:
    """The inverse of `as_bits`."""
    return torch.from_numpy(bits).view(TORCH_TYPES[weight_type])


class Shelf:
    """The versions of one process: the newest two, and whatever a session still holds.

    The newest one is not replaced while a subscriber that was told of it has yet to ask every process for it, for
    `patience_s` at most: so all processes have the same one, however far away they are.
    """

    def __init__(self, patience_s: float = 10.0) -> None:
        self._patience_s = patience_s
        self._newest: list[Version] = []
        self._held: weakref.WeakValueDictionary[int, Version] = weakref.WeakValueDictionary()
        self._told: dict[object, float] = {}
        self._changed = threading.Condition()
        self._has_ended = False

    def put(self, version: Version) -> None:
        """Add the newest version."""
        with self._changed:
            self._newest = [version, *self._newest[:1]]
            self._held[version.step] = version
            self._changed.notify_all()

    def end(self) -> None:
        """No version will come any more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """True if no version will come any more."""
        return self._has_ended

    @property
    def newest(self) -> Version | None:
        """The newest version; None before the first."""
        return self._newest[0] if self._newest else None

    def tell(self, subscriber: object, after: int) -> int | None:
        """The newest step if it is later than `after`, which `subscriber` will now ask all processes for."""
        with self._changed:
            if (newest := self.newest) is None or newest.step <= after:
                return None
            self._told[subscriber] = time.monotonic()
            return newest.step

    def settled(self, subscriber: object) -> None:
        """`subscriber` has asked all processes, or is gone."""
        with self._changed:
            self._told.pop(subscriber, None)

    @property
    def may_change(self) -> bool:
        """True if nobody is just asking for the newest version."""
        with self._changed:
            return all(time.monotonic() > told_s + self._patience_s for told_s in self._told.values())

    def take(self, step: int, limit_s: float) -> Version | None:
        """The version after `step` steps, for which another process may be ahead; None if it isn't here in time."""
        deadline_s = time.monotonic() + limit_s

        def is_known() -> bool:
            newest = self.newest
            return step in self._held or self._has_ended or (newest is not None and newest.step > step)

        with self._changed:
            self._changed.wait_for(is_known, max(0.0, deadline_s - time.monotonic()))
            return self._held.get(step)

    def find(self, step: int, sha256: str) -> Version | None:
        """The version after `step` steps if it is still here and has these bits."""
        with self._changed:
            version = self._held.get(step)
        return version if version is not None and version.sha256 == sha256 else None
