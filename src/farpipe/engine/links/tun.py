"""A site's network interface, whose packets this process carries: a TUN in the site's network namespace.

With offload switched on the kernel hands over and takes up to 64 KB of one TCP stream at once, while TCP itself sees
packets of MTU_BYTES: ten times less work than packet by packet. The flags are those of linux/if_tun.h.
Ten bytes before the IP header say how the kernel is to cut such a burst (`struct virtio_net_hdr` of
linux/virtio_net.h).
"""

import ctypes
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

HEADER: Final = struct.Struct("=BBHHHH")  # flags, kind, header bytes, segment bytes, checksum start and offset
IP: Final = HEADER.size
_TARGET: Final = slice(IP + 16, IP + 20)
_TCP: Final = 6
_FIN_PSH: Final = 0x09
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


class Burst(NamedTuple):
    """`num_packets` for one target, together `num_bytes` on the wire, the headers of each included."""

    data: bytes
    target: bytes
    num_bytes: int
    num_packets: int


def parse_burst(data: bytes) -> Burst | None:
    """`data` as read from a TUN; None when it is not IPv4."""
    num_bytes = len(data) - IP
    if num_bytes < 20 or data[IP] >> 4 != 4:
        return None
    segment_bytes = _segment_bytes(data)
    if not segment_bytes:
        return Burst(data, data[_TARGET], num_bytes, 1)
    header_bytes = _header_bytes(data)
    num_packets = max(1, -(-(num_bytes - header_bytes) // segment_bytes))
    return Burst(data, data[_TARGET], num_bytes + (num_packets - 1) * header_bytes, num_packets)


def _segment_bytes(data: bytes) -> int:
    """Bytes of the stream in each packet; 0 where it is a single packet."""
    _, kind, _, segment_bytes, _, _ = HEADER.unpack_from(data)
    return int(segment_bytes) if kind and data[IP + 9] == _TCP else 0


def _header_bytes(data: bytes) -> int:
    """IP and TCP headers of each packet."""
    ip_bytes = (data[IP] & 15) * 4
    return ip_bytes + (data[IP + ip_bytes + 12] >> 4) * 4


def without_packets(burst: Burst, lost: Collection[int]) -> Iterator[Burst]:
    """Yield the rest of `burst` without the packets at the places `lost` (from 0): bursts again."""
    if not lost:
        yield burst
        return
    gone = sorted(lost)
    for first, end in zip([0, *(place + 1 for place in gone)], [*gone, burst.num_packets], strict=True):
        if first < end:
            part = parse_burst(_part(burst.data, first, end, burst.num_packets))
            assert part is not None
            yield part


def _part(data: bytes, first: int, end: int, num_packets: int) -> bytes:
    """Packets `first` to `end` (not included) of a burst, with the headers that they would have had (RFC 9293)."""
    header_bytes, segment_bytes = _header_bytes(data), _segment_bytes(data)
    start = IP + header_bytes
    payload = data[start + first * segment_bytes : start + end * segment_bytes]
    head = bytearray(data[:start])
    if end - first == 1:
        head[1] = 0  # not a burst any more
        head[4:6] = bytes(2)
    tcp = IP + (head[IP] & 15) * 4
    (identity,) = struct.unpack_from("!H", head, IP + 4)
    (sequence,) = struct.unpack_from("!I", head, tcp + 4)
    struct.pack_into("!HH", head, IP + 2, header_bytes + len(payload), (identity + first) & 0xFFFF)
    struct.pack_into("!I", head, tcp + 4, (sequence + first * segment_bytes) & 0xFFFFFFFF)
    if end < num_packets:
        head[tcp + 13] &= ~_FIN_PSH & 0xFF
    struct.pack_into("!H", head, IP + 10, 0)
    struct.pack_into("!H", head, IP + 10, ~_sum(head[IP:tcp]) & 0xFFFF)
    # TCP's checksum is left for the kernel to complete: it begins as the sum of the pseudo-header.
    length = len(head) - tcp + len(payload)
    struct.pack_into("!H", head, tcp + 16, _sum(head[IP + 12 : IP + 20] + struct.pack("!HH", _TCP, length)))
    return bytes(head) + payload


def _sum(data: bytes | bytearray) -> int:
    """The sum of 16-bit words that internet checksums are made of (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


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
