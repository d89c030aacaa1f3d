"""Introduction of ranks to each other: where they listen and, if the WAN is emulated, where its links are."""

import ipaddress
import json
import socket
from pathlib import Path
from typing import NamedTuple

from farpipe.emulate import EmulatedLinks
from farpipe.errors import InputError, RunError
from farpipe.transport.config import TransportConfig, resolve
from farpipe.transport.rendezvous import Meeting


class Introduction(NamedTuple):
    """One rank, as the others see it."""

    address: tuple[str, int]
    """Numeric host, and port."""
    machine: str
    """Tells machines apart."""
    links_path: str
    """Path under which the emulated links can be opened; rank 0's counts."""


def introduce(
    rank: int, listener: socket.socket, config: TransportConfig, rendezvous: Meeting, links: EmulatedLinks | None
) -> list[Introduction]:
    """Tell the others about this rank and learn about them; RunError when some don't come in time."""
    own = {
        "host": config.advertise_host or config.host,
        "port": listener.getsockname()[1],
        "machine": _machine(),
        "links_path": links.path if links else "",
    }
    texts = rendezvous.introduce(json.dumps(own), config.connect_timeout_s)
    ranks = [_parse(text, f"rank {rank}: what rank {peer} says of itself") for peer, text in enumerate(texts)]
    if len({known.machine for known in ranks}) > 1:
        _check_distance(ranks, config)
    return ranks


def _machine() -> str:
    """The same for all processes on this machine until it starts anew, in containers as well."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _check_distance(ranks: list[Introduction], config: TransportConfig) -> None:
    """Check that all ranks are on one machine for emulated links, which share memory and a clock, or loopback."""
    if config.link_shapes():
        raise InputError("transport: an emulated WAN needs all ranks on one machine; leave out the emulation")
    for peer, known in enumerate(ranks):
        if ipaddress.ip_address(known.address[0]).is_loopback:
            raise InputError(
                f"transport: rank {peer} listens on {known.address[0]}, where other machines can't reach it; "
                "give every rank an address of its machine as host"
            )


def _parse(text: str, source: str) -> Introduction:
    try:
        data = json.loads(text)
        host, port, machine, links_path = (data[key] for key in ("host", "port", "machine", "links_path"))
        port = int(port)
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{source} makes no sense: {text[:80]!r}; do all ranks run the same farpipe?") from None
    return Introduction(resolve(str(host), port)[1], str(machine), str(links_path))
