"""One TCP connection, with or without TLS, that never blocks."""

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from farpipe.engine.transport import tcp
from farpipe.engine.transport.handshake import ClosedError
from farpipe.engine.transport.tcp import delivery_rate, interrupt, packet_counts

JOINED_BYTES: Final = 64 << 10
"""Pieces that are shorter in all are joined before they are encrypted: one record instead of several."""


_WAITS: Final = (BlockingIOError, InterruptedError, ssl.SSLWantWriteError, ssl.SSLWantReadError)


class Retransmissions(NamedTuple):
    """Packets that TCP has sent again, and all that it has sent."""

    num_packets: int
    of_packets: int


def _all_records(move: Callable[[memoryview], int], view: memoryview) -> int:
    """Number of bytes that `move`, a call of TLS that takes one record of 16 KiB at most, has moved until it waits.

    An error or the end after some bytes is found again by the next call.
    """
    done = 0
    while done < len(view):
        try:
            num_bytes = move(view[done:] if done else view)
        except OSError:
            if not done:
                raise
            break
        if not num_bytes:
            break
        done += num_bytes
    return done


class Connection:
    """Sends and receives as much as can be done at once; not to be used by two threads at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._tls: Any = sock if isinstance(sock, ssl.SSLSocket) else None
        self.fd: Final = sock.fileno()
        self._renewed_s = time.monotonic()
        self._counted = Retransmissions(0, 0)
        self.is_drained = False
        """True if the last `receive_into` got all that the kernel had, so that another would find nothing."""

    def send(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Number of bytes of `pieces` that were taken; 0 when none can be at the moment.

        After a 0 the next call must begin with the same bytes.
        """
        try:
            if self._tls is None:
                return self._sock.sendmsg(pieces)
            if len(pieces) > 1 and sum(map(len, pieces)) <= JOINED_BYTES:
                return _all_records(self._tls.send, memoryview(b"".join(pieces)))
            return _all_records(self._tls.send, memoryview(pieces[0]))
        except _WAITS:
            return 0
        except ssl.SSLEOFError:
            raise ClosedError("it was closed") from None

    def receive_into(self, view: memoryview) -> int:
        """Number of bytes that came into `view`; 0: none at the moment. ClosedError when there will be none."""
        try:
            num_bytes = self._sock.recv_into(view) if self._tls is None else self._decrypt_into(view)
        except _WAITS:
            return 0
        except ssl.SSLEOFError:
            raise ClosedError("it was closed") from None
        if num_bytes == 0:
            raise ClosedError("it was closed")
        self.is_drained = num_bytes < len(view)
        return num_bytes

    def _decrypt_into(self, view: memoryview) -> int:
        """As many records as there are.

        Not by SSLSocket.recv_into: its three calls of Python for each record of 16 KiB take 5 % of all CPU of TLS.
        """
        decrypting = self._tls._sslobj
        if decrypting is None:  # as its own methods find out that it was closed
            raise ClosedError("it was closed")
        return _all_records(partial(decrypting.read, len(view)), view)

    def delivered_bytes_per_s(self) -> float:
        """The rate at which TCP has lately seen its data arrive."""
        return delivery_rate(self._sock)

    def retransmissions(self) -> Retransmissions:
        """Since the last call; nothing from a connection that has just ended."""
        before = self._counted
        with contextlib.suppress(OSError):
            self._counted = Retransmissions(*packet_counts(self._sock))
        return Retransmissions(*(now - then for now, then in zip(self._counted, before, strict=True)))

    def pace(self, bytes_per_s: int) -> None:
        """Send at most at this rate, evenly; the congestion control starts over. Does nothing once closed."""
        with contextlib.suppress(OSError):
            tcp.pace(self._sock, bytes_per_s)
            self.renew(time.monotonic(), at_once=True)

    def renew(self, now_s: float, *, at_once: bool = False) -> None:
        """Now and then: keep the congestion control from what it would do after a while, see `renew_bbr`."""
        if at_once or now_s - self._renewed_s > tcp.BBR_RENEWED_S:
            self._renewed_s = now_s
            tcp.renew_bbr(self._sock)

    def close(self) -> None:
        """Break it off."""
        interrupt(self._sock)
        with contextlib.suppress(OSError):
            self._sock.close()
