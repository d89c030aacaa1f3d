"""Messages of a probe: batches, whose arrivals are a rate, and single ones after idle gaps, as a pipeline sends them.

A rate of many messages says nothing of one that comes after a pause (docs/reference/cost-model.md, section 10). The
side that asks takes the time of both directions: a message there ends with a short answer, one back begins with a short
command, so each takes a round trip besides its bytes. Plain TCP is one connection of its own, with the hosts'
congestion control and buffers, as gloo's; it reaches a port that the other side opens for it, and has neither keys nor
contents.
"""

import contextlib
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np

from farpipe.core.step import Problem
from farpipe.engine.transport.transport import Transport
from farpipe.engine.transport.wire import ChannelKind, Tag

NUM_MESSAGES: Final = 8
NUM_LEFT_OUT: Final = 3
"""First messages, in which windows still grow."""
KIND: Final[ChannelKind] = "backward"
COMMANDS: Final = ("take-one", "send-one", "plain")
MAX_MESSAGE_BYTES: Final = 1 << 30
LIMIT_S: Final = 5.0
_PIECE_BYTES: Final = 1 << 18
_THERE, _BACK = b"t", b"b"


LEAST_MESSAGES: Final = 128
"""Messages of a batch: many, for several are on their way at a time. Large batches have more, of `MESSAGE_BYTES`."""
MESSAGE_BYTES: Final = 256 << 10
_BLOCK: Final = bytes(MESSAGE_BYTES)
_KINDS: Final[dict[bool, ChannelKind]] = {False: "forward", True: "backward"}
"""The channel of one stream, and that of several."""


class Messages(NamedTuple):
    """Messages to measure: the bytes of each, and the pause before it."""

    num_bytes: int
    gap_s: float

    @classmethod
    def of(cls, problem: Problem) -> Self | None:
        """The largest ones between sites, and the pause that the slowest rank's computing leaves between two of them at
        the link's rate; None where sites send each other nothing."""
        hops = [transfer for hop in problem.hops if hop for transfer in (hop.forward, hop.backward) if transfer]
        far = [(float(np.max(hop.bytes)), name) for hop in hops for name in hop.links if problem.between_sites[name]]
        if not far:
            return None
        num_bytes, name = max(far)
        work_s = sum(problem.table(kind).mean(axis=1) for kind in ("forward_s", "input_grad_s", "weight_grad_s"))
        of_ranks = np.bincount([stage.rank for stage in problem.stages], weights=work_s)
        return cls(int(num_bytes), max(0.0, float(of_ranks.max()) - problem.links[name].occupied_s(num_bytes)))


@dataclass(frozen=True)
class MessageFigures:
    """Goodput of messages in bytes/s, medians: bytes over what they took beyond a round trip."""

    num_bytes: int
    gap_s: float
    there: float
    back: float
    plain_there: float | None
    """The same over plain TCP; None where no second connection reached the other side."""
    plain_back: float | None


def ask_messages(
    transport: Transport, order: Callable[..., int], answer: Callable[[int], float], host: str, of: Messages, **how: Any
) -> MessageFigures:
    """Figures of the messages `of`, from the side that asks. `how`: `round_trip_s` and `streams`."""
    block, round_trip_s, streams = bytes(of.num_bytes), how["round_trip_s"], how["streams"]
    transport.open(0, KIND, streams)

    def there() -> None:
        number = order("take-one", bytes=of.num_bytes, streams=streams)
        transport.send(0, KIND, Tag(number, 0, 0), memoryview(block))
        answer(number)

    def back() -> None:
        number = order("send-one", bytes=of.num_bytes, streams=streams)
        transport.receive(0, KIND, Tag(number, 0, 0), waiting_for="a message")

    sent, returned = (_goodput(of, round_trip_s, once) for once in (there, back))
    plain: Sequence[float | None] = (None, None)
    with contextlib.suppress(OSError):
        port = int(answer(order("plain", bytes=of.num_bytes)))
        with socket.create_connection((host, port), timeout=LIMIT_S) as sock:
            sock.settimeout(LIMIT_S + 2 * of.num_bytes / 1e5)
            plain = [_goodput(of, round_trip_s, once) for once in _over(sock, of.num_bytes, block)]
    return MessageFigures(of.num_bytes, of.gap_s, sent, returned, *plain)


def _goodput(of: Messages, round_trip_s: float, once: Callable[[], None]) -> float:
    took_s = []
    for _ in range(NUM_MESSAGES):
        time.sleep(of.gap_s)
        begin_s = time.monotonic()
        once()
        took_s.append(time.monotonic() - begin_s)
    warm_s = statistics.median(took_s[NUM_LEFT_OUT:])
    return of.num_bytes / max(warm_s - round_trip_s, warm_s / 20)


def _over(sock: socket.socket, num_bytes: int, block: bytes) -> Iterator[Callable[[], None]]:
    def there() -> None:
        sock.sendall(_THERE)
        sock.sendall(block)
        _take(sock, 1)

    def back() -> None:
        sock.sendall(_BACK)
        _take(sock, num_bytes)

    yield there
    yield back


def answer_message(transport: Transport, peer: int, number: int, do: str, num_bytes: int, streams: int) -> None:
    """The other side of one message over the transport."""
    transport.open(peer, KIND, streams)
    if do == "send-one":
        transport.send(peer, KIND, Tag(number, 0, 0), memoryview(bytes(num_bytes)))
    else:
        transport.receive(peer, KIND, Tag(number, 0, 0), waiting_for="a message")


@contextlib.contextmanager
def plain_server(host: str, num_bytes: int) -> Iterator[int]:
    """The port of the other side of plain messages, which are answered when the context ends."""
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(LIMIT_S)
        yield int(listener.getsockname()[1])
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(2 * LIMIT_S + 2 * num_bytes / 1e5)
                for _ in range(2 * NUM_MESSAGES):
                    if _take(sock, 1) == _BACK:
                        sock.sendall(bytes(num_bytes))
                    else:
                        _take(sock, num_bytes)
                        sock.sendall(_THERE)


def _take(sock: socket.socket, num_bytes: int) -> bytes:
    """Receive so many bytes; the first of them. OSError when the other side has ended."""
    buffer, first = memoryview(bytearray(min(num_bytes, _PIECE_BYTES))), b""
    while num_bytes:
        count = sock.recv_into(buffer, min(num_bytes, len(buffer)))
        if not count:
            raise ConnectionResetError("the other side has ended")
        first = first or bytes(buffer[:1])
        num_bytes -= count
    return first


def sizes(num_bytes: int) -> tuple[int, int]:
    """(number of messages, bytes of each) of a batch."""
    size = min(MESSAGE_BYTES, max(1, num_bytes // LEAST_MESSAGES))
    return max(LEAST_MESSAGES, num_bytes // size), size


def send_batch(transport: Transport, peer: int, number: int, num_bytes: int, streams: int) -> None:
    """Send so many bytes as messages."""
    kind = _KINDS[streams > 1]
    transport.open(peer, kind, streams)
    count, size = sizes(num_bytes)
    block = memoryview(_BLOCK)[:size]
    for index in range(count):
        transport.send(peer, kind, Tag(number, 0, index), block)


def take_batch(transport: Transport, peer: int, number: int, num_bytes: int, streams: int) -> float:
    """Bytes/s of the messages by their arrivals."""
    kind = _KINDS[streams > 1]
    count, size = sizes(num_bytes)
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
