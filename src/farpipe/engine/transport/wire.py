"""Messages and the form of their frames on a connection; what a stream needs of whoever gives and takes them.

frame:           prefix (kind, length of head and body, frames received so far), head, body, stamp
acknowledgement: prefix alone; also a sign of life of a side that has nothing else to say
padding:         prefix and bytes without meaning, during a TCP ramp (see TcpRamp); not counted, not kept

Heads are fixed binary headers that are checked before anything is allocated for what follows. The frames of a data
stream have a fragment of a message as their body and the message's description behind the header; those of a control
stream have the payload, and its name behind the header. All numbers are little-endian.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple, Protocol

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


MAX_DESCRIPTION_BYTES: Final = 256
MAX_NAME_BYTES: Final = 256
EVERYBODY: Final = -1
"""The target of a control message for all ranks."""
MAX_CONTROL_BYTES: Final = 64 << 20
"""A longer control payload is refused; data belongs on data channels."""

_DATA_MAGIC: Final = b"fpD2"
_CONTROL_MAGIC: Final = b"fpC2"
_DATA: Final = struct.Struct("<4sxxxx Q qii QQQ qqq")
_CONTROL: Final = struct.Struct("<4sBxH I ii qq")

DATA_HEADER_BYTES: Final = _DATA.size
CONTROL_HEADER_BYTES: Final = _CONTROL.size
MAX_HEAD_BYTES: Final = 1024
MAX_BODY_BYTES: Final = 64 << 20
ACK_BYTES: Final = 256 << 10
"""Number of received bytes after which an acknowledgement is due at once."""
TURN_BYTES: Final = 2 << 20
"""Bytes after which a stream lets the others have their turn."""

FRAME: Final = 0xF1
ACKNOWLEDGEMENT: Final = 0xA1
PADDING: Final = 0xE1
KINDS: Final = (FRAME, ACKNOWLEDGEMENT, PADDING)
PREFIX: Final = struct.Struct("<BxHIQ")
STAMP: Final = struct.Struct("<q")


class WireError(Exception):
    """The bytes are not what a rank of this version sends; the connection is of no more use."""


class ControlFrame(IntEnum):
    """Kind of a frame on a control connection."""

    EXCHANGE = 1
    POST = 2
    PING = 3
    PONG = 4
    ABORT = 5
    GOODBYE = 6
    DOWN = 7
    """The sender has lost a connection with some rank and tries to get it back: waiting longer is in order."""
    UP = 8
    """The connection is back."""


class FragmentHeader(NamedTuple):
    """A fragment and the message that it is part of: enough to take it in, whichever comes first."""

    number: int
    """The message's number on its channel."""
    tag: Tag
    description: bytes
    """The sender's description of the bytes; means nothing to the transport."""
    total_bytes: int
    offset: int
    fragment_bytes: int
    ready_ns: int
    start_ns: int
    """Time at which the link took the message (emulated) or the fragment (real); the sender's clock, as `ready_ns`."""
    deliver_ns: int
    """Emulated arrival on the machine's clock; 0: as soon as it is there."""

    def of_fragment(self, offset: int, fragment_bytes: int, start_ns: int) -> "FragmentHeader":
        """The header of another fragment of the message."""
        number, tag, description, total_bytes, _, _, ready_ns, _, deliver_ns = self
        return FragmentHeader(
            number, tag, description, total_bytes, offset, fragment_bytes, ready_ns, start_ns, deliver_ns
        )

    def same_message(self, other: "FragmentHeader") -> bool:
        """True if both describe one and the same message."""
        return self[:4] == other[:4] and self.deliver_ns == other.deliver_ns


class ControlHeader(NamedTuple):
    """A control frame without its name and payload."""

    kind: ControlFrame
    name_bytes: int
    payload_bytes: int
    source: int
    """The rank that sent it; the connection may be with another that has passed it on."""
    target: int
    """The rank for which it is; EVERYBODY: for all others."""
    sent_ns: int
    """The source's clock, just before the frame was handed to the kernel."""
    deliver_ns: int
    """Emulated arrival on the machine's clock; 0: as soon as it is there."""


def pack_fragment(header: FragmentHeader) -> bytes:
    """The header as bytes."""
    number, tag, description, *rest = header
    return _DATA.pack(_DATA_MAGIC, number, *tag, *rest) + description


def unpack_fragment(data: bytes | bytearray | memoryview, max_message_bytes: int) -> FragmentHeader:
    """The header in `data`; WireError for anything that can't be right."""
    if not DATA_HEADER_BYTES <= len(data) <= DATA_HEADER_BYTES + MAX_DESCRIPTION_BYTES:
        raise WireError(f"a data header of {len(data)} bytes")
    magic, number, step, stage, microbatch, total_bytes, offset, fragment_bytes, *stamps = _DATA.unpack_from(data)
    if magic != _DATA_MAGIC:
        raise WireError(f"not a data frame: {bytes(data[:8])!r}")
    if total_bytes > max_message_bytes:
        raise WireError(f"a message of {total_bytes} bytes; the limit is {max_message_bytes}")
    if offset + fragment_bytes > total_bytes:
        raise WireError(f"a fragment beyond its message: {offset} + {fragment_bytes} of {total_bytes} bytes")
    tag, description = Tag(step, stage, microbatch), bytes(data[DATA_HEADER_BYTES:])
    return FragmentHeader(number, tag, description, total_bytes, offset, fragment_bytes, *stamps)


def pack_control(header: ControlHeader) -> bytes:
    """The header as bytes."""
    return _CONTROL.pack(_CONTROL_MAGIC, *header)


def unpack_control(data: bytes | bytearray) -> ControlHeader:
    """The header in `data`; WireError for anything that can't be right."""
    if len(data) != CONTROL_HEADER_BYTES:
        raise WireError(f"a control header of {len(data)} bytes")
    magic, kind, name_bytes, payload_bytes, *rest = _CONTROL.unpack(data)
    if magic != _CONTROL_MAGIC or kind not in iter(ControlFrame):
        raise WireError(f"not a control frame: {bytes(data[:8])!r}")
    if name_bytes > MAX_NAME_BYTES or payload_bytes > MAX_CONTROL_BYTES:
        raise WireError(f"a control frame of {name_bytes} + {payload_bytes} bytes")
    return ControlHeader(ControlFrame(kind), name_bytes, payload_bytes, *rest)


@dataclass(eq=False, slots=True)
class Frame:
    """One frame on its way out; `body` must not change until it is acknowledged."""

    head: bytes
    body: bytes | memoryview
    end_ns: int | None = None
    """Time that the stamp is to say; None: that at which the last byte was handed over."""
    message: object = None
    """The message that its body is a part of, for whoever made it."""
    offset: int = 0
    """Place of the body in that."""


class FrameEndpoint(Protocol):
    """Source and destination of a stream's frames. Called under the stream's lock; must not wait."""

    def pull(self) -> Frame | None:
        """The next frame to send, if there is one."""

    def acknowledged(self, frame: Frame) -> None:
        """The peer has received it."""

    def begin(self, head: bytes, body_bytes: int) -> tuple[Any, memoryview] | None:
        """A key for the frame and where its body goes, for a frame that comes in; None: no space as yet.

        Called again with the same frame after a None, and when the connection breaks in the middle of it.
        """

    def complete(self, key: Any, end_ns: int) -> None:
        """The frame `key` is there; its stamp."""


class Receipts:
    """Count of the frames received on a stream, and whether the peer has to hear of it."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.unreported_bytes = 0
        self.is_due = False
        """True if it is to be reported now, alone if nothing else is sent."""

    def add(self, num_bytes: int) -> None:
        """Another frame, of this size, is complete."""
        self.num_frames += 1
        self.unreported_bytes += num_bytes
        self.is_due = self.is_due or self.unreported_bytes >= ACK_BYTES

    def report(self) -> int:
        """The count, for a prefix that is about to be sent."""
        self.is_due, self.unreported_bytes = False, 0
        return self.num_frames
