"""Emulated directed links: when a message leaves and arrives, agreed on by all processes through shared memory.

A link carries one message at a time, each for bytes/bandwidth seconds, and a message arrives `latency_s` after it
has left: latency overlaps, bandwidth does not. The processes share one number per link, the time at which it is
free again. All times here are nanoseconds of CLOCK_MONOTONIC, which every process on one machine reads alike.
"""

import fcntl
import hashlib
import json
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self

from farpipe.core.errors import InputError, RunError
from farpipe.engine.transport.passages import Passage

LOCK_TIMEOUT_S = 10.0
_LOCK_RETRY_S = 20e-6
_DIGEST_BYTES = 32
_SLOT = struct.Struct("<qdd")
"""Record of one link in shared memory: the ns at which it is free, latency in s, bytes per second."""


@dataclass(frozen=True)
class LinkShape:
    """Properties of one emulated link: one-way latency in seconds, bandwidth in bytes per second."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise InputError(f"emulated link: latency_s must be finite and not negative, found {self.latency_s}")
        if not self.bandwidth_bytes_per_s > 0:  # infinity is allowed: latency alone
            raise InputError(f"emulated link: bandwidth must be more than zero, found {self.bandwidth_bytes_per_s}")

    @property
    def latency_ns(self) -> int:
        """The latency in whole nanoseconds, rounded up."""
        return math.ceil(self.latency_s * 1e9)

    def transfer_ns(self, num_bytes: int) -> int:
        """Time for which `num_bytes` occupy the link, rounded up to whole nanoseconds."""
        return math.ceil(num_bytes / self.bandwidth_bytes_per_s * 1e9)

    @classmethod
    def create(cls, shapes: Mapping[str, Self]) -> "EmulatedLinks":
        """Links of these shapes in new shared memory."""
        return EmulatedLinks.create(shapes)

    @classmethod
    def open(cls, path: str, shapes: Mapping[str, Self]) -> "EmulatedLinks":
        """The links that another process created."""
        return EmulatedLinks.open(path, shapes)


class OwnPath(NamedTuple):
    """Path that one message has for itself from `wait_s` after it is ready, whatever else is on its way."""

    wait_s: float
    shape: LinkShape

    def passage(self, num_bytes: int, ready_ns: int) -> Passage:
        """Times of a message of `num_bytes` that is ready at `ready_ns`."""
        start_ns = ready_ns + math.ceil(self.wait_s * 1e9)
        end_ns = start_ns + self.shape.transfer_ns(num_bytes)
        return Passage(start_ns, end_ns, end_ns + self.shape.latency_ns)


class EmulatedLinks:
    """The state of all emulated links of one run, shared by its processes on this machine.

    One process calls `create` and passes its `path` to the others, under which they `open` the same memory. It is
    nameless memory (memfd): nothing is left behind, however the processes end.
    """

    def __init__(self, file_descriptor: int, shapes: Mapping[str, LinkShape]) -> None:
        self._slots = {name: _DIGEST_BYTES + _SLOT.size * index for index, name in enumerate(sorted(shapes))}
        self._file_descriptor = file_descriptor
        self._thread_lock = threading.Lock()  # flock separates processes, not the threads of one
        self._memory = mmap.mmap(file_descriptor, _size_bytes(shapes))

    @classmethod
    def create(cls, shapes: Mapping[str, LinkShape]) -> Self:
        """Links that are free now, in new shared memory."""
        file_descriptor = os.memfd_create("farpipe-links")
        os.ftruncate(file_descriptor, _size_bytes(shapes))
        os.pwrite(file_descriptor, _digest(shapes), 0)
        links = cls(file_descriptor, shapes)
        for name, shape in shapes.items():
            links._write(name, 0, shape)
        return links

    @classmethod
    def open(cls, path: str, shapes: Mapping[str, LinkShape]) -> Self:
        """The links that another process created; InputError when its shapes are not `shapes`."""
        try:
            file_descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RunError(
                f"emulated links: can't open {path}: {error.strerror}; an emulated WAN needs all ranks on one machine, "
                "run by one user"
            ) from None
        if os.pread(file_descriptor, _DIGEST_BYTES, 0) != _digest(shapes):
            os.close(file_descriptor)
            raise InputError("emulated links: the ranks were given different links; start all with the same plan")
        return cls(file_descriptor, shapes)

    @property
    def path(self) -> str:
        """Path under which other processes of this user can `open` the same links."""
        return f"/proc/{os.getpid()}/fd/{self._file_descriptor}"

    def shape(self, name: str) -> LinkShape:
        """Latency and bandwidth of link `name` now."""
        return self._read(name)[1]

    def change(self, name: str, shape: LinkShape) -> None:
        """Change the link for all processes from now on; what is on its way arrives as it would have."""
        with self._locked(name):
            self._write(name, self._read(name)[0], shape)

    def _read(self, name: str) -> tuple[int, LinkShape]:
        """Time at which the link is free, and its shape."""
        free_ns, latency_s, bandwidth_bytes_per_s = _SLOT.unpack_from(self._memory, self._slots[name])
        return free_ns, LinkShape(latency_s, bandwidth_bytes_per_s)

    def _write(self, name: str, free_ns: int, shape: LinkShape) -> None:
        _SLOT.pack_into(self._memory, self._slots[name], free_ns, shape.latency_s, shape.bandwidth_bytes_per_s)

    def reserve(self, name: str, num_bytes: int) -> Passage:
        """Put a message on the link: it starts now or, if the link is taken, when it is free again."""
        with self._locked(name):
            free_ns, shape = self._read(name)
            start_ns = max(time.monotonic_ns(), free_ns)
            end_ns = start_ns + shape.transfer_ns(num_bytes)
            self._write(name, end_ns, shape)
        return Passage(start_ns, end_ns, end_ns + shape.latency_ns)

    def reserve_beside(self, name: str, num_bytes: int) -> Passage:
        """Put a small control message on the link beside the queue, as a TCP connection of its own would.

        It starts now whatever else is on the link, and what it takes of the rate is taken from those behind it.
        """
        with self._locked(name):
            free_ns, shape = self._read(name)
            start_ns = time.monotonic_ns()
            end_ns = start_ns + shape.transfer_ns(num_bytes)
            self._write(name, max(start_ns, free_ns) + end_ns - start_ns, shape)
        return Passage(start_ns, end_ns, end_ns + shape.latency_ns)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Alone on all links; a process that dies in here releases the lock, one that is stopped does not."""
        with self._thread_lock:
            give_up_s = time.monotonic() + LOCK_TIMEOUT_S
            while not self._try_lock():
                if time.monotonic() > give_up_s:
                    raise RunError(f"emulated link {name}: its lock was held for {LOCK_TIMEOUT_S:g} s by a process")
                time.sleep(_LOCK_RETRY_S)
            try:
                yield
            finally:
                fcntl.flock(self._file_descriptor, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Let go of the shared memory; it is gone when the last process has."""
        self._memory.close()
        os.close(self._file_descriptor)


def _size_bytes(shapes: Mapping[str, LinkShape]) -> int:
    return _DIGEST_BYTES + _SLOT.size * len(shapes)


def _digest(shapes: Mapping[str, LinkShape]) -> bytes:
    """Digest that is equal where two processes mean the same links."""
    text = json.dumps({name: asdict(shape) for name, shape in shapes.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
