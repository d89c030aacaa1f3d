"""Copies between the executor and the transport where a GPU computes: the computing thread never waits for the GPU.

It runs ahead and leaves work on three streams: the default one computes, one brings tensors to the host, one brings
them to the GPU. A stream waits for another where it needs what that one makes, and a thread waits for the copies:

    sending     action | copy to page-locked memory | message put into the transport
    receiving   message in page-locked memory | copy to the GPU | action

The host can't see when an action begins and ends. Events on the computing stream can, and are read after the step.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farpipe.core.errors import FarpipeError, RunError
from farpipe.core.units import format_bytes
from farpipe.engine.executor.peers import Messenger, TensorMessage
from farpipe.engine.replicas.background import BackgroundThread
from farpipe.engine.transport import ChannelKind, Tag
from farpipe.engine.transport.buffers import Buffers
from farpipe.engine.transport.clock import Clock
from farpipe.engine.transport.inbox import Allocate

WAITING_BYTES: Final = 256 << 20
"""Least bound of the messages that wait for their copy or for room in the transport; a single one may be longer."""
_NUM_LOOKS: Final = 5
"""Number of GPU/host clock comparisons after each step; the quickest counts."""


class Stamps(Protocol):
    """Times at which actions begin and end."""

    def take(self) -> int:
        """A time stamp of now; called in the order of the actions."""

    def in_ns(self, stamps: NDArray[np.int64]) -> NDArray[np.int64]:
        """The stamps taken since the last call, in ns of the rank's clock; once per step, best when all is computed."""


class HostStamps:
    """Stamps if the host computes itself: those of its clock."""

    def __init__(self, clock: Clock) -> None:
        self.take = clock.now_ns

    def in_ns(self, stamps: NDArray[np.int64]) -> NDArray[np.int64]:
        return stamps


class _Leaving(NamedTuple):
    """A message on its way to the transport."""

    num_bytes: int
    task: Future[None]


class Staging:
    """A Messenger for tensors on this process's GPU, and the Stamps of what it computes.

    Messages leave in the order of `send`, whatever their channel. What can't be copied or sent ends the run through
    `abort`, which must break the waits of `peers`.
    """

    def __init__(
        self, peers: Messenger, abort: Callable[[str], None], cuda: Any = torch.cuda, leaving_bytes: int = 0
    ) -> None:
        """Staging of the computing thread, made when the process has its GPU.

        `cuda`: another one for tests. `leaving_bytes`: bound of the messages on their way, where more than usual are.
        """
        self.rank, self.clock = peers.rank, peers.clock
        self._peers, self._abort, self._cuda = peers, abort, cuda
        self._device = torch.device("cuda", cuda.current_device())
        self._to_host, self._to_device, self._looking = cuda.Stream(), cuda.Stream(), cuda.Stream()
        self._background = BackgroundThread(f"farpipe copies of {peers.rank}")
        self._leaving: deque[_Leaving] = deque()
        self._leaving_bytes, self._most_bytes = 0, leaving_bytes
        self._events: list[Any] = []
        self._num_stamps = 0

    def send(self, peer: int, kind: ChannelKind, tag: Tag, tensor: Tensor) -> None:
        """Copy and hand over `tensor`; waits only while the bound of messages is on its way to the transport.

        How long that can be is limited by the waits in the transport. RunError for an earlier message that failed.
        """
        tensor = tensor.detach()
        self._await_room(tensor.nbytes)
        host = host_tensor(tensor.shape, tensor.dtype, pinned=True)
        self._to_host.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._to_host):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._to_host)  # its memory is not used again before it is copied
        copied = self._to_host.record_event(self._cuda.Event(blocking=True))
        task = self._background.start(lambda: self._put(peer, kind, tag, host, copied))
        self._leaving.append(_Leaving(tensor.nbytes, task))
        self._leaving_bytes += tensor.nbytes

    def _put(self, peer: int, kind: ChannelKind, tag: Tag, host: Tensor, copied: Any) -> None:
        """Hand the message over as soon as it is copied; in the thread beside."""
        try:
            self._cuda.set_device(self._device)  # a new thread's is the machine's first
            copied.synchronize()
            self._peers.send(peer, kind, tag, host)
        except FarpipeError as error:
            self._abort(str(error))
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            fault = RunError(f"copying the {kind} message of {tag} for rank {peer} from the GPU: {reason}")
            self._abort(str(fault))
            raise fault from error

    def _await_room(self, num_bytes: int) -> None:
        """Let go of messages that have left; wait for the oldest ones where `num_bytes` more are too much."""
        limit_bytes = max(WAITING_BYTES, self._most_bytes)
        while self._leaving and (self._leaving[0].task.done() or self._leaving_bytes + num_bytes > limit_bytes):
            self._await_oldest()

    def _await_oldest(self) -> None:
        num_bytes, task = self._leaving.popleft()
        self._leaving_bytes -= num_bytes
        task.result()

    def receive(self, peer: int, kind: ChannelKind, tag: Tag, *, waiting_for: str) -> TensorMessage:
        """The message, on the GPU for what the computing stream does from now on."""
        message = self._peers.receive(peer, kind, tag, waiting_for=waiting_for)
        host = message.tensor if message.tensor.is_pinned() else message.tensor.pin_memory()
        with self._cuda.stream(self._to_device):
            tensor = host.to(self._device, non_blocking=True)
        computing = self._cuda.current_stream()
        computing.wait_stream(self._to_device)
        tensor.record_stream(computing)  # its memory belongs to the copying stream
        return message._replace(tensor=tensor, on_host=host)

    def take(self) -> int:
        """Number of a new event on the computing stream."""
        if self._num_stamps == len(self._events):
            self._events.append(self._cuda.Event(enable_timing=True))
        self._events[self._num_stamps].record()
        self._num_stamps += 1
        return self._num_stamps - 1

    def in_ns(self, stamps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Times of the stamps (ns); waits until the GPU has done what was stamped and the messages have left.

        Wrong by what the two clocks drift apart within the step, and by half of what the quickest look at both took.
        """
        while self._leaving:
            self._await_oldest()
        if self._num_stamps:
            self._events[self._num_stamps - 1].synchronize()
        event, at_ns = self._look_at_clocks()
        before_ms = [self._events[number].elapsed_time(event) for number in range(self._num_stamps)]
        self._num_stamps = 0
        return at_ns - (np.array(before_ms) * 1e6).round().astype(np.int64)[stamps]

    def _look_at_clocks(self) -> tuple[Any, int]:
        """An event and when it was: on a stream that has nothing to do, so that no look waits for what is computed."""
        looks = []
        for _ in range(_NUM_LOOKS):
            event, start_ns = self._cuda.Event(enable_timing=True), self.clock.now_ns()
            self._looking.record_event(event)
            event.synchronize()
            took_ns = self.clock.now_ns() - start_ns
            looks.append((took_ns, start_ns + took_ns // 2, event))
        _, at_ns, event = min(looks, key=lambda look: look[0])
        return event, at_ns


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """An uninitialised tensor; `pinned`: in page-locked memory, which a GPU copies to and from beside its computing.

    torch keeps page-locked memory in a pool of its own: what is let go of goes back there, and is handed out again when
    the copies that use it are over. RunError when the system gives no more.
    """
    if not pinned:
        return torch.empty(shape, dtype=dtype)
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        size = format_bytes(torch.empty(shape, dtype=dtype, device="meta").nbytes)
        raise RunError(
            f"no page-locked host memory for a message of {size}: {str(error).partition(chr(10))[0]}; run fewer ranks "
            "on this machine or make microbatches smaller"
        ) from None


def message_memory(device: str) -> Allocate:
    """The transport's memory for received messages: torch's, aligned for its kernels; for "cuda" page-locked.

    It is used again, page-locked memory by torch itself.
    """
    is_pinned = device == "cuda"

    def make(num_bytes: int) -> memoryview:
        return host_tensor((num_bytes,), torch.uint8, pinned=is_pinned).numpy().data

    return make if is_pinned else Buffers(make)


def take_page_locked(sizes: Mapping[int, int]) -> None:
    """Have torch's pool take page-locked memory for that many messages of each size in bytes, and let go of it there.

    Before the first step: the system takes a third of a second for each GB, and while a thread of the transport waits
    for it no message comes in. RunError when it gives no more.
    """
    held = [host_tensor((size,), torch.uint8, pinned=True) for size, count in sizes.items() for _ in range(count)]
    held.clear()
