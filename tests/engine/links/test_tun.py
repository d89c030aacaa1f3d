import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.engine.links.tun import parse_burst, without_packets

HEADER_BYTES = 10
IP_BYTES, TCP_BYTES = 20, 32
SEGMENT_BYTES = 1448
FIN, PSH, ACK = 1, 8, 16


def as_read(payload, *, segment_bytes=0, sequence=1000, identity=65_530, flags=ACK | PSH | FIN, version=4):
    """Packet that a TUN hands over for a TCP stream from 198.18.0.1 to 198.18.0.2."""
    total = IP_BYTES + TCP_BYTES + len(payload)
    # the kernel's header bytes are a hint that may be anything
    vnet = struct.pack("=BBHHHH", 1, 1 if segment_bytes else 0, 66, segment_bytes, IP_BYTES, 16)
    ip = struct.pack(
        "!BBHHHBBH4s4s", version << 4 | 5, 0, total, identity, 0, 64, 6, 0, b"\xc6\x12\0\1", b"\xc6\x12\0\2"
    )
    tcp = struct.pack("!HHIIBBHHH", 1, 2, sequence, 7, TCP_BYTES // 4 << 4, flags, 99, 0, 0) + bytes(TCP_BYTES - 20)
    return vnet + ip + tcp + payload


def words_sum(data):
    """The sum that is 0xffff for data with a correct internet checksum in it."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def cut(burst):
    """(sequence, identity, flags, payload) of every packet that the kernel makes of a burst."""
    data = burst.data
    _, kind, _, segment_bytes, _, _ = struct.unpack_from("=BBHHHH", data)
    ip = data[HEADER_BYTES:]
    assert struct.unpack_from("!H", ip, 2)[0] == len(ip)
    (identity,), (sequence,), flags = struct.unpack_from("!H", ip, 4), struct.unpack_from("!I", ip, 24), ip[33]
    payload = ip[IP_BYTES + TCP_BYTES :]
    size = segment_bytes if kind else len(payload)
    parts = [payload[start : start + size] for start in range(0, len(payload), size)] or [b""]
    assert len(parts) == burst.num_packets
    return [
        (
            (sequence + number * size) % 2**32,
            (identity + number) % 2**16,
            flags if number == len(parts) - 1 else flags & ~(FIN | PSH),
            part,
        )
        for number, part in enumerate(parts)
    ]


def test_a_single_packet_is_itself():
    burst = parse_burst(as_read(bytes(1448)))
    assert (burst.num_bytes, burst.num_packets, burst.target) == (1500, 1, bytes([198, 18, 0, 2]))


def test_a_burst_counts_the_headers_of_all_its_packets():
    burst = parse_burst(as_read(bytes(10 * SEGMENT_BYTES + 1), segment_bytes=SEGMENT_BYTES))
    assert (burst.num_packets, burst.num_bytes) == (11, 11 * 52 + 10 * SEGMENT_BYTES + 1)


def test_what_is_not_ipv4_is_nothing():
    assert parse_burst(as_read(b"", version=6)) is None
    assert parse_burst(b"") is None
    assert parse_burst(as_read(b"")[:29]) is None


@given(
    st.integers(1, 9 * SEGMENT_BYTES), st.sets(st.integers(0, 8)), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)
)
def test_what_is_left_of_a_burst_are_the_other_packets_as_they_were(num_bytes, lost, sequence, identity):
    payload = bytes(number % 251 for number in range(num_bytes))
    burst = parse_burst(as_read(payload, segment_bytes=SEGMENT_BYTES, sequence=sequence, identity=identity))
    lost = {place for place in lost if place < burst.num_packets}
    left = list(without_packets(burst, lost))
    kept = [packet for place, packet in enumerate(cut(burst)) if place not in lost]
    assert [packet for part in left for packet in cut(part)] == kept
    assert sum(part.num_packets for part in left) == burst.num_packets - len(lost)


def test_the_headers_of_what_is_left_have_correct_checksums():
    burst = parse_burst(as_read(bytes(5 * SEGMENT_BYTES), segment_bytes=SEGMENT_BYTES))
    for part in without_packets(burst, {1}):
        ip = part.data[HEADER_BYTES:]
        pseudo = ip[12:20] + struct.pack("!HH", 6, len(ip) - IP_BYTES)
        assert words_sum(ip[:IP_BYTES]) == 0xFFFF
        assert struct.unpack_from("!H", ip, IP_BYTES + 16)[0] == words_sum(pseudo)


@pytest.mark.parametrize("lost", [[], [0, 1, 2]])
def test_nothing_lost_is_everything_and_all_lost_is_nothing(lost):
    burst = parse_burst(as_read(bytes(3 * SEGMENT_BYTES), segment_bytes=SEGMENT_BYTES))
    assert list(without_packets(burst, lost)) == ([] if lost else [burst])
