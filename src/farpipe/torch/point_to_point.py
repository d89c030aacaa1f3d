"""Sends and receives of a group: the n-th send to a rank with a tag meets the n-th receive from there with that tag."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from farpipe.errors import InputError, RunError
from farpipe.runtime.peers import TensorPeers, describe
from farpipe.runtime.replicas.background import BackgroundThread
from farpipe.runtime.staging import Staging
from farpipe.torch.works import FutureWork, finished
from farpipe.transport import Tag
from farpipe.units import counted

KIND: Final = "forward"
DEVICES: Final = ("cpu", "cuda")
"""Kinds of devices whose tensors are sent and received."""
NO_MICROBATCH: Final = -1
"""Microbatch in the names of messages, which keeps them apart from those of a Pipeline over the same group."""
MAX_TAG: Final = (1 << 31) - 1
ENDING_S: Final = 2.0
"""Time for which a rank that destroys its group waits to hear what the others have sent and received."""
_ENDED: Final = "farpipe.torch ended"
_POLL_S: Final = 0.005
_Lane = tuple[int, int]
"""A rank and a tag of torch's."""


class PointToPoint:
    """Messages to and from the other ranks, eager: a send ends when the tensor is copied and handed over."""

    def __init__(self, peers: TensorPeers) -> None:
        self._peers, self._transport = peers, peers.transport
        self._lock = threading.Lock()
        self._sent: Counter[_Lane] = Counter()
        self._awaited: Counter[_Lane] = Counter()
        self._taken: Counter[_Lane] = Counter()
        self._senders: dict[int, BackgroundThread] = {}
        self._receivers: dict[_Lane, BackgroundThread] = {}
        self._staging: Staging | None = None

    def send(self, tensor: Tensor, peer: int, tag: int) -> FutureWork:
        """Send a copy of `tensor`; waits for nobody."""
        expect_path(tensor)
        describe(tensor)  # refuses what has no form on the wire
        number = self._number(self._sent, peer, tag)
        name, what = Tag(number, tag, NO_MICROBATCH), f"send to rank {peer}, tag {tag}"
        try:
            return FutureWork(self._hand_over(_copy(tensor), peer, name), what, self._transport.check)
        except InputError:
            self._sent[peer, tag] -= 1  # the next one is what the receiver waits for
            raise

    def _hand_over(self, copy: Tensor, peer: int, name: Tag) -> "Future[None]":
        if copy.is_cuda:
            self._staged().send(peer, KIND, name, copy)
            return finished()
        if self._transport.has_space(peer, KIND, copy.nbytes):
            self._peers.send(peer, KIND, name, copy)
            return finished()
        # a thread, for both sides may be about to send more than the buffers hold before they receive
        lane = self._senders.setdefault(peer, BackgroundThread(f"farpipe sends to {peer}"))
        return lane.start(lambda: self._peers.send(peer, KIND, name, copy))

    def receive(self, tensor: Tensor, peer: int, tag: int) -> FutureWork:
        """Fill `tensor` with the next message from `peer` with `tag`, which must have its shape and dtype."""
        expect_path(tensor)
        name = Tag(self._number(self._awaited, peer, tag), tag, NO_MICROBATCH)
        what = f"receive from rank {peer}, tag {tag}"
        target = tensor.detach()
        lane = self._receivers.setdefault((peer, tag), BackgroundThread(f"farpipe receives from {peer}"))

        def take() -> Tensor:
            found = self._peers.receive(peer, KIND, name, waiting_for=what).tensor
            self._taken[peer, tag] += 1
            if (found.dtype, found.shape) != (target.dtype, target.shape):
                raise RunError(f"{what}: rank {peer} sent {_facts(found)}, and this receive is for {_facts(target)}")
            if not target.is_cuda:
                _write(target, found)
            return found

        on_gpu: Callable[[Tensor], None] | None = (lambda found: _write(target, found)) if target.is_cuda else None
        return FutureWork(lane.start(take), what, self._transport.check, [tensor], on_gpu)

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


def _facts(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
