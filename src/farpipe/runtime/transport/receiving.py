"""The receiving end of one stream: reads chunks into the tensors that they are part of."""

import socket
import time

from farpipe.runtime.transport.inbox import Inbox
from farpipe.runtime.transport.message import Channel
from farpipe.runtime.transport.sockets import receive_exactly, receive_into
from farpipe.runtime.transport.wire import DATA_HEADER_BYTES, STAMP, unpack_chunk


def receive_messages(sock: socket.socket, channel: Channel, inbox: Inbox, max_message_bytes: int) -> None:
    """Read until the sender says that this was all.

    Raises OSError when the connection ends before, WireError for what can't be right, RunError when the run breaks.
    """
    buffer = memoryview(bytearray(DATA_HEADER_BYTES))
    while True:
        receive_into(sock, buffer)
        header = unpack_chunk(buffer, max_message_bytes)
        if header is None:
            return
        receive_into(sock, inbox.place(channel, header))
        received_ns = time.monotonic_ns()
        (end_ns,) = STAMP.unpack(receive_exactly(sock, STAMP.size))
        inbox.fill(channel, header, received_ns, end_ns)
