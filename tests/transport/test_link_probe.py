import random
import socket
import time

import pytest

from farpipe.errors import InputError, RunError
from farpipe.transport import link_probe
from farpipe.transport.link_probe import ProbeServer, Sides, measure, sustained_rate
from transports import tls_files
from wans import both_ways, free_name, needs_wan

TOKEN = b"between the two of us"
PLAIN = Sides(None, TOKEN)


@pytest.fixture
def server():
    events = []
    server = ProbeServer("127.0.0.1", 0, PLAIN, events.append)
    server.events = events
    yield server
    server.close()


def said(server, text):
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        if any(text in event for event in server.events):
            return True
        time.sleep(0.01)
    return False


def test_both_directions_are_measured(server):
    found = measure(("127.0.0.1", server.port), PLAIN, seconds=0.3, num_streams=3)
    assert 0 < found.round_trip_s <= found.round_trip_median_s < 0.5
    rates = (found.one_stream_there, found.one_stream_back, found.streams_there, found.streams_back)
    assert all(rate > 1e6 for rate in rates)
    assert said(server, "measuring for 127.0.0.1")


@pytest.mark.slow
def test_within_tls_both_certificates_are_checked(tmp_path):
    ours, theirs = tls_files(tmp_path / "a", ["here", "there"]), tls_files(tmp_path / "b", ["here"])
    events = []
    server = ProbeServer("127.0.0.1", 0, Sides(ours[1].context(server=True), b""), events.append)
    try:
        address = ("127.0.0.1", server.port)
        found = measure(address, Sides(ours[0].context(server=False), b""), seconds=0.2, num_streams=2)
        assert found.streams_there > 0
        with pytest.raises(RunError, match=r"127.0.0.1:\d+: its certificate is not accepted here"):
            measure(address, Sides(theirs[0].context(server=False), b""), seconds=0.2)
        with pytest.raises(RunError):
            measure(address, PLAIN, seconds=0.2)
    finally:
        server.close()
    assert any("turned away 127.0.0.1" in event for event in events)


def test_a_wrong_token_is_turned_away_by_both_sides(server):
    with pytest.raises(RunError, match="it has another token"):
        measure(("127.0.0.1", server.port), Sides(None, b"guess"), seconds=0.2)
    assert said(server, "turned away 127.0.0.1: it does not know this probe's token")


@pytest.mark.parametrize("num_bytes", [0, 3, 57, 10_000])
def test_strangers_are_turned_away_and_hold_nobody_up(server, monkeypatch, num_bytes):
    monkeypatch.setattr(link_probe, "LIMIT_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(random.Random(num_bytes).randbytes(num_bytes))
        assert measure(("127.0.0.1", server.port), PLAIN, seconds=0.1, num_streams=2).streams_there > 0
        stranger.settimeout(5)
        with pytest.raises((ConnectionError, StopIteration)):  # noqa: PT012 - closed or reset
            while stranger.recv(4096):
                pass
            raise StopIteration


def test_more_strangers_than_places_are_closed_at_once(server, monkeypatch):
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(link_probe.MAX_CONNECTIONS + 5)]
    try:
        strangers[-1].settimeout(5)
        assert strangers[-1].recv(100) == b""
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_connection_that_can_not_be_accepted_ends_nothing(server, monkeypatch):
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")]

    def failing(sock):
        connection = accept(sock)
        if failures:
            connection[0].close()
            raise failures.pop()
        return connection

    monkeypatch.setattr(socket.socket, "accept", failing)
    for _ in range(2):  # the server may be in an accept of before
        socket.create_connection(("127.0.0.1", server.port)).close()
    assert measure(("127.0.0.1", server.port), PLAIN, seconds=0.2, num_streams=2).one_stream_there > 0
    assert not failures


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"no JSON", b"[]", b"{}", b'{"1": -1}', b'{"1": "x"}', b'{"x": 1}', b'{"1": 1e999}', b"[" * 100_000),
        *(b'{"1": 1%s}' % (b"0" * 400), b'{"%s": 1}' % (b"1" * 5000)),
    ],
    ids=lambda answer: repr(answer[:12]),
)
def test_an_answer_that_makes_no_sense_is_an_error(server, monkeypatch, answer):
    serve = link_probe._serve

    def serve_nonsense(sock, mode, seconds):
        if mode == link_probe._UP:
            link_probe._count_blocks(sock, time.monotonic() + 10)
            sock.sendall(link_probe._LENGTH.pack(len(answer)) + answer)
        else:
            serve(sock, mode, seconds)

    monkeypatch.setattr(link_probe, "_serve", serve_nonsense)
    with pytest.raises(RunError, match=r"127\.0\.0\.1:\d+: its answer makes no sense; are both sides of the same"):
        measure(("127.0.0.1", server.port), PLAIN, seconds=0.05, num_streams=2)


def test_counts_far_apart_take_no_time():
    assert sustained_rate({0: 5, 1 << 60: 5}) == 0


def test_nobody_there_names_the_remedy():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(
        RunError, match=rf"refused; start the other side with `farpipe probe --listen 127.0.0.1:{port}`"
    ):
        measure(("127.0.0.1", port), PLAIN)


def test_a_port_that_is_taken_is_named(server):
    with pytest.raises(InputError, match=f"can't listen on 127.0.0.1 port {server.port}: Address already in use"):
        ProbeServer("127.0.0.1", server.port, PLAIN)


def test_the_rate_is_that_of_the_second_half_without_its_ragged_end():
    slots = {10: 1, 11: 50, 12: 100, 13: 100, 14: 100, 15: 3}
    assert sustained_rate(slots) == pytest.approx(100 / link_probe.SLOT_S)
    assert sustained_rate({7: 40}) == pytest.approx(40 / link_probe.SLOT_S)


@pytest.mark.slow
@needs_wan
def test_a_kernel_link_is_measured_as_it_is():
    from farpipe.emulate.tun import in_namespace
    from farpipe.emulate.wan import Wan

    links = [
        *(link for link in both_ways(latency_s=0.010, mbit_per_s=100) if link.source == "west"),
        *(link for link in both_ways(latency_s=0.010, mbit_per_s=40) if link.source == "east"),
    ]
    with Wan.up(["west", "east"], links, name=free_name()) as wan:
        namespaces = wan.namespaces
        listening = in_namespace(namespaces["east"].name, lambda: ProbeServer(namespaces["east"].address, 0, PLAIN))
        address = (namespaces["east"].address, listening.port)
        found = in_namespace(namespaces["west"].name, lambda: _measure_here(address))
        listening.close()
    assert 0.019 < found.round_trip_s < 0.030
    assert found.streams_there == pytest.approx(12.5e6, rel=0.15)
    assert found.streams_back == pytest.approx(5e6, rel=0.15)


def _measure_here(address):
    return measure(address, PLAIN, seconds=1.0, num_streams=4)
