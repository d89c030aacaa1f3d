"""New connections over a distance are filled up, and nobody notices but TCP."""

import socket
import time

import pytest

from farpipe.transport import Tag, connection
from farpipe.transport.frame_sender import FrameSender
from farpipe.transport.frames import Receipts
from farpipe.transport.security.proof import receive_before
from farpipe.transport.sockets import pace, prepare
from farpipe.transport.tcp_ramp import TcpRamp
from farpipe.transport.tuning import delivery_rate, renew_bbr, suit_to_pauses
from transports import connected


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
    deadline_s = time.monotonic() + 10
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
