import socket
import struct
import time

import pytest

from farpipe.engine.links import LinkShape
from farpipe.engine.transport import Tag, connection, dialler, tcp, transport
from farpipe.engine.transport.frames import FrameSender
from farpipe.engine.transport.handshake import receive_before
from farpipe.engine.transport.stream import Stream
from farpipe.engine.transport.tcp import (
    _SO_MAX_PACING_RATE,
    TcpRamp,
    choose_streams,
    delivery_rate,
    num_threads,
    pace,
    pacing_rate,
    prepare,
    renew_bbr,
    round_trip_s,
    suit_to_pauses,
)
from farpipe.engine.transport.wire import Channel, Receipts
from transports import connected

LINKS = {(0, 1): ("a>b", LinkShape(0.001, 125e6)), (1, 0): ("b>a", LinkShape(0.001, 125e6))}


@pytest.mark.parametrize(
    ("round_trip", "bytes_per_s", "num_streams"),
    [(0.0, 125e6, 2), (0.001, 125e6, 2), (0.050, 125e6, 9), (0.100, 125e6, 18), (0.100, 1.25e9, 64), (0.2, None, 64)],
)
def test_streams_grow_with_what_is_on_the_way(monkeypatch, round_trip, bytes_per_s, num_streams):
    monkeypatch.setattr(tcp, "send_buffer_limit_bytes", lambda: 4 << 20)
    assert choose_streams(round_trip, bytes_per_s) == num_streams


def test_smaller_buffers_need_more_streams(monkeypatch):
    monkeypatch.setattr(tcp, "send_buffer_limit_bytes", lambda: 1 << 20)
    assert choose_streams(0.05, 125e6) > 9


def test_asking_for_retransmissions_every_step_does_not_put_off_bbrs_renewal(monkeypatch):
    renewed = []
    monkeypatch.setattr(tcp, "renew_bbr", renewed.append)
    near, _far = socket.socketpair()
    with near, _far:
        link = connection.Connection(near)
        monkeypatch.setattr(connection, "packet_counts", lambda sock: (0, 0))
        now_s = time.monotonic() + 2 * tcp.BBR_RENEWED_S
        monkeypatch.setattr(connection.time, "monotonic", lambda: now_s)
        link.retransmissions()
        link.renew(now_s)
    assert renewed == [near]


def test_a_connection_that_has_just_ended_has_retransmitted_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = connection.Connection(socket.create_connection(server.getsockname()))
        link.close()
        assert link.retransmissions() == (0, 0)


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
    """A loop that wakes for the first stream lets it take two fragments, and none is left for the second."""
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
    monkeypatch.setattr(tcp, "send_buffer_limit_bytes", lambda: 4 << 20)
    with connected(bandwidths={(0, 1): 125e6}) as (first, _):
        first._dialler._round_trips_s[1] = 0.05
        first.open(1, "forward")
        (outbox,) = first._outboxes.values()
        assert len(outbox.reconnectors) == 9


@pytest.fixture
def pair():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
    ):
        yield near, far


def test_it_goes_on_until_the_needed_rate_has_arrived():
    ramp = TcpRamp(bytes_per_s=1e6, round_trip_s=0.1)
    ramp.begin(now_s=5.0)
    assert ramp.goes_on(lambda: 0.5e6, now_s=5.5)
    assert not ramp.goes_on(lambda: 0.95e6, now_s=5.6)
    assert not ramp.goes_on(lambda: 0.0, now_s=5.7), "it is over for this connection"
    ramp.begin(now_s=6.0)
    assert ramp.goes_on(lambda: 0.0, now_s=6.1), "a new connection starts anew"


def test_it_gives_up_on_a_link_that_is_slower_than_was_said():
    ramp = TcpRamp(bytes_per_s=1e6, round_trip_s=0.1)
    ramp.begin(now_s=0.0)
    assert ramp.goes_on(lambda: 1e5, now_s=1.9)
    assert not ramp.goes_on(lambda: 1e5, now_s=2.1)


@pytest.mark.parametrize("far", [True, False], ids=["far", "near"])
def test_messages_come_whole_and_in_order_among_padding(monkeypatch, far):
    num_paddings = 0
    goes_on = TcpRamp.goes_on

    def counted(self, *args):
        nonlocal num_paddings
        more = goes_on(self, *args)
        num_paddings += more
        return more

    monkeypatch.setattr(TcpRamp, "goes_on", counted)
    monkeypatch.setattr(connection, "delivery_rate", lambda sock: 0.0)  # never warm: filled up for 20 round trips
    with connected(bandwidths={(0, 1): 125e6}) as (first, second):
        first._dialler._round_trips_s[1] = 0.01 if far else 0.0
        first.open(1, "forward")
        for number in range(20):
            first.send(1, "forward", Tag(0, 0, number), bytes([number]) * 200_000)
            time.sleep(0.005)
        for number in range(20):
            message = second.receive(0, "forward", Tag(0, 0, number), waiting_for="it")
            assert message.data == bytes([number]) * 200_000
        (outbox,) = first._outboxes.values()
        assert outbox.flush(time.monotonic() + 10)
    assert (num_paddings > 0) == far


def test_the_rate_of_delivery_is_the_kernels(pair):
    near, far = pair
    near.sendall(bytes(100_000))
    num_bytes = 0
    while num_bytes < 100_000:
        num_bytes += len(far.recv(1 << 16))
    deadline_s = time.monotonic() + 60
    while not delivery_rate(near) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert delivery_rate(near) > 0


def test_an_old_kernel_that_tells_no_rate_of_delivery_keeps_nobody_from_sending():
    class Old:
        def getsockopt(self, level, option, num_bytes):
            return bytes(min(num_bytes, 104))

    assert delivery_rate(Old()) == 0.0


def congestion_control(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def may_have(sock, name):
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    except OSError:  # this system or user has it not
        return False
    return True


def test_bbr_is_chosen_for_pauses_where_it_is_allowed(pair):
    near, far = pair
    expected = next((name for name in (b"bbr", b"cubic") if may_have(far, name)), congestion_control(near))
    suit_to_pauses(near)
    assert congestion_control(near) == expected


def test_bbr_begins_anew_and_nothing_else_is_changed(pair):
    near, far = pair
    renew_bbr(near)
    assert may_have(near, b"reno")
    renew_bbr(near)
    assert congestion_control(near) == b"reno"
    if not may_have(near, b"bbr"):
        pytest.skip("BBR is not allowed here")
    near.sendall(bytes(1000))
    renew_bbr(near)
    near.sendall(bytes(1000))
    assert congestion_control(near) == b"bbr"
    assert len(receive_before(far, 2000, time.monotonic() + 10)) == 2000


def test_a_ramp_that_ends_is_over_and_the_congestion_control_begins_anew():
    class Link:
        renewed = 0

        def delivered_bytes_per_s(self):
            return 1e6

        def renew(self, now_s, *, at_once):
            self.renewed += at_once

    link, ramp = Link(), TcpRamp(bytes_per_s=1e6, round_trip_s=0.1)
    sender = FrameSender(NothingToSend(), Receipts(), time.monotonic_ns, ramp)
    sender.restart(0)
    assert sender.is_ramping
    sender.write(link)
    sender.write(link)
    assert not sender.is_ramping
    assert link.renewed == 1


class NothingToSend:
    def pull(self):
        return None


def test_waiting_for_channels_ends_when_they_are_up_to_their_rate(monkeypatch):
    monkeypatch.setattr(connection, "delivery_rate", lambda sock: 1e9)
    with connected(bandwidths={(0, 1): 125e6}) as (first, _):
        first._dialler._round_trips_s[1] = 0.01
        first.open(1, "forward")
        assert first.await_channels(10.0)
        (outbox,) = first._outboxes.values()
        assert outbox.is_ready


def test_waiting_for_channels_has_a_limit(monkeypatch):
    monkeypatch.setattr(TcpRamp, "goes_on", lambda *_: True)
    with connected(bandwidths={(0, 1): 125e6}) as (first, _):
        first._dialler._round_trips_s[1] = 0.01
        first.open(1, "forward")
        assert not first.await_channels(0.1)
        monkeypatch.setattr(TcpRamp, "goes_on", lambda *_: False)


@pytest.mark.parametrize(("bytes_per_s", "not_sent_bytes"), [(6_600_000, 132_000), (10, 16 << 10), (10**9, 256 << 10)])
def test_little_waits_in_the_kernel_before_a_paced_connection(pair, bytes_per_s, not_sent_bytes):
    prepare(pair[0])
    pace(pair[0], bytes_per_s)
    assert pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == not_sent_bytes


@pytest.mark.parametrize(
    ("round_trip", "not_sent_bytes", "fragment_bytes"), [(0.0, 2 << 20, 2 << 20), (0.01, 256 << 10, 1 << 20)]
)
def test_the_kernel_takes_more_of_a_connection_that_is_near(round_trip, not_sent_bytes, fragment_bytes, monkeypatch):
    with connected() as (first, second):
        monkeypatch.setattr(first._dialler, "measure", lambda peer, sock: None)
        first._dialler._round_trips_s[1] = round_trip
        first.send(1, "forward", Tag(0, 0, 0), b"x")
        second.receive(0, "forward", Tag(0, 0, 0), waiting_for="it")
        (outbox,) = first._outboxes.values()
        sockets = [one.stream._connection._sock for one in outbox.reconnectors if one.stream.is_up]
        found = {sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) for sock in sockets}
        assert found == {not_sent_bytes}
        assert outbox._fragment_bytes(outbox._num_streams << 24) == fragment_bytes
