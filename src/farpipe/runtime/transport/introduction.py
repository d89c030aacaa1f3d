"""What ranks tell each other when they meet: where they listen and, if the WAN is emulated, where its links are."""

import json
import socket
from typing import NamedTuple

from farpipe.emulate import EmulatedLinks
from farpipe.errors import RunError
from farpipe.runtime.transport.config import TransportConfig, resolve
from farpipe.runtime.transport.rendezvous import Rendezvous


class Introduction(NamedTuple):
    """One rank, as the others see it."""

    address: tuple[str, int]
    """Numeric host, and port."""
    links_path: str
    """Where the emulated links can be opened; rank 0's counts."""


def introduce(
    rank: int, listener: socket.socket, config: TransportConfig, rendezvous: Rendezvous, links: EmulatedLinks | None
) -> list[Introduction]:
    """Tell the others about this rank and learn about them; RunError when some don't come in time."""
    own = {
        "host": config.advertise_host or config.host,
        "port": listener.getsockname()[1],
        "links_path": links.path if links else "",
    }
    texts = rendezvous.introduce(json.dumps(own), config.connect_timeout_s)
    return [_parse(text, f"rank {rank}: what rank {peer} says of itself") for peer, text in enumerate(texts)]


def _parse(text: str, source: str) -> Introduction:
    try:
        data = json.loads(text)
        host, port, links_path = str(data["host"]), int(data["port"]), str(data["links_path"])
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{source} makes no sense: {text[:80]!r}; do all ranks run the same farpipe?") from None
    return Introduction(resolve(host, port)[1], links_path)
