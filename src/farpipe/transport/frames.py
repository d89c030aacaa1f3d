"""The form of frames on a connection, and what a stream needs of whoever gives and takes them.

frame:           prefix (kind, length of head and body, frames received so far), head, body, stamp
acknowledgement: prefix alone; also a sign of life of a side that has nothing else to say
padding:         prefix and bytes without meaning, during a TCP ramp (see tcp_ramp.py); not counted, not kept
"""

import struct
from dataclasses import dataclass
from typing import Any, Final, Protocol

MAX_HEAD_BYTES: Final = 1024
MAX_BODY_BYTES: Final = 64 << 20
ACK_BYTES: Final = 256 << 10
"""After so many received bytes an acknowledgement is due at once."""
TURN_BYTES: Final = 1 << 20
"""A stream that has moved so much lets the others have their turn."""

FRAME: Final = 0xF1
ACKNOWLEDGEMENT: Final = 0xA1
PADDING: Final = 0xE1
KINDS: Final = (FRAME, ACKNOWLEDGEMENT, PADDING)
PREFIX: Final = struct.Struct("<BxHIQ")
STAMP: Final = struct.Struct("<q")


@dataclass(eq=False, slots=True)
class Frame:
    """One frame on its way out; `body` must not change until it is acknowledged."""

    head: bytes
    body: bytes | memoryview
    end_ns: int | None = None
    """Time that the stamp is to say; None: that at which the last byte was handed over."""


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
    """Count of the frames received on a stream, and whether the peer has to be told."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.untold_bytes = 0
        self.is_due = False
        """True if it is to be told now, alone if nothing else is sent."""

    def add(self, num_bytes: int) -> None:
        """Another frame, of so many bytes, is complete."""
        self.num_frames += 1
        self.untold_bytes += num_bytes
        self.is_due = self.is_due or self.untold_bytes >= ACK_BYTES

    def tell(self) -> int:
        """The count, for a prefix that is about to be sent."""
        self.is_due, self.untold_bytes = False, 0
        return self.num_frames
