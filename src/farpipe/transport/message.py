"""Messages: bytes with the tag that names them, and the times of their journey."""

from typing import Final, Literal, NamedTuple

ChannelKind = Literal["forward", "backward", "sync", "control"]
"""Purpose of a message. Messages of different kinds never wait for each other: each kind has its own connections."""

CHANNEL_KINDS: Final[tuple[ChannelKind, ...]] = ("forward", "backward", "sync", "control")


class Tag(NamedTuple):
    """The name of a message among those of one kind from one rank; each is sent once and received once."""

    step: int
    stage: int
    """The producer's stage."""
    microbatch: int

    def __str__(self) -> str:
        return f"step {self.step}, stage {self.stage}, microbatch {self.microbatch}"


class Channel(NamedTuple):
    """The messages of one kind between this rank and a peer, in one direction."""

    peer: int
    kind: ChannelKind


class MessageTimes(NamedTuple):
    """Times at which a message was ready, on the link from `start_ns` to `end_ns`, and there; nanoseconds.

    The first three are on the sender's clock, `arrival_ns` on the receiver's (see `Transport.clock_offsets`).

    On a real link `start_ns` is when its first byte was handed to the kernel, `end_ns` when the kernel had taken the
    last one (which it may still hold for a while), `arrival_ns` when the last byte was received. On an emulated link
    they are the emulated link's; should this machine be too busy to deliver in time, `arrival_ns` says when it did.
    """

    ready_ns: int
    start_ns: int
    end_ns: int
    arrival_ns: int


class Message(NamedTuple):
    """A received message: its bytes, in memory of the receiver's own, and the times of its journey."""

    data: memoryview
    description: bytes
    """The sender's description of the bytes, such as a tensor's dtype and shape."""
    times: MessageTimes


def as_bytes(data: bytes | bytearray | memoryview) -> memoryview:
    """The memory of a contiguous buffer as bytes, without a copy."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
