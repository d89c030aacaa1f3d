"""Sends and receives of a group: the n-th send to a rank with a tag meets the n-th receive from there with that tag."""

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from farpipe.core.errors import InputError, RunError
from farpipe.core.units import counted
from farpipe.engine.executor.peers import TensorPeers, describe, tensor_bytes, tensor_of
from farpipe.engine.executor.staging import Staging
from farpipe.engine.replicas.background import BackgroundThread
from farpipe.engine.transport import Message, Tag
from farpipe.engine.transport.outbox import Loan
from farpipe.torch.works import FutureWork, LentWork, finished

KIND: Final = "forward"
DEVICES: Final = ("cpu", "cuda")
"""Kinds of devices whose tensors are sent and received."""
NO_MICROBATCH: Final = -1
"""Microbatch in the names of messages, which keeps them apart from those of a Pipeline over the same group."""
MAX_TAG: Final = (1 << 31) - 1
LENT_BYTES: Final = 1 << 20
"""Least size of a tensor that is sent from the caller's memory; a shorter one is copied sooner than given back."""
ENDING_S: Final = 2.0
"""Time for which a rank that destroys its group waits to hear what the others have sent and received."""
_ENDED: Final = "farpipe.torch ended"
_POLL_S: Final = 0.005
Result = TypeVar("Result")
_Lane = tuple[int, int]
"""A rank and a tag of torch's."""


class PointToPoint:
    """Messages to and from the other ranks, eager: no send waits for its receive.

    A long tensor is sent from the caller's memory, and what a receive was posted for comes in where it belongs. One
    thread of the transport sees to all receives.
    """

    def __init__(self, peers: TensorPeers, max_message_bytes: int) -> None:
        self._peers, self._transport, self._max_bytes = peers, peers.transport, max_message_bytes
        self._lock = threading.Lock()
        self._sent: Counter[_Lane] = Counter()
        self._awaited: Counter[_Lane] = Counter()
        self._taken: Counter[_Lane] = Counter()
        self._senders: dict[int, BackgroundThread] = {}
        self._receives: dict[_Lane, deque[Tag]] = {}
        """Messages that each lane waits for; the first one's time runs."""
        self._staging: Staging | None = None

    def send(self, tensor: Tensor, peer: int, tag: int) -> FutureWork:
        """Send `tensor`, which must not be written to before `wait`; returns at once."""
        expect_path(tensor)
        describe(tensor)  # refuses what has no form on the wire
        number = self._number(self._sent, peer, tag)
        name, what = Tag(number, tag, NO_MICROBATCH), f"send to rank {peer}, tag {tag}"
        try:
            if tensor.nbytes > self._max_bytes:
                raise InputError(
                    f"{what}: {_facts(tensor)} has {tensor.nbytes:,} bytes, more than the {self._max_bytes:,} of "
                    "max_message_bytes (FARPIPE_MAX_MESSAGE_BYTES); send parts, or set more on all ranks"
                )
            if tensor.nbytes >= LENT_BYTES and is_plain(tensor):
                return LentWork(self._lend(tensor, peer, name), what, self._transport.check)
            return FutureWork(self._hand_over(_copy(tensor), peer, name), what, self._transport.check)
        except InputError:
            self._sent[peer, tag] -= 1  # the next one is what the receiver waits for
            raise

    def _hand_over(self, copy: Tensor, peer: int, name: Tag) -> "Future[None]":
        if copy.is_cuda:
            self._staged().send(peer, KIND, name, copy)
            return finished(None)
        return self._put(peer, copy.nbytes, lambda: self._peers.send(peer, KIND, name, copy))

    def _lend(self, tensor: Tensor, peer: int, name: Tag) -> "Future[Loan]":
        data, description = tensor_bytes(tensor), describe(tensor)
        return self._put(peer, len(data), lambda: self._transport.lend(peer, KIND, name, data, description))

    def _put(self, peer: int, num_bytes: int, put: Callable[[], Result]) -> "Future[Result]":
        if self._transport.has_space(peer, KIND, num_bytes):
            return finished(put())
        # a thread, for both sides may be about to send more than the buffers hold before they receive
        return self._senders.setdefault(peer, BackgroundThread(f"farpipe sends to {peer}")).start(put)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> FutureWork:
        """Fill `tensor` with the next message from `peer` with `tag`, which must have its shape and dtype."""
        expect_path(tensor)
        name = Tag(self._number(self._awaited, peer, tag), tag, NO_MICROBATCH)
        what = f"receive from rank {peer}, tag {tag}"
        target, future = tensor.detach(), Future[Tensor]()
        memory = tensor_bytes(target) if is_plain(target) and target.nbytes else None

        def accept(num_bytes: int, description: bytes) -> memoryview | None:
            return memory if num_bytes == target.nbytes and description == describe(target) else None

        def end(done: "Future[Message]") -> None:
            try:
                data, description, _ = done.result()
                self._taken[peer, tag] += 1
                future.set_result(target if data is memory else _fill(target, data, description, what, peer))
            except Exception as error:
                future.set_exception(error)
            self._limit_next((peer, tag), name)

        on_gpu: Callable[[Tensor], None] | None = (lambda found: _write(target, found)) if target.is_cuda else None
        expected = self._transport.expect(peer, KIND, name, waiting_for=what, accept=accept)
        self._queue_up((peer, tag), name)
        expected.add_done_callback(end)
        return FutureWork(future, what, self._transport.check, [tensor], on_gpu)

    def _queue_up(self, lane: _Lane, name: Tag) -> None:
        """A receive may take the group's limit from when those of its lane before it are done."""
        with self._lock:
            waiting = self._receives.setdefault(lane, deque())
            waiting.append(name)
            is_first = len(waiting) == 1
        if is_first:
            self._transport.limit(lane[0], KIND, name)

    def _limit_next(self, lane: _Lane, done: Tag) -> None:
        with self._lock:
            waiting = self._receives[lane]
            waiting.remove(done)
            following = waiting[0] if waiting else None
        if following is not None:
            self._transport.limit(lane[0], KIND, following)

    def _number(self, counts: "Counter[_Lane]", peer: int, tag: int) -> int:
        if not 0 <= tag <= MAX_TAG:
            raise InputError(f"a tag must be from 0 to {MAX_TAG}, found {tag}")
        if peer == self._peers.rank or not 0 <= peer < self._peers.world_size:
            raise InputError(
                f"rank {self._peers.rank} of {self._peers.world_size} can't send to or receive from {peer}"
            )
        with self._lock:
            counts[peer, tag] += 1
            return counts[peer, tag] - 1

    def _staged(self) -> Staging:
        with self._lock:
            if self._staging is None:
                self._staging = Staging(self._peers, self._peers.abort)
            return self._staging

    def end(self) -> list[str]:
        """Hear from the other ranks what they have sent and received, ENDING_S at most; a line for every difference.

        The lines are about messages between this rank and those that end as well.
        """
        mine = {peer: json.dumps([_by_tag(self._sent, peer), _by_tag(self._taken, peer)]) for peer in self._others()}
        for peer, text in mine.items():
            self._transport.post(peer, _ENDED, text.encode())
        found: dict[int, Any] = {}
        deadline_s = time.monotonic() + ENDING_S
        while len(found) < len(mine) and time.monotonic() < deadline_s:
            found |= {peer: json.loads(payload) for peer, payload in self._transport.poll(_ENDED)}
            time.sleep(_POLL_S)
        return [line for peer in sorted(found) for line in self._differences(peer, *found[peer])]

    def _others(self) -> list[int]:
        return [peer for peer in range(self._peers.world_size) if peer != self._peers.rank]

    def _differences(self, peer: int, sent: dict[str, int], taken: dict[str, int]) -> Iterator[str]:
        for (other, tag), number in sorted(self._sent.items()):
            if other == peer and (missing := number - taken.get(str(tag), 0)) > 0:
                yield f"rank {peer} never received {counted(missing, 'message')} that this rank sent with tag {tag}"
        for name, number in sent.items():
            if (missing := number - self._taken[peer, int(name)]) > 0:
                yield f"this rank never received {counted(missing, 'message')} that rank {peer} sent with tag {name}"


def expect_path(tensor: Tensor) -> None:
    """InputError for a tensor whose values can't be brought to other processes or be filled from there."""
    if tensor.device.type not in DEVICES:
        raise InputError(
            f"farpipe has no path for tensors on {tensor.device.type!r}; it sends from and receives to "
            f"{' and '.join(DEVICES)}: copy the tensor there"
        )
    if isinstance(tensor, DTensor):
        raise InputError("a DTensor is many processes' together; send and receive what its to_local() gives")


def _by_tag(counts: "Counter[_Lane]", peer: int) -> dict[int, int]:
    return {tag: number for (other, tag), number in counts.items() if other == peer}


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy, which the caller can't write to."""
    plain = tensor.detach().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


def _write(target: Tensor, found: Tensor) -> None:
    with torch.no_grad():
        target.copy_(found, non_blocking=True)


def is_plain(tensor: Tensor) -> bool:
    """True if the memory of the tensor is its values in their order."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _fill(target: Tensor, data: memoryview, description: bytes, what: str, peer: int) -> Tensor:
    """The tensor in a message, copied to `target` unless a GPU has that; RunError where it is for another."""
    try:
        found = tensor_of(data, description)
    except ValueError as error:
        raise RunError(f"{what}: the message from rank {peer} is no tensor: {error}") from None
    if (found.dtype, found.shape) != (target.dtype, target.shape):
        raise RunError(f"{what}: rank {peer} sent {_facts(found)}, and this receive is for {_facts(target)}")
    if not target.is_cuda:
        _write(target, found)
    return found


def _facts(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
