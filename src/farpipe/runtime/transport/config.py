"""How a transport is set up: streams, limits, addresses and emulated links."""

import ipaddress
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from farpipe.emulate import LinkShape
from farpipe.errors import InputError


@dataclass(frozen=True)
class TransportConfig:
    """Settings of a transport; all ranks use the same but for the addresses.

    Raises InputError for values that can't work, and for an address other machines can reach while nothing is
    encrypted, unless `allow_plaintext` says that the network is trusted.
    """

    streams: int = 4
    """TCP connections per channel; long messages are cut into chunks and use all of them."""
    timeout_s: float = 60.0
    """Longest wait for one message, or for room to send one."""
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
    allow_plaintext: bool = False
    """Listen on an address that other machines can reach although nothing is encrypted."""
    socket_buffer_bytes: int | None = None
    """Kernel buffer per TCP connection and direction; None: the kernel adapts it (up to tcp_wmem and tcp_rmem)."""
    congestion_control: str | None = None
    """TCP's algorithm; None: the system's default. "bbr" also keeps its rate when a connection was idle for a while,
    where the others start slowly again unless the system's tcp_slow_start_after_idle is off."""
    links: Mapping[tuple[int, int], tuple[str, LinkShape | None]] = field(default_factory=dict)
    """(source rank, target rank) -> name of the directed link and, where it is emulated, its shape."""

    def __post_init__(self) -> None:
        for name in ("streams", "timeout_s", "connect_timeout_s", "max_message_bytes", "buffer_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"transport: {name} must be more than 0, found {value}")
        if self.streams > 1024:
            raise InputError(f"transport: streams must be at most 1024, found {self.streams}")
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"transport: port must be from 0 to 65535, found {self.port}")
        self._check_host()
        self.link_shapes()

    def _check_host(self) -> None:
        address = resolve(self.host, self.port)[1][0]
        where = ipaddress.ip_address(address.partition("%")[0])
        if where.is_unspecified and self.advertise_host is None:
            raise InputError(f"transport: nobody can connect to {self.host}; say which address in advertise_host")
        if not where.is_loopback and not self.allow_plaintext:
            raise InputError(
                f"transport: {self.host} can be reached from other machines, and messages are not encrypted yet; "
                "use a tunnel (WireGuard, ssh) or a private network and set allow_plaintext, or listen on 127.0.0.1"
            )

    def link_shapes(self) -> dict[str, LinkShape]:
        """The emulated links by name; InputError when two rank pairs disagree on one."""
        shapes: dict[str, LinkShape] = {}
        for name, shape in self.links.values():
            if shape is not None and shapes.setdefault(name, shape) != shape:
                raise InputError(f"transport: link {name!r} is given with two different shapes")
        return shapes

    def emulated_link(self, source: int, target: int) -> str | None:
        """The name of the emulated link from `source` to `target`, if there is one."""
        name, shape = self.links.get((source, target), ("", None))
        return name if shape is not None else None

    def __repr__(self) -> str:
        changed = (f for f in fields(self) if f.name != "links" and getattr(self, f.name) != f.default)
        settings = [f"{f.name}={getattr(self, f.name)!r}" for f in changed] + [f"{len(self.links)} links"]
        return f"TransportConfig({', '.join(settings)})"


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The address family and numeric address of `host`; InputError when the name is unknown."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"transport: host {host!r} is not known here: {error}") from None
    return family, (str(address[0]), int(address[1]))
