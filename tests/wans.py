"""WANs of network namespaces for tests, and a visible skip where this machine can't have them."""

import itertools
import os
import socket
import sys
import time

import pytest

from farpipe.core.errors import UsageError
from farpipe.core.spec import SiteLink
from farpipe.engine.links import namespace
from farpipe.engine.links.tun import in_namespace
from waiting import LIMIT_S

_NUMBERS = itertools.count()


def obstacle():
    """Reason for which this machine or user can't have a WAN of network namespaces; empty when it can."""
    try:
        namespace.check_possible()
        return ""
    except UsageError as error:
        return str(error)


needs_wan = pytest.mark.skipif(bool(obstacle()), reason=obstacle())


def free_name():
    """A WAN's name that no other test has, also not one that runs at the same time."""
    return f"test_{os.getpid()}_{next(_NUMBERS)}"


def link(source, target, latency_s=0.005, mbit_per_s=200, **figures):
    return SiteLink(
        source=source, target=target, latency_s=latency_s, bandwidth_bytes_per_s=mbit_per_s * 1e6 / 8, **figures
    )


def both_ways(a="west", b="east", **figures):
    return [link(a, b, **figures), link(b, a, **figures)]


def python(code, *arguments):
    """The command that runs `code` in a bare interpreter, which starts fast."""
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


def connection(wan, a, b):
    """A TCP connection from site `a` to site `b`: its end at `a` and its end at `b`, both in this process."""
    with wan.namespaces[b].listen(0) as listener:
        address = (wan.namespaces[b].address, listener.getsockname()[1])
        at_a = in_namespace(wan.namespaces[a].name, lambda: socket.create_connection(address, timeout=LIMIT_S))
        at_b = listener.accept()[0]
    for end in (at_a, at_b):
        end.settimeout(LIMIT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return at_a, at_b


def one_way_s(sender, receiver, tries=8):
    """Seconds from sending a byte to receiving it; the least of some, for a busy machine only adds."""
    found = []
    for _ in range(tries):
        start_s = time.monotonic()
        sender.sendall(b"x")
        assert receiver.recv(1) == b"x"
        found.append(time.monotonic() - start_s)
    return min(found)
