"""What travels: a tensor with the tag that names it, and the times of its journey."""

from typing import Final, Literal, NamedTuple

import torch

ChannelKind = Literal["forward", "backward", "sync", "control"]
"""What a message is for. Messages of different kinds never wait for each other: each kind has its own connections."""

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
    """When a message was ready, on the link from `start_ns` to `end_ns`, and there; nanoseconds.

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
    """A received tensor (in CPU memory, the receiver's own) and the times of its journey."""

    tensor: torch.Tensor
    times: MessageTimes
    wire_bytes: int | None = None
    """What went over the link, where that is not the tensor as it is."""

    @property
    def num_bytes(self) -> int:
        """What went over the link."""
        return self.tensor.nbytes if self.wire_bytes is None else self.wire_bytes
