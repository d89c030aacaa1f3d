import socket
import struct

import pytest

from farpipe.emulate import LinkShape
from farpipe.transport import Tag, dialler, transport, tuning
from farpipe.transport.message import Channel
from farpipe.transport.sockets import _SO_MAX_PACING_RATE, pace
from farpipe.transport.stream import Stream
from farpipe.transport.tuning import choose_streams, num_threads, pacing_rate, round_trip_s
from transports import connected

LINKS = {(0, 1): ("a>b", LinkShape(0.001, 125e6)), (1, 0): ("b>a", LinkShape(0.001, 125e6))}


@pytest.mark.parametrize(
    ("round_trip", "bytes_per_s", "num_streams"),
    [(0.0, 125e6, 2), (0.001, 125e6, 2), (0.050, 125e6, 9), (0.100, 125e6, 18), (0.100, 1.25e9, 64), (0.2, None, 64)],
)
def test_streams_grow_with_what_is_on_the_way(monkeypatch, round_trip, bytes_per_s, num_streams):
    monkeypatch.setattr(tuning, "send_buffer_limit_bytes", lambda: 4 << 20)
    assert choose_streams(round_trip, bytes_per_s) == num_streams


def test_smaller_buffers_need_more_streams(monkeypatch):
    monkeypatch.setattr(tuning, "send_buffer_limit_bytes", lambda: 1 << 20)
    assert choose_streams(0.05, 125e6) > 9


def test_the_round_trip_of_a_connection_is_the_kernels():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        assert 0 < round_trip_s(sock) < 1


def test_the_streams_of_a_link_together_stay_a_little_below_its_rate():
    assert 0.9 * 125e6 < 18 * pacing_rate(0.1, 125e6, 18) < 0.965 * 125e6, "3.5 % of the link are headers"
    assert pacing_rate(0.1, None, 18) is None, "nobody knows the rate"
    assert pacing_rate(0.0001, 125e6, 2) is None, "it is next door"


@pytest.mark.parametrize(("settings", "is_paced"), [({}, True), ({"paced": False}, False), ({"links": LINKS}, False)])
def test_a_channel_over_a_distance_is_paced_where_its_link_is_real(monkeypatch, settings, is_paced):
    rates = []
    monkeypatch.setattr(dialler, "pace", lambda sock, rate: rates.append((pace(sock, rate), rate)[1]))
    with connected(bandwidths={(0, 1): 125e6}, **settings) as (first, second):
        first._dialler._round_trips_s[1] = 0.05
        first.send(1, "forward", Tag(0, 0, 0), bytes(4 << 20))
        assert second.receive(0, "forward", Tag(0, 0, 0), waiting_for="it").data.nbytes == 4 << 20
    assert rates == ([pacing_rate(0.05, 125e6, 9)] * 9 if is_paced else [])


def test_open_channels_take_on_the_rate_that_their_link_has_now():
    def paces():
        streams = [line.stream for line in first._outboxes[Channel(1, "forward")].reconnectors]
        options = [stream._connection._sock.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 8) for stream in streams]
        return [struct.unpack("@L", option)[0] for option in options]

    with connected(bandwidths={(0, 1): 125e6}, streams=3) as (first, second):
        first._dialler._round_trips_s[1] = 0.05
        first.open(1, "forward")
        assert first.await_channels(5.0)
        for number, rate in enumerate((25e6, 250e6, 125e6)):
            first._dialler._round_trips_s[1] = 0.05  # connecting has measured this machine's
            first.expect_rate(1, rate)
            first.send(1, "forward", Tag(0, 0, number), bytes(1 << 20))
            assert second.receive(0, "forward", Tag(0, 0, number), waiting_for="it").data.nbytes == 1 << 20
            assert paces() == [pacing_rate(0.05, rate, 3)] * 3


def test_no_loop_wakes_before_all_streams_of_a_channel_are_told_of_a_message(monkeypatch):
    """A loop that wakes for the first stream lets it take two chunks of a message, and none is left for the second."""
    calls = []
    monkeypatch.setattr(Stream, "advance_when_rung", lambda stream: calls.append("told"))
    with connected(streams=4) as (first, _):
        first.open(1, "forward")
        assert first.await_channels(5.0)
        ring = Stream.ring
        monkeypatch.setattr(Stream, "ring", lambda stream: (calls.append("rung"), ring(stream)))
        outbox = first._outboxes[Channel(1, "forward")]
        calls.clear()
        outbox._wake()
    assert calls[:8] == ["told"] * 4 + ["rung"] * 4


def test_headroom_is_for_messages_and_not_for_the_ramp(monkeypatch):
    """A connection whose ramp was to reach more than its link carries would fill the link for as long as it may."""
    rates, goals = [], []
    monkeypatch.setattr(dialler, "pace", lambda sock, rate: rates.append(rate))
    monkeypatch.setattr(transport, "TcpRamp", lambda rate, round_trip: goals.append(rate))
    with connected(bandwidths={(0, 1): 125e6}, headroom=2.0) as (first, second):
        first._dialler._round_trips_s[1] = 0.05
        first.send(1, "forward", Tag(0, 0, 0), bytes(16))
        assert second.receive(0, "forward", Tag(0, 0, 0), waiting_for="it").data.nbytes == 16
    assert sum(goals) == pytest.approx(0.95 * 125e6, rel=1e-6)
    assert len(set(rates)) == 1
    assert rates[0] * len(goals) == pytest.approx(2 * 0.95 * 125e6, rel=1e-6)


def test_few_cores_are_left_to_computing():
    assert 1 <= num_threads() <= 4


def test_a_channel_has_the_streams_that_its_link_asks_for(monkeypatch):
    monkeypatch.setattr(tuning, "send_buffer_limit_bytes", lambda: 4 << 20)
    with connected(bandwidths={(0, 1): 125e6}) as (first, _):
        first._dialler._round_trips_s[1] = 0.05
        first.open(1, "forward")
        (outbox,) = first._outboxes.values()
        assert len(outbox.reconnectors) == 9
