import json
import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attempts import assert_most_of_five
from farpipe.cli.probe import doubts
from farpipe.core.errors import InputError, RunError
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.engine.links import LinkShape
from farpipe.engine.transport import Tag, TransportConfig, handshake, link_probe, message_probe, pair
from farpipe.engine.transport.link_probe import ProbeServer, Sides, answer, ask, measure
from farpipe.engine.transport.message_probe import Messages, arrival_rate
from transports import connected, in_parallel, tls_files
from waiting import wait_until
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
    wait_until(lambda: any(text in event for event in server.events), f"it said {text!r}")
    return True


@pytest.mark.slow
def test_both_directions_are_measured(server):
    found = measure(("127.0.0.1", server.port), PLAIN, seconds=0.3, num_streams=3)
    assert 0 < found.round_trip_s <= found.round_trip_median_s < 10
    rates = (found.one_stream_there, found.one_stream_back, found.streams_there, found.streams_back)
    assert all(rate > 1e6 for rate in rates)
    assert said(server, "measuring for 127.0.0.1")


@pytest.mark.slow
def test_single_messages_are_measured_over_the_transport_and_over_plain_tcp(server):
    asked = Messages(300_000, 0.01)
    found = measure(("127.0.0.1", server.port), PLAIN, seconds=0.2, num_streams=2, messages=asked).messages
    assert (found.num_bytes, found.gap_s) == asked
    assert min(found.there, found.back, found.plain_there, found.plain_back) > 1e6


def test_a_plans_messages_are_its_largest_ones_between_sites_with_the_pauses_between_them():
    problem = two_site_problem()
    asked = Messages.of(problem)
    assert asked.num_bytes == 4_000_000
    assert asked.gap_s == pytest.approx(0.5 - 0.04)
    assert Messages.of(problem.model_copy(update={"hops": (None,)})) is None


def two_site_problem():
    transfers = [Transfer(link=name, bytes=4e6) for name in ("a>b", "b>a")]
    stages = [
        Stage(rank=rank, forward_s=0.1, input_grad_s=0.1 * (rank + 1), weight_grad_s=0.2, activation_bytes=1.0)
        for rank in (0, 1)
    ]
    return Problem(
        num_microbatches=4,
        ranks=(Rank(), Rank()),
        stages=tuple(stages),
        links={name: Link(latency_s=0.01, bandwidth_bytes_per_s=1e8) for name in ("a>b", "b>a")},
        hops=(Hop(forward=transfers[0], backward=transfers[1]),),
    )


class Rates:
    """Rates of measurements, in Mbit/s, by number of streams and direction; each is taken once, the last one again."""

    def __init__(self, monkeypatch, one, several):
        self.left = {1: list(one), 8: list(several)}
        self.count = 0
        monkeypatch.setattr(link_probe, "_rate", self.next)
        monkeypatch.setattr(link_probe._Asking, "echo_s", lambda asking: 0.01)
        monkeypatch.setattr(link_probe._Asking, "order", lambda asking, do, **details: 0)

    def next(self, asking, *, there, seconds, streams, round_trip_s):
        self.count += 1
        rates = self.left[streams]
        return (rates.pop(0) if len(rates) > 1 else rates[0]) * 125e3


@pytest.mark.parametrize(
    ("one", "several", "expected", "measurements"),
    [
        ([1000], [4000], (4000, 4000), 4),
        ([1108], [3.9, 1100, 1100], (1108, 1108), 5),
        ([1000], [900], (1000, 1000), 4),
        ([1000, 20], [2000, 3, 4, 40], (2000, 40), 6),
    ],
)
def test_several_streams_that_get_far_less_than_one_are_measured_again(
    monkeypatch, one, several, expected, measurements
):
    rates = Rates(monkeypatch, one, several)
    found = ask(None, seconds=0.1, num_streams=8)
    assert [rate / 125e3 for rate in found.of_link] == pytest.approx(expected)
    assert rates.count == measurements


@pytest.mark.parametrize(
    ("one", "several", "rates", "named"),
    [
        ([1108], [3.9], (1108, 1108), ["there", "back"]),
        ([10, 1108], [90, 3.9], (90, 1108), ["back"]),
        ([1000], [900], (1000, 1000), []),
    ],
)
def test_a_rate_that_can_not_be_is_never_the_links_and_is_named(monkeypatch, one, several, rates, named):
    Rates(monkeypatch, one, several)
    found = ask(None, seconds=0.1, num_streams=8)
    assert (found.to_data()["there"] / 125e3, found.to_data()["back"] / 125e3) == pytest.approx(rates)
    assert [line.partition(": 8 streams got less than half")[0] for line in doubts(found)] == named


@pytest.mark.slow
def test_within_tls_both_certificates_are_checked(tmp_path):
    ours, theirs = tls_files(tmp_path / "a", ["here", "there"]), tls_files(tmp_path / "b", ["here"])
    events = []
    server = ProbeServer("127.0.0.1", 0, Sides(ours[1], b""), events.append)
    try:
        address = ("127.0.0.1", server.port)
        found = measure(address, Sides(ours[0], b""), seconds=0.2, num_streams=2)
        assert found.streams_there > 0
        with pytest.raises(RunError, match=r"127.0.0.1:\d+: its certificate is not accepted here"):
            measure(address, Sides(theirs[0], b""), seconds=0.2)
        with pytest.raises(RunError):
            measure(address, PLAIN, seconds=0.2)
    finally:
        server.close()
    assert any("turned away 127.0.0.1" in event for event in events)


@pytest.mark.slow
def test_a_wrong_token_is_turned_away_and_the_next_one_is_measured(server):
    address = ("127.0.0.1", server.port)
    with pytest.raises(RunError, match="it has another token"):
        measure(address, Sides(None, b"guess"), seconds=0.2)
    assert said(server, "127.0.0.1: it was closed"), "the other side hung up at another token"
    assert measure(address, PLAIN, seconds=0.1, num_streams=2).streams_there > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [0, 3, 57, 10_000])
def test_strangers_are_turned_away_and_hold_nobody_up(server, monkeypatch, num_bytes):
    monkeypatch.setattr(handshake, "LIMIT_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(random.Random(num_bytes).randbytes(num_bytes))
        assert measure(("127.0.0.1", server.port), PLAIN, seconds=0.1, num_streams=2).streams_there > 0
        stranger.settimeout(5)
        with pytest.raises((ConnectionError, StopIteration)):  # noqa: PT012 - closed or reset
            while stranger.recv(4096):
                pass
            raise StopIteration


@pytest.mark.slow
def test_several_at_once_are_measured_or_told_why_not(server):
    def one():
        try:
            return measure(("127.0.0.1", server.port), PLAIN, seconds=0.1, num_streams=2).num_streams
        except RunError as error:
            return str(error)

    found = in_parallel(one, one, one)
    assert 2 in found
    assert all(text == 2 or "start the other side" in text or "measuring for somebody else" in text for text in found)
    assert measure(("127.0.0.1", server.port), PLAIN, seconds=0.1, num_streams=2).num_streams == 2


def test_a_side_that_dies_in_the_middle_is_told_and_the_next_one_is_measured(server):
    with link_probe._dial(("127.0.0.1", server.port), PLAIN) as sock:
        pair.say(sock, {"nonce": "00", "introduction": "{}"})
        assert said(server, "what rank 1 says of itself makes no sense")
    assert measure(("127.0.0.1", server.port), PLAIN, seconds=0.1, num_streams=2).streams_there > 0


@pytest.mark.parametrize(
    "text", [b"no JSON", b"[]", b"{}", b'{"do": "take", "bytes": -1}', b'{"do": 1}', b"[" * 100_000]
)
def test_a_command_that_makes_no_sense_is_an_error(text):
    with pytest.raises(RunError, match="asks for what is not offered; are both sides of the same version"):
        link_probe._parse(text)


@pytest.mark.parametrize("text", [b"", b"no JSON", b"[]", b"0", b"-1", b"1e999", b"true", b"[" * 100_000, b"1" * 5000])
def test_an_answer_that_makes_no_sense_is_an_error(server, monkeypatch, text):
    monkeypatch.setattr(link_probe, "take_batch", lambda *_: 1.0)
    monkeypatch.setattr(link_probe, "send_batch", lambda *_: None)

    def nonsense(transport, host):
        for number in range(1, 100):
            message = transport.receive(1, "control", Tag(number, 0, 0), waiting_for="a command")
            done = json.loads(bytes(message.data))["do"]
            transport.send(1, "control", Tag(number, 0, 0), text if done == "take" else b"1.0")

    monkeypatch.setattr(link_probe, "answer", nonsense)
    with pytest.raises(RunError, match=r"127\.0\.0\.1:\d+: its answer makes no sense; are both sides of the same"):
        measure(("127.0.0.1", server.port), PLAIN, seconds=0.05, num_streams=2)


@pytest.mark.slow
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


def test_the_rate_is_that_from_the_first_arrival_to_the_last():
    assert arrival_rate([0, 10**9, 2 * 10**9, 4 * 10**9], 100) == pytest.approx(75)
    assert arrival_rate([4 * 10**9, 0, 2 * 10**9, 10**9], 100) == pytest.approx(75)


@given(st.integers(1, 1 << 44))
def test_a_batch_has_about_its_bytes_in_messages_of_bounded_size(num_bytes):
    count, size = message_probe.sizes(num_bytes)
    assert count >= message_probe.LEAST_MESSAGES
    assert size <= message_probe.MESSAGE_BYTES
    assert count * size <= max(num_bytes, message_probe.LEAST_MESSAGES)


@pytest.mark.slow
@pytest.mark.parametrize("num_streams", [2, 8])
@pytest.mark.alone
def test_an_emulated_link_is_measured_as_it_is(num_streams):
    """The emulation in the transport knows no headers and no TCP: what is left is how busy the machine is."""
    there, back = LinkShape(0.010, 12.5e6), LinkShape(0.015, 5e6)
    config = TransportConfig(links={(1, 0): ("there", there), (0, 1): ("back", back)}, timeout_s=20)

    def measured(_):
        with connected(configs=[config] * 2) as (serving, asking):
            return in_parallel(lambda: answer(serving), lambda: ask(asking, seconds=1.0, num_streams=num_streams))[1]

    def is_right(found):
        there, back = (found.one_stream_there, found.streams_there), (found.one_stream_back, found.streams_back)
        right = found.round_trip_s == pytest.approx(0.025, rel=0.1)
        return right and there == pytest.approx([12.5e6] * 2, rel=0.1) and back == pytest.approx([5e6] * 2, rel=0.1)

    assert_most_of_five(measured, is_right)


@pytest.mark.slow
@needs_wan
@pytest.mark.alone
def test_a_kernel_link_is_measured_as_it_is():
    from farpipe.engine.links.tun import in_namespace
    from farpipe.engine.links.wan import Wan

    links = [
        *(link for link in both_ways(latency_s=0.010, mbit_per_s=100) if link.source == "west"),
        *(link for link in both_ways(latency_s=0.010, mbit_per_s=40) if link.source == "east"),
    ]
    with Wan.up(["west", "east"], links, name=free_name()) as wan:
        namespaces = wan.namespaces
        listening = in_namespace(namespaces["east"].name, lambda: ProbeServer(namespaces["east"].address, 0, PLAIN))
        address = (namespaces["east"].address, listening.port)
        measured = lambda: measure(address, PLAIN, seconds=1.5, num_streams=4)  # noqa: E731
        found = assert_most_of_five(lambda _: in_namespace(namespaces["west"].name, measured), _is_a_kernel_link)
        listening.close()
    assert found.num_streams == 4


def _is_a_kernel_link(found):
    """Headers take 4 % of the rates, losses of several streams beside each other some more."""
    there, back = found.streams_there / 12.5e6, found.streams_back / 5e6
    return 0.019 < found.round_trip_s < 0.030 and 0.8 < there < 1.05 and 0.8 < back < 1.05
