"""The two sides of a probe, a run of two ranks: one listens (`ProbeServer`), the other asks (`measure`).

They meet on the port of the side that listens (`pair`). Needs no torch.

The side that asks (rank 1) sends commands as JSON, the other (rank 0) obeys; both use the channels that training uses,
so the figures are what messages get, with TLS, the kernel's windows and emulated links. A rate is that of batches of
messages, each larger than the one before; the last one takes about half of the time that was given.
"""

import contextlib
import itertools
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from farpipe.core.errors import RunError
from farpipe.engine.transport import handshake
from farpipe.engine.transport.config import TransportConfig
from farpipe.engine.transport.dialler import Listener
from farpipe.engine.transport.handshake import HandshakeError, Purpose
from farpipe.engine.transport.meeting import connect
from farpipe.engine.transport.message_probe import (
    COMMANDS,
    MAX_MESSAGE_BYTES,
    MessageFigures,
    Messages,
    answer_message,
    ask_messages,
    plain_server,
    send_batch,
    take_batch,
)
from farpipe.engine.transport.pair import LIMIT_S, PairMeeting, dial
from farpipe.engine.transport.security.tls import Credentials, RefusedError, TlsFiles
from farpipe.engine.transport.tcp import listen
from farpipe.engine.transport.transport import Transport
from farpipe.engine.transport.wire import Tag

SERVER, CLIENT = 0, 1
"""Ranks of the side that listens and the side that asks."""
MAX_SECONDS: Final = 60.0
MAX_STREAMS: Final = 64
NUM_ECHOES: Final = 20
FIRST_BYTES: Final = 64 << 10
MAX_BYTES: Final = 1 << 44
LEAST_SHARE: Final = 0.5
"""Share of one stream's rate that several streams get at least: they share the same link."""
ATTEMPTS: Final = 3
"""Measurements of several streams, until one is credible."""
GROWTH: Final = 32
"""Largest ratio between the bytes of a batch and of the one before."""


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
    messages: MessageFigures | None = None
    """Of single messages; None where none were asked for."""

    @property
    def of_link(self) -> tuple[float, float]:
        """Rates of the link, there and back: one stream's, or that of several where these get more."""
        return max(self.one_stream_there, self.streams_there), max(self.one_stream_back, self.streams_back)

    def to_data(self) -> dict[str, Any]:
        """Data for JSON; `there` and `back` are the link's."""
        return asdict(self) | dict(zip(("there", "back"), self.of_link, strict=True))


def ask(
    transport: Transport, *, seconds: float, num_streams: int, host: str = "", messages: Messages | None = None
) -> LinkFigures:
    """The figures of the link, from the side that asks; about four times `seconds`, and what `messages` take."""
    asking = _Asking(transport)
    round_trips = [asking.echo_s() for _ in range(NUM_ECHOES + 1)][1:]  # the first one opens the channels
    shortest_s = min(round_trips)

    def rate(streams: int, towards: bool, least: float = 0.0) -> float:
        """The best rate of ATTEMPTS measurements, or of fewer if it is `least`."""
        found = [-1.0]
        while max(found) < least and len(found) <= ATTEMPTS:
            found.append(_rate(asking, there=towards, seconds=seconds, streams=streams, round_trip_s=shortest_s))
        return max(found)

    one_there, one_back = rate(1, True), rate(1, False)
    there, back = rate(num_streams, True, LEAST_SHARE * one_there), rate(num_streams, False, LEAST_SHARE * one_back)
    how = {"round_trip_s": shortest_s, "streams": num_streams}
    single = messages and ask_messages(transport, asking.order, asking.answer, host, messages, **how)
    asking.order("end")
    median_s = statistics.median(round_trips)
    return LinkFigures(shortest_s, median_s, one_there, one_back, there, back, num_streams, seconds, single)


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

    def answer(self, number: int) -> float:
        """The number that answers a command."""
        message = self._transport.receive(SERVER, "control", Tag(number, 0, 0), waiting_for="the answer to a command")
        return _positive(bytes(message.data))

    def echo_s(self) -> float:
        """Round trip of a small message."""
        begin_s = time.monotonic()
        self.answer(self.order("echo"))
        return time.monotonic() - begin_s

    def batch(self, there: bool, num_bytes: int, streams: int) -> tuple[float, float]:
        """(seconds from the command to the end, bytes/s) of one batch of messages."""
        begin_s = time.monotonic()
        number = self.order("take" if there else "send", bytes=num_bytes, streams=streams)
        if there:
            send_batch(self._transport, SERVER, number, num_bytes, streams)
            bytes_per_s = self.answer(number)
        else:
            bytes_per_s = take_batch(self._transport, SERVER, number, num_bytes, streams)
        return time.monotonic() - begin_s, bytes_per_s


def answer(transport: Transport, host: str = "127.0.0.1") -> None:
    """The side that listens, at `host`: obeys until the other one has ended."""
    for number in itertools.count(1):
        message = transport.receive(CLIENT, "control", Tag(number, 0, 0), waiting_for="the next command")
        do, num_bytes, streams = _parse(bytes(message.data))
        if do == "end":
            return
        value = 1.0
        if do == "plain":
            with plain_server(host, num_bytes) as port:
                _reply(transport, number, port)
            continue
        if do in COMMANDS:
            answer_message(transport, CLIENT, number, do, num_bytes, streams)
        if do == "take":
            value = take_batch(transport, CLIENT, number, num_bytes, streams)
        elif do == "send":
            send_batch(transport, CLIENT, number, num_bytes, streams)
        if do not in ("send", "send-one"):
            _reply(transport, number, value)


def _reply(transport: Transport, number: int, value: float) -> None:
    transport.send(CLIENT, "control", Tag(number, 0, 0), json.dumps(value).encode())


def _parse(text: bytes) -> tuple[str, int, int]:
    """(what to do, bytes, streams) of a command; RunError for what is not one."""
    try:
        found = json.loads(text)
        do, num_bytes, streams = found["do"], found.get("bytes", 1), found.get("streams", 1)
        sound = type(num_bytes) is type(streams) is int and 0 < num_bytes <= MAX_BYTES and 0 < streams <= MAX_STREAMS
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        do, sound = "", False
    if do in COMMANDS:
        sound = sound and num_bytes <= MAX_MESSAGE_BYTES
    if not sound or do not in ("echo", "take", "send", "end", *COMMANDS):
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


RETRY_S: Final = 1.0
_PAUSE_S: Final = 0.1


class Sides(NamedTuple):
    """Security of a probe: this side's certificate (None: not encrypted), and the token that both sides know."""

    tls: TlsFiles | None
    token: bytes


class ProbeServer:
    """Answers probes at `host`:`port`, one after the other, until it is closed.

    `on_event` hears who came and what was turned away. InputError when the port is taken.
    """

    def __init__(self, host: str, port: int, sides: Sides, on_event: Callable[[str], None] = lambda text: None) -> None:
        self._host, self._sides, self._on_event = host, sides, on_event
        self._credentials = Credentials(sides.tls)
        sock = listen(_config(host, port, sides))
        self.port: Final[int] = sock.getsockname()[1]
        self._guests: SimpleQueue[socket.socket | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(sock,), name="farpipe probe", daemon=True)
        self._thread.start()

    def _run(self, sock: socket.socket) -> None:
        while True:
            listener = Listener(sock, self._sides.token, self._credentials, self._admit, self._on_event)
            guest = self._guests.get()
            listener.close(time.monotonic() + LIMIT_S, but=guest)
            if guest is None:
                return
            self._measure(guest)
            sock = listen(_config(self._host, self.port, self._sides))

    def _admit(self, purpose: Purpose, sock: socket.socket, num_received: int) -> bool:
        """Take in somebody who knows the token, as a Listener's Serve."""
        handshake.welcome(sock, 0)
        self._guests.put(sock)
        return True

    def _measure(self, sock: socket.socket) -> None:
        host = "somebody"
        try:
            with sock:
                host = str(sock.getpeername()[0])
                self._on_event(f"measuring for {host}")
                config = _config(self._host, self.port, self._sides, MAX_SECONDS)
                with connect(SERVER, 2, config, PairMeeting(sock, SERVER, self._sides.token, asks=False)) as transport:
                    answer(transport, self._host)
        except (RunError, OSError) as error:
            self._on_event(f"{host}: {error}")

    def close(self) -> None:
        """Listen no more; what is being measured goes on to its end."""
        self._guests.put(None)
        self._thread.join(LIMIT_S)


def measure(
    address: tuple[str, int],
    sides: Sides,
    *,
    seconds: float = 3.0,
    num_streams: int = 8,
    messages: Messages | None = None,
) -> LinkFigures:
    """Measure the link to a ProbeServer; takes about four times `seconds`, and what `messages` take.

    RunError when there is no answer, or when one side refuses the other.
    """
    with _reaching(address), _reach(address, sides) as sock:
        config = _config(str(sock.getsockname()[0]), 0, sides, seconds)
        with connect(CLIENT, 2, config, PairMeeting(sock, CLIENT, sides.token, asks=True)) as transport:
            return ask(transport, seconds=seconds, num_streams=num_streams, host=address[0], messages=messages)


@contextlib.contextmanager
def _reaching(address: tuple[str, int]) -> Iterator[None]:
    where = f"{address[0]}:{address[1]}"
    try:
        yield
    except (RefusedError, RunError) as error:
        raise RunError(f"{where}: {error}") from None
    except OSError as error:
        raise RunError(f"{where}: {error}; start the other side with `farpipe probe --listen {where}`") from None


class _NotAdmittedError(RefusedError):
    """The other side knows another token, or is at the end of a measurement, whose run has a token of its own."""


def _reach(address: tuple[str, int], sides: Sides) -> socket.socket:
    """The connection of `_dial`, tried again for a moment: a measurement before this one may still be ending."""
    deadline_s, pause_s = time.monotonic() + RETRY_S, _PAUSE_S
    while True:
        try:
            return _dial(address, sides)
        except OSError as error:
            is_final = isinstance(error, RefusedError) and not isinstance(error, _NotAdmittedError)
            if is_final or time.monotonic() + pause_s > deadline_s:
                raise
            time.sleep(pause_s)
            pause_s *= 2


def _dial(address: tuple[str, int], sides: Sides) -> socket.socket:
    """The first connection, whose other side has proven itself."""
    try:
        return dial(address, sides.tls, sides.token, Purpose(CLIENT, SERVER, None))
    except HandshakeError:
        raise _NotAdmittedError(
            "it has another token (give the one that it shows with --token), or is measuring for somebody else"
        ) from None


def _config(host: str, port: int, sides: Sides, seconds: float = 0.0) -> TransportConfig:
    return TransportConfig(
        host=host,
        port=port,
        advertise_host=host,
        tls=sides.tls,
        allow_plaintext=True,  # who has no certificates has said so, see `farpipe probe`
        timeout_s=2 * seconds + LIMIT_S,
        outage_s=LIMIT_S,
        connect_timeout_s=LIMIT_S,
    )
