"""A site's network interface, whose packets this process carries: a TUN in the site's network namespace.

With offload switched on the kernel hands over and takes up to 64 KB of one TCP stream at once, while TCP itself sees
packets of MTU_BYTES: ten times less work than packet by packet. The flags are those of linux/if_tun.h.
"""

import ctypes
import fcntl
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from farpipe.emulate.burst import HEADER, Burst, parse_burst

DEVICE: Final = Path("/dev/net/tun")
INTERFACE: Final = "wan0"
MTU_BYTES: Final = 1500
MAX_BYTES: Final = HEADER.size + (1 << 16)
_NAMESPACES: Final = Path("/run/netns")
_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_CHECKSUM, _TSO4, _TSO6, _TSO_ECN = 1, 2, 4, 8

Result = TypeVar("Result")


def in_namespace(namespace: str, do: Callable[[], Result]) -> Result:
    """`do()` in a network namespace: in a thread of its own, for the namespace is a property of the thread."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def enter_and_do() -> None:
        try:
            descriptor = os.open(_NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
            finally:
                os.close(descriptor)
            results.append(do())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter_and_do, name=f"in {namespace}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def open_tun(namespace: str) -> int:
    """The descriptor of a new TUN called INTERFACE in `namespace`; it is gone when the descriptor is closed."""

    def make() -> int:
        descriptor = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
            fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CHECKSUM | _TSO4 | _TSO6 | _TSO_ECN)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    return in_namespace(namespace, make)


def read_burst(descriptor: int) -> Burst | None:
    """Read the site's next packets; None if there are none now, or they are not IPv4."""
    try:
        data = os.read(descriptor, MAX_BYTES)
    except BlockingIOError:
        return None
    return parse_burst(data)
