"""The engine's interface to the other ranks; `farpipe.runtime.tensor_peers.TensorPeers` implements it."""

from typing import NamedTuple, Protocol

from torch import Tensor

from farpipe.transport import ChannelKind, LinkEvent, MessageTimes, Tag
from farpipe.transport.clock import Clock


class TensorMessage(NamedTuple):
    """A received tensor (in CPU memory, the receiver's own) and the times of its journey."""

    tensor: Tensor
    times: MessageTimes
    wire_bytes: int | None = None
    """Bytes that went over the link, if that is not the tensor as it is."""

    @property
    def num_bytes(self) -> int:
        """Bytes that went over the link."""
        return self.tensor.nbytes if self.wire_bytes is None else self.wire_bytes


class Messenger(Protocol):
    """Tensors to and from other ranks."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def clock(self) -> Clock:
        """Stamps the messages that this rank sends and receives."""

    def send(self, peer: int, kind: ChannelKind, tag: Tag, tensor: Tensor) -> None:
        """Hand `tensor` over; never waits for the receiver. Nobody may write to `tensor` afterwards."""

    def receive(self, peer: int, kind: ChannelKind, tag: Tag, *, waiting_for: str) -> TensorMessage:
        """The message with this tag; RunError when it doesn't come in time."""


class Peers(Messenger, Protocol):
    """The other ranks of a run, as one rank sees them."""

    @property
    def world_size(self) -> int:
        """Ranks of the run."""

    def exchange(self, name: str, payload: bytes, *, waiting_for: str) -> list[bytes]:
        """Every rank's payload, by rank; RunError when one doesn't come in time."""

    def post(self, peer: int, name: str, payload: bytes) -> None:
        """Put `payload` under the topic `name` of `peer`."""

    def poll(self, name: str) -> list[tuple[int, bytes]]:
        """Take what has come under the topic `name` so far: (sender, payload)."""

    def take_events(self) -> list[LinkEvent]:
        """Outages, reconnections and bursts of retransmissions on this rank's links since the last call."""

    def paused_s(self) -> float:
        """For how long outages have kept messages from arriving, in all: limits of waits are extended by that."""

    def abort(self, reason: str) -> None:
        """Tell all ranks why the run ends; from now on every wait raises."""

    def clock_offsets(self) -> list[int]:
        """Nanoseconds to subtract from each rank's stamps to have them on rank 0's clock."""
