"""Bursts: what a TUN with offload hands over at once, one or many packets of a TCP stream under one set of headers.

Ten bytes before the IP header say how the kernel is to cut it (`struct virtio_net_hdr` of linux/virtio_net.h).
"""

import struct
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

HEADER: Final = struct.Struct("=BBHHHH")  # flags, kind, header bytes, segment bytes, checksum start and offset
IP: Final = HEADER.size
_TARGET: Final = slice(IP + 16, IP + 20)
_TCP: Final = 6
_FIN_PSH: Final = 0x09


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
