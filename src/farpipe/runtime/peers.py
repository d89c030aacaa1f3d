"""What the engine needs of the connection to the other ranks; `farpipe.transport.Transport` is one."""

from typing import Protocol

from torch import Tensor

from farpipe.transport import ChannelKind, Message, Tag
from farpipe.transport.clock import Clock


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

    def receive(self, peer: int, kind: ChannelKind, tag: Tag, *, waiting_for: str) -> Message:
        """The message with this tag; RunError when it doesn't come in time."""


class Peers(Messenger, Protocol):
    """The other ranks of a run, as one rank sees them."""

    @property
    def world_size(self) -> int:
        """Ranks of the run."""

    def exchange(self, name: str, payload: bytes, *, waiting_for: str) -> list[bytes]:
        """Every rank's payload, by rank; RunError when one doesn't come in time."""

    def post(self, peer: int, name: str, payload: bytes) -> None:
        """Put `payload` into the box `name` of `peer`."""

    def poll(self, name: str) -> list[tuple[int, bytes]]:
        """Empty the box `name`: (sender, payload) of what has come so far."""

    def paused_s(self) -> float:
        """For how long outages have kept messages from arriving, in all: limits of waits are extended by that."""

    def abort(self, reason: str) -> None:
        """Tell all ranks why the run ends; from now on every wait raises."""

    def clock_offsets(self) -> list[int]:
        """Nanoseconds to subtract from each rank's stamps to have them on rank 0's clock."""
