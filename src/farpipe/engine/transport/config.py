"""Settings of a transport: streams, limits, addresses and emulated links."""

import ipaddress
import math
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from farpipe.core.errors import InputError
from farpipe.engine.transport.passages import Links, Path, Shape
from farpipe.engine.transport.security.tls import TlsFiles
from farpipe.engine.transport.wire import ChannelKind, Tag

MAX_STREAMS: Final = 1024
SILENCE_S: Final = 5.0
"""Seconds of silence after which a connection counts as lost; both sides say something five times in this time."""


@dataclass(frozen=True)
class TransportConfig:
    """Settings of a transport; all ranks use the same but for the addresses.

    Raises InputError for values that can't work, and for an address other machines can reach while nothing is
    encrypted, unless `allow_plaintext` says that the network is trusted.
    """

    streams: int | None = None
    """TCP connections per channel; long messages are cut into fragments and use all of them. None: as many as the round
    trip and the rate of the link ask for (see `transport.tcp`)."""
    timeout_s: float = 60.0
    """Longest wait for one message, or for space to send one; outages don't count."""
    outage_s: float = 60.0
    """A broken connection is made again, and nothing is lost or doubled; one that is gone longer ends the run."""
    connect_timeout_s: float = 30.0
    """Longest wait for all ranks to meet."""
    max_message_bytes: int = 4 << 30
    """A longer message is refused, by the sender and by the receiver."""
    buffer_bytes: int = 256 << 20
    """Bound of what waits in each channel, on the sending and again on the receiving side.

    A single message may be longer, and the receiving side takes more where it would deadlock otherwise: while
    someone waits for a message that is behind those in the buffer.
    """
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0: any that is free."""
    advertise_host: str | None = None
    """Address that the others should connect to, where it is not `host` (0.0.0.0, address translation)."""
    tls: TlsFiles | None = None
    """This site's certificate and key. All connections are within TLS then; None: nothing is encrypted."""
    sites: tuple[str, ...] = ()
    """The site of every rank; with TLS a rank's certificate must be that of its site."""
    allow_plaintext: bool = False
    """Listen without TLS on an address that other machines can reach."""
    bandwidths: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(source rank, target rank) -> what its link carries, in bytes/s, for the choice of `streams` and pacing."""
    latency_s: float = 0.0
    """Latency of the slowest link, one way."""
    paced: bool = True
    """Pacing over a distance by `bandwidths`, which keeps the queue before the link empty."""
    headroom: float = 1.0
    """Factor on `bandwidths` up to which may be sent: more than 1 where a link may get faster, for what is not
    tried is not found."""
    links: Mapping[tuple[int, int], tuple[str, Shape | None]] = field(default_factory=dict)
    """(source rank, target rank) -> name of the directed link and, where it is emulated, its shape."""
    open_links: Callable[[], Links] | None = None
    """Opens emulated links that are there already and outlive the transport; None: rank 0 makes those of `links`."""
    own_paths: Callable[[ChannelKind, Tag], Path | None] | None = None
    """Return the path that a message has for itself instead of its emulated link; None: it shares that."""

    def __post_init__(self) -> None:
        sizes = ("max_message_bytes", "buffer_bytes", "headroom")
        for name in ("streams", "timeout_s", "outage_s", "connect_timeout_s", *sizes):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"transport: {name} must be more than 0, found {value}")
        if self.streams is not None and self.streams > MAX_STREAMS:
            raise InputError(f"transport: streams must be at most {MAX_STREAMS}, found {self.streams}")
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"transport: port must be from 0 to 65535, found {self.port}")
        self._check_host()
        self.link_shapes()

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this machine can connect."""
        return self._address().is_loopback

    def _address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return ipaddress.ip_address(resolve(self.host, self.port)[1][0].partition("%")[0])

    def _check_host(self) -> None:
        where = self._address()
        if where.is_unspecified and self.advertise_host is None:
            raise InputError(f"transport: other machines can't connect to {self.host}; set advertise_host")
        if not where.is_loopback and self.tls is None and not self.allow_plaintext:
            raise InputError(
                f"transport: {self.host} can be reached from other machines, and without certificates messages are not "
                "encrypted; make some (farpipe certs) and give each rank its site's folder with --certs, or, on a "
                "private network, say --allow-plaintext"
            )

    @property
    def silence_s(self) -> float:
        """A connection on which nothing was heard for so long is broken: soon enough for waits to be extended.

        The delay of the slowest link is no silence.
        """
        return min(SILENCE_S, self.outage_s / 2, max(1.0, self.timeout_s / 4)) + 2 * self.latency_s

    def site(self, rank: int) -> str | None:
        """The site of `rank`, if the sites are known."""
        return self.sites[rank] if rank < len(self.sites) else None

    def link_shapes(self) -> dict[str, Shape]:
        """The emulated links by name; InputError when two rank pairs disagree on one."""
        shapes: dict[str, Shape] = {}
        for name, shape in self.links.values():
            if shape is not None and shapes.setdefault(name, shape) != shape:
                raise InputError(f"transport: link {name!r} is given with two different shapes")
        return shapes

    def emulated_link(self, source: int, target: int) -> str | None:
        """The name of the emulated link from `source` to `target`, if there is one."""
        name, shape = self.links.get((source, target), ("", None))
        return name if shape is not None else None

    def __repr__(self) -> str:
        changed = (
            f for f in fields(self) if f.name not in ("links", "bandwidths") and getattr(self, f.name) != f.default
        )
        settings = [f"{f.name}={getattr(self, f.name)!r}" for f in changed] + [f"{len(self.links)} links"]
        return f"TransportConfig({', '.join(settings)})"


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The address family and numeric address of `host`; InputError when the name is unknown."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"transport: host {host!r} is not known here: {error}") from None
    return family, (str(address[0]), int(address[1]))
