"""The two sides of a probe, a run of two ranks: one listens (`ProbeServer`), the other asks (`measure`).

They meet on the port of the side that listens. A connection there begins as any between ranks does, within TLS where
there are certificates, and with the proof that both know the probe's token (`handshake`); then both sides say
where they are to be reached and draw a nonce, from which follows the token of the run. From then on it is a transport
like that of training (`link_figures` measures with it), on the same port. Needs no torch.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Final, NamedTuple

from farpipe.errors import RunError
from farpipe.transport import handshake
from farpipe.transport.config import TransportConfig
from farpipe.transport.dialler import Listener
from farpipe.transport.handshake import HandshakeError, Purpose, nonce, prove, receive_before
from farpipe.transport.link_figures import CLIENT, MAX_SECONDS, SERVER, LinkFigures, answer, ask
from farpipe.transport.meeting import connect
from farpipe.transport.security.tls import Credentials, RefusedError, TlsFiles, check_address, secure
from farpipe.transport.tcp import listen, prepare

LIMIT_S: Final = 5.0
"""Longest wait for the other side at the meeting, and beyond the time of a measurement."""
RETRY_S: Final = 1.0
_PAUSE_S: Final = 0.1
_LENGTH: Final = struct.Struct("<I")
_MAX_TEXT_BYTES: Final = 64 << 10


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
                with connect(SERVER, 2, config, _Meeting(sock, SERVER, self._sides.token)) as transport:
                    answer(transport)
        except (RunError, OSError) as error:
            self._on_event(f"{host}: {error}")

    def close(self) -> None:
        """Listen no more; what is being measured goes on to its end."""
        self._guests.put(None)
        self._thread.join(LIMIT_S)


def measure(address: tuple[str, int], sides: Sides, *, seconds: float = 3.0, num_streams: int = 8) -> LinkFigures:
    """Measure the link to a ProbeServer; takes about four times `seconds`.

    RunError when nobody answers, or when one side does not let the other in.
    """
    with _reaching(address), _reach(address, sides) as sock:
        config = _config(str(sock.getsockname()[0]), 0, sides, seconds)
        with connect(CLIENT, 2, config, _Meeting(sock, CLIENT, sides.token)) as transport:
            return ask(transport, seconds=seconds, num_streams=num_streams)


class _Meeting:
    """The Meeting over `sock`, whose ends know each other. An address is the one at which the connection found it."""

    def __init__(self, sock: socket.socket, rank: int, token: bytes) -> None:
        self._sock, self._rank, self.token = sock, rank, token

    def introduce(self, introduction: str, timeout_s: float) -> list[str]:
        """Introductions of both sides; the one that asks speaks first, for the other listens for the run by then."""
        deadline_s = time.monotonic() + timeout_s
        own = {"nonce": nonce().hex(), "introduction": introduction}
        if self._rank == CLIENT:
            _send(self._sock, own)
        theirs = _receive(self._sock, deadline_s)
        if self._rank == SERVER:
            _send(self._sock, own)
        both = (theirs, own) if self._rank == CLIENT else (own, theirs)
        self.token = prove(self.token, b"run", "".join(one["nonce"] for one in both).encode())
        found = json.dumps(json.loads(theirs["introduction"]) | {"host": str(self._sock.getpeername()[0])})
        return [found, introduction] if self._rank == CLIENT else [introduction, found]


def _send(sock: socket.socket, said: dict[str, str]) -> None:
    text = json.dumps(said).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)


def _receive(sock: socket.socket, deadline_s: float) -> dict[str, str]:
    """Receive the other side's description of itself; RefusedError if that makes no sense."""
    (num_bytes,) = _LENGTH.unpack(receive_before(sock, _LENGTH.size, deadline_s))
    if num_bytes <= _MAX_TEXT_BYTES:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            said = json.loads(receive_before(sock, num_bytes, deadline_s))
            if isinstance(json.loads(said["introduction"]), dict):
                return {name: str(said[name]) for name in ("nonce", "introduction")}
    raise RefusedError("what it says makes no sense; are both sides of the same version?")


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
    sock = socket.create_connection(address, timeout=LIMIT_S)
    try:
        prepare(sock)
        if (context := Credentials(sides.tls).context(server=False)) is not None:
            dialled = str(sock.getpeername()[0])
            sock = secure(sock, context, server=False)
            check_address(sock, dialled)
        handshake.offer(sock, Purpose(CLIENT, SERVER, None), sides.token, 0)
    except HandshakeError:
        sock.close()
        raise _NotAdmittedError(
            "it has another token (give the one that it shows with --token), or is measuring for somebody else"
        ) from None
    except BaseException:
        sock.close()
        raise
    return sock


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
