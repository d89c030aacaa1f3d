"""Measures the link between two machines: round trip, and the rate of one and of several TCP streams, both ways.

One side listens (`ProbeServer`), the other asks (`measure`). Every connection begins within TLS, where certificates
are used, and then both sides prove that they know the probe's token. Needs no torch.

    server -> client    nonce
    client -> server    nonce, what is wanted (mode and seconds), MAC over all
    server -> client    MAC over all
    ECHO: the client sends 8 bytes, the server sends them back, until the client closes
    UP:   the client sends blocks; the server answers the last one with how many bytes came in which slot of its clock
    DOWN: the server sends blocks
"""

import contextlib
import json
import socket
import ssl
import statistics
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from farpipe.errors import InputError, RunError
from farpipe.transport.security.proof import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, prove, receive_before
from farpipe.transport.security.tls import RefusedError, check_address, explained, secure

LIMIT_S: Final = 5.0
"""A connection that has not proven itself by then is closed; also how much longer than asked a measurement may take."""
MAX_SECONDS: Final = 60.0
MAX_STREAMS: Final = 64
MAX_CONNECTIONS: Final = 2 * MAX_STREAMS
NUM_ECHOES: Final = 20
SLOT_S: Final = 0.05
_PAUSE_S: Final = 0.1

_ECHO, _UP, _DOWN = 0, 1, 2
_WANTED: Final = struct.Struct("<8sBd")
_MAGIC: Final = b"fpprobe1"
_LENGTH: Final = struct.Struct("<I")
_MAX_ANSWER_BYTES: Final = 1 << 20
_MAX_COUNT: Final = 1 << 60
_BLOCK: Final = bytes(64 << 10)
_LAST_BLOCK: Final = b"\1" + bytes(len(_BLOCK) - 1)


class Sides(NamedTuple):
    """How connections are secured: TLS contexts (None: not at all), and the token that both sides know."""

    context: ssl.SSLContext | None
    token: bytes


@dataclass(frozen=True)
class LinkFigures:
    """What was measured; "there" is from the side that asked to the one that listens. Rates in bytes/s."""

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
        """For JSON."""
        return asdict(self)


class ProbeServer:
    """Answers probes at `host`:`port` until it is closed. `on_event` hears who came and what was turned away."""

    def __init__(self, host: str, port: int, sides: Sides, on_event: Callable[[str], None] = lambda text: None) -> None:
        self._sides, self._on_event = sides, on_event
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._sock = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise InputError(f"can't listen on {host} port {port}: {error.strerror}") from None
        self.port: Final[int] = self._sock.getsockname()[1]
        self._closing = False
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, name="farpipe probe", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._sock.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(_PAUSE_S)  # no file descriptors left, most likely
                continue
            if not self._places.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._run, args=(sock, str(address[0])), name="farpipe probe", daemon=True).start()

    def _run(self, sock: socket.socket, host: str) -> None:
        try:
            sock.settimeout(LIMIT_S)
            if self._sides.context is not None:
                sock = secure(sock, self._sides.context, server=True)
            mode, seconds = _admit(sock, self._sides.token)
            if mode == _ECHO:
                self._on_event(f"measuring for {host}")
            _serve(sock, mode, seconds)
        except RefusedError as error:
            self._on_event(f"turned away {host}: {error}")
        except OSError as error:
            self._on_event(f"{host}: {error}")
        finally:
            sock.close()
            self._places.release()

    def close(self) -> None:
        """Listen no more; what is being measured goes on to its end."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(LIMIT_S)


def _admit(sock: socket.socket, token: bytes) -> tuple[int, float]:
    """The server's side of the introduction: what is wanted. RefusedError for a stranger."""
    deadline_s = time.monotonic() + LIMIT_S
    own = nonce()
    sock.sendall(own)
    asked = receive_before(sock, NONCE_BYTES + _WANTED.size, deadline_s)
    proof = receive_before(sock, PROOF_BYTES, deadline_s)
    magic, mode, seconds = _WANTED.unpack(asked[NONCE_BYTES:])
    if not is_proof(proof, token, b"client", own + asked):
        raise RefusedError("it does not know this probe's token (give it with --token)")
    if magic != _MAGIC or mode not in (_ECHO, _UP, _DOWN) or not 0 < seconds <= MAX_SECONDS:
        raise RefusedError("it asks for what is not offered; are both sides of the same version?")
    sock.sendall(prove(token, b"server", own + asked))
    return mode, seconds


def _serve(sock: socket.socket, mode: int, seconds: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end_s = time.monotonic() + seconds + LIMIT_S
    if mode == _ECHO:
        while time.monotonic() < end_s and (data := sock.recv(64)):
            sock.sendall(data)
    elif mode == _DOWN:
        _send_blocks(sock, seconds)
    else:
        answer = json.dumps(_count_blocks(sock, end_s)).encode()
        sock.sendall(_LENGTH.pack(len(answer)) + answer)


def _send_blocks(sock: socket.socket, seconds: float) -> None:
    sock.settimeout(LIMIT_S)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        sock.sendall(_BLOCK)
    sock.sendall(_LAST_BLOCK)


def _count_blocks(sock: socket.socket, end_s: float) -> dict[int, int]:
    """Bytes that came, by slot of this machine's clock, until the last block; ends at `end_s` (monotonic) at latest."""
    counts: Counter[int] = Counter()
    buffer = memoryview(bytearray(len(_BLOCK)))
    while True:
        filled = 0
        while filled < len(buffer):
            now_s = time.monotonic()
            if now_s > end_s:
                raise TimeoutError("the other side sends longer than was agreed")
            sock.settimeout(end_s - now_s + 0.001)
            num_bytes = sock.recv_into(buffer[filled:])
            if not num_bytes:
                raise ConnectionError("it was closed in the middle of a measurement")
            counts[int(time.monotonic() / SLOT_S)] += num_bytes
            filled += num_bytes
        if buffer[0]:
            return dict(counts)


def measure(address: tuple[str, int], sides: Sides, *, seconds: float = 3.0, num_streams: int = 8) -> LinkFigures:
    """Measure the link to a ProbeServer; takes about four times `seconds`.

    RunError when nobody answers, or when one side does not let the other in.
    """
    with _reaching(address):
        round_trips = _echoes(address, sides)
        return LinkFigures(
            round_trip_s=min(round_trips),
            round_trip_median_s=statistics.median(round_trips),
            one_stream_there=_rate(address, sides, _UP, seconds, 1),
            one_stream_back=_rate(address, sides, _DOWN, seconds, 1),
            streams_there=_rate(address, sides, _UP, seconds, num_streams),
            streams_back=_rate(address, sides, _DOWN, seconds, num_streams),
            num_streams=num_streams,
            seconds=seconds,
        )


@contextlib.contextmanager
def _reaching(address: tuple[str, int]) -> Iterator[None]:
    try:
        yield
    except RefusedError as error:
        raise RunError(f"{address[0]}:{address[1]}: {error}") from None
    except OSError as error:
        where = f"{address[0]}:{address[1]}"
        raise RunError(f"{where}: {error}; start the other side with `farpipe probe --listen {where}`") from None


def _open(address: tuple[str, int], sides: Sides, mode: int, seconds: float) -> socket.socket:
    """A connection whose other side has proven itself, just before what `mode` asks for begins."""
    sock = socket.create_connection(address, timeout=LIMIT_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sides.context is not None:
            dialled = str(sock.getpeername()[0])
            sock = secure(sock, sides.context, server=False)
            check_address(sock, dialled)
        with explained():
            _introduce(sock, sides.token, _WANTED.pack(_MAGIC, mode, seconds))
    except BaseException:
        sock.close()
        raise
    return sock


def _introduce(sock: socket.socket, token: bytes, wanted: bytes) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    theirs = receive_before(sock, NONCE_BYTES, deadline_s)
    asked = nonce() + wanted
    sock.sendall(asked + prove(token, b"client", theirs + asked))
    try:
        proof = receive_before(sock, PROOF_BYTES, deadline_s)
    except ConnectionError:
        raise RefusedError("it has another token (give the one that it shows with --token)") from None
    if not is_proof(proof, token, b"server", theirs + asked):
        raise RefusedError("it does not know this probe's token")


def _echoes(address: tuple[str, int], sides: Sides) -> list[float]:
    """Round trips of a few bytes, in seconds."""
    with _open(address, sides, _ECHO, LIMIT_S) as sock:
        return [_echo(sock, number) for number in range(NUM_ECHOES)]


def _echo(sock: socket.socket, number: int) -> float:
    start_s = time.monotonic()
    sock.sendall(struct.pack("<Q", number))
    receive_before(sock, 8, start_s + LIMIT_S)
    return time.monotonic() - start_s


def _rate(address: tuple[str, int], sides: Sides, mode: int, seconds: float, num_streams: int) -> float:
    """Bytes/s that arrived over so many connections at once, once they were up to speed."""
    counts: Counter[int] = Counter()
    errors: list[Exception] = []

    def carry() -> None:
        try:
            with _open(address, sides, mode, seconds) as sock:
                counts.update(_carry(sock, mode, seconds))
        except Exception as error:  # for the thread that waits for this one
            errors.append(error)

    threads = [threading.Thread(target=carry, name="farpipe probe", daemon=True) for _ in range(num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sustained_rate(counts)


def _carry(sock: socket.socket, mode: int, seconds: float) -> dict[int, int]:
    end_s = time.monotonic() + seconds + LIMIT_S
    if mode == _DOWN:
        return _count_blocks(sock, end_s)
    _send_blocks(sock, seconds)
    (num_bytes,) = _LENGTH.unpack(receive_before(sock, _LENGTH.size, end_s + LIMIT_S))
    if num_bytes > _MAX_ANSWER_BYTES:
        raise RefusedError("its answer is too long")
    return _parse_counts(receive_before(sock, num_bytes, end_s + LIMIT_S))


def _parse_counts(answer: bytes) -> dict[int, int]:
    """Bytes by slot; RefusedError for anything else."""
    try:
        found = json.loads(answer)
        counts = {int(slot): int(num_bytes) for slot, num_bytes in found.items()}
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        counts = {}
    if not counts or not all(0 <= number <= _MAX_COUNT for number in (*counts, *counts.values())):
        raise RefusedError("its answer makes no sense; are both sides of the same version?")
    return counts


def sustained_rate(counts: dict[int, int]) -> float:
    """Bytes/s in the second half of what was counted by slot, but for the last slot, which is not a whole one."""
    first, last = min(counts), max(counts)
    middle = min((first + last) // 2, last - 1)
    if middle < first:
        return sum(counts.values()) / SLOT_S
    return sum(count for slot, count in counts.items() if middle <= slot < last) / ((last - middle) * SLOT_S)
