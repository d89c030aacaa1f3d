"""Measures the link between two connected ranks: round trip, and the rate of a channel of one stream and of several.

The side that asks (rank 1) sends commands as JSON, the other (rank 0) obeys; both use the channels that training uses,
so the figures are what messages get, with TLS, the kernel's windows and emulated links. A rate is that of batches of
messages, each larger than the one before; the last one takes about half of the time that was given.
"""

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from farpipe.errors import RunError
from farpipe.transport.transport import Transport
from farpipe.transport.wire import ChannelKind, Tag

SERVER, CLIENT = 0, 1
"""Ranks of the side that listens and the side that asks."""
MAX_SECONDS: Final = 60.0
MAX_STREAMS: Final = 64
NUM_ECHOES: Final = 20
FIRST_BYTES: Final = 64 << 10
MAX_BYTES: Final = 1 << 44
LEAST_MESSAGES: Final = 128
"""Messages of a batch: many, for several are on their way at a time. Large batches have more, of `MESSAGE_BYTES`."""
MESSAGE_BYTES: Final = 256 << 10
GROWTH: Final = 32
"""No batch has more than so many times the bytes of the one before."""
_BLOCK: Final = bytes(MESSAGE_BYTES)
_KINDS: Final[dict[bool, ChannelKind]] = {False: "forward", True: "backward"}
"""The channel of one stream, and that of several."""


@dataclass(frozen=True)
class LinkFigures:
    """Figures of one link; "there" is from the side that asked to the one that listens. Rates in bytes/s."""

    round_trip_s: float
    """The shortest: the one that waited for nothing."""
    round_trip_median_s: float
    one_stream_there: float
    one_stream_back: float
    streams_there: float
    streams_back: float
    num_streams: int
    seconds: float

    def to_data(self) -> dict[str, Any]:
        """Data for JSON."""
        return asdict(self)


def ask(transport: Transport, *, seconds: float, num_streams: int) -> LinkFigures:
    """The figures of the link, from the side that asks; about four times `seconds`."""
    asking = _Asking(transport)
    round_trips = [asking.echo_s() for _ in range(NUM_ECHOES + 1)][1:]  # the first one opens the channels
    one_there, one_back, there, back = (
        _rate(asking, there=towards, seconds=seconds, streams=streams, round_trip_s=min(round_trips))
        for streams in (1, num_streams)
        for towards in (True, False)
    )
    asking.order("end")
    return LinkFigures(
        round_trip_s=min(round_trips),
        round_trip_median_s=statistics.median(round_trips),
        one_stream_there=one_there,
        one_stream_back=one_back,
        streams_there=there,
        streams_back=back,
        num_streams=num_streams,
        seconds=seconds,
    )


def _rate(asking: "_Asking", *, there: bool, seconds: float, streams: int, round_trip_s: float) -> float:
    """Bytes/s of the last batch; each is as large as the time allows that is left after the one before."""
    begin_s, num_bytes = time.monotonic(), FIRST_BYTES
    while True:
        batch_s, bytes_per_s = asking.batch(there, num_bytes, streams)
        left_s = seconds - (time.monotonic() - begin_s)
        if left_s <= max(0.0, batch_s):
            return bytes_per_s
        on_link_s = max(batch_s - 2 * round_trip_s, batch_s / 20)
        num_bytes = min(int(num_bytes * min(GROWTH, left_s / on_link_s)) + 1, MAX_BYTES)


class _Asking:
    """The side that asks: one command at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._number = transport, 0

    def order(self, do: str, **details: Any) -> int:
        """Send a command; its number."""
        self._number += 1
        text = json.dumps({"do": do} | details).encode()
        self._transport.send(SERVER, "control", Tag(self._number, 0, 0), text)
        return self._number

    def _answer(self, number: int) -> float:
        message = self._transport.receive(SERVER, "control", Tag(number, 0, 0), waiting_for="the answer to a command")
        return _positive(bytes(message.data))

    def echo_s(self) -> float:
        """Round trip of a small message."""
        begin_s = time.monotonic()
        self._answer(self.order("echo"))
        return time.monotonic() - begin_s

    def batch(self, there: bool, num_bytes: int, streams: int) -> tuple[float, float]:
        """(seconds from the command to the end, bytes/s) of one batch of messages."""
        begin_s = time.monotonic()
        number = self.order("take" if there else "send", bytes=num_bytes, streams=streams)
        if there:
            _send_batch(self._transport, SERVER, number, num_bytes, streams)
            bytes_per_s = self._answer(number)
        else:
            bytes_per_s = _take_batch(self._transport, SERVER, number, num_bytes, streams)
        return time.monotonic() - begin_s, bytes_per_s


def answer(transport: Transport) -> None:
    """The side that listens: obeys until the other one has ended."""
    for number in itertools.count(1):
        message = transport.receive(CLIENT, "control", Tag(number, 0, 0), waiting_for="the next command")
        do, num_bytes, streams = _parse(bytes(message.data))
        if do == "end":
            return
        value = 1.0
        if do == "take":
            value = _take_batch(transport, CLIENT, number, num_bytes, streams)
        elif do == "send":
            _send_batch(transport, CLIENT, number, num_bytes, streams)
        if do != "send":
            transport.send(CLIENT, "control", Tag(number, 0, 0), json.dumps(value).encode())


def _sizes(num_bytes: int) -> tuple[int, int]:
    """(number of messages, bytes of each) of a batch."""
    size = min(MESSAGE_BYTES, max(1, num_bytes // LEAST_MESSAGES))
    return max(LEAST_MESSAGES, num_bytes // size), size


def _send_batch(transport: Transport, peer: int, number: int, num_bytes: int, streams: int) -> None:
    kind = _KINDS[streams > 1]
    transport.open(peer, kind, streams)
    count, size = _sizes(num_bytes)
    block = memoryview(_BLOCK)[:size]
    for index in range(count):
        transport.send(peer, kind, Tag(number, 0, index), block)


def _take_batch(transport: Transport, peer: int, number: int, num_bytes: int, streams: int) -> float:
    """Bytes/s of the messages by their arrivals."""
    kind = _KINDS[streams > 1]
    count, size = _sizes(num_bytes)
    arrivals_ns = [
        transport.receive(peer, kind, Tag(number, 0, index), waiting_for="a measurement").times.arrival_ns
        for index in range(count)
    ]
    return arrival_rate(arrivals_ns, size)


def arrival_rate(arrivals_ns: Sequence[int], message_bytes: int) -> float:
    """Bytes/s of equal messages from the first one's arrival to the last one's.

    Of all, for a part may come faster than the link: what had waited behind a packet that was sent again.
    """
    between_ns = max(max(arrivals_ns) - min(arrivals_ns), 1)
    return (len(arrivals_ns) - 1) * message_bytes / between_ns * 1e9


def _parse(text: bytes) -> tuple[str, int, int]:
    """(what to do, bytes, streams) of a command; RunError for what is not one."""
    try:
        found = json.loads(text)
        do, num_bytes, streams = found["do"], found.get("bytes", 1), found.get("streams", 1)
        sound = type(num_bytes) is type(streams) is int and 0 < num_bytes <= MAX_BYTES and 0 < streams <= MAX_STREAMS
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        do, sound = "", False
    if not sound or do not in ("echo", "take", "send", "end"):
        raise RunError("the other side asks for what is not offered; are both sides of the same version?")
    return do, num_bytes, streams


def _positive(text: bytes) -> float:
    """The number that is the answer to a command; RunError for anything else."""
    try:
        value = json.loads(text)
        if type(value) in (int, float) and 0 < value < 1e18:
            return float(value)
    except (ValueError, OverflowError, RecursionError):
        pass
    raise RunError("its answer makes no sense; are both sides of the same version?")
