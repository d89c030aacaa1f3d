"""Connections that break, at any byte and for any while: nothing is lost, nothing doubled, and too long is an error."""

import random
import socket
import struct
import threading
import time

import pytest

from farpipe.core.errors import RunError
from farpipe.core.schedule.library import order
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.engine.launch.run import RANK_PROGRAM, run
from farpipe.engine.links import Wan
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.transport import PeerError, Tag, TransportConfig, meeting
from farpipe.engine.transport.connection import Connection
from farpipe.engine.transport.control_link import ControlInbox, ControlMessage
from farpipe.engine.transport.control_plane import ControlPlane, ControlTopology
from farpipe.engine.transport.health import Health
from farpipe.engine.transport.loop import Loop
from farpipe.engine.transport.stream import Stream
from farpipe.engine.transport.wire import EVERYBODY, FRAME, PREFIX, ControlFrame
from proxies import RESET, Proxy
from transports import connect_all, connected, in_parallel, tls_files
from waiting import wait_until
from wans import both_ways, free_name, needs_wan

LONG = random.Random(1).randbytes(800_000)


@pytest.fixture
def proxy(monkeypatch):
    between = Proxy()
    introduce = meeting.introduce

    def introduce_through_proxy(rank, *args):
        ranks = introduce(rank, *args)
        return [r if i == rank else r._replace(address=between.route(r.address)) for i, r in enumerate(ranks)]

    monkeypatch.setattr(meeting, "introduce", introduce_through_proxy)
    yield between
    between.close()


def configs(tmp_path, *, tls, num_ranks=2, **settings):
    sites = tuple(f"site {rank}" for rank in range(num_ranks))
    files = tls_files(tmp_path, sites) if tls else [None] * num_ranks
    settings = {"timeout_s": 60.0, "connect_timeout_s": 60.0, "streams": 2, "outage_s": 30.0} | settings
    return [TransportConfig(tls=files[rank], sites=sites, **settings) for rank in range(num_ranks)]


def talk(first, second, num_messages, seed):
    """Messages and exchanges both ways, as fast as they go; everything is compared bit by bit."""
    sizes = [random.Random(seed).choice([0, 1, 100, 5_000, 70_000, 400_000]) for _ in range(num_messages)]
    sent = [random.Random(seed).randbytes(size) for size in sizes]

    def send(one, other):
        for i, data in enumerate(sent):
            one.send(other, "forward", Tag(seed, 0, i), data)
            one.post(other, "number", struct.pack("q", i))

    def receive(one, other):
        for i, data in enumerate(sent):
            message = one.receive(other, "forward", Tag(seed, 0, i), waiting_for=f"message {i}")
            assert message.data == data

    in_parallel(lambda: send(first, 1), lambda: send(second, 0), lambda: receive(first, 1), lambda: receive(second, 0))
    ends = in_parallel(
        *(lambda r=r: r.exchange("end", bytes([r.rank]), waiting_for="the end") for r in (first, second))
    )
    assert ends == [[b"\0", b"\1"]] * 2
    expected = list(range(num_messages))
    for one in (first, second):
        assert [struct.unpack("q", payload)[0] for _, payload in one.poll("number")] == expected


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_connections_that_break_at_any_byte_lose_and_double_nothing(proxy, tmp_path, tls):
    break_and_talk(proxy, tmp_path, tls, num_cuts=60)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_thousands_of_broken_connections_lose_and_double_nothing(proxy, tmp_path, tls):
    break_and_talk(proxy, tmp_path, tls, num_cuts=1000)


def break_and_talk(proxy, tmp_path, tls, num_cuts):
    with connected(configs=configs(tmp_path, tls=tls)) as (first, second):
        proxy.mean_bytes = 60_000
        proxy.cut_all()
        seed = 0
        deadline_s = time.monotonic() + 100
        while proxy.num_cuts < num_cuts:
            assert time.monotonic() < deadline_s, f"only {proxy.num_cuts} cuts"
            talk(first, second, 30, seed)
            seed += 1
        proxy.mean_bytes = None


@pytest.mark.slow
def test_an_outage_shorter_than_the_limit_is_survived_even_beyond_the_limit_of_a_wait(proxy, tmp_path):
    with connected(configs=configs(tmp_path, tls=False, timeout_s=0.5, outage_s=30.0)) as (first, second):
        talk(first, second, 3, seed=0)
        proxy.blocked = True
        proxy.cut_all()

        def mend():
            time.sleep(1.5)
            proxy.blocked = False

        def send():
            first.send(1, "forward", Tag(9, 0, 0), LONG)

        results = in_parallel(
            mend, send, lambda: second.receive(0, "forward", Tag(9, 0, 0), waiting_for="what was sent in the outage")
        )
        assert results[2].data == LONG
        talk(first, second, 3, seed=1)


@pytest.mark.slow
def test_a_third_rank_is_patient_while_two_others_have_an_outage(proxy, tmp_path):
    settings = {"tls": False, "num_ranks": 3, "timeout_s": 0.6, "outage_s": 10.0}
    with connected(3, configs=configs(tmp_path, **settings)) as ranks:
        between = [pair for pair in proxy.open if len(proxy.open) == 3]
        assert between, "one connection per pair of ranks is expected"
        proxy.blocked = True
        proxy.cut(between[0])

        def mend():
            time.sleep(1.5)
            proxy.blocked = False

        results = in_parallel(mend, *(lambda r=r: r.exchange("all", bytes([r.rank]), waiting_for="all") for r in ranks))
        assert results[1:] == [[b"\0", b"\1", b"\2"]] * 3


def cut_behind_a_message(proxy, first, second):
    """The data connection between two ranks breaks for good once a message has come over it."""
    control = set(proxy.open)
    first.send(1, "forward", Tag(0, 0, 0), b"012")
    second.receive(0, "forward", Tag(0, 0, 0), waiting_for="the only message")
    (data,) = proxy.open - control
    proxy.blocked = True
    proxy.cut(data)


@pytest.mark.slow
def test_an_outage_with_a_rank_that_has_left_makes_nobody_wait_for_ever(proxy, tmp_path):
    settings = {"tls": False, "num_ranks": 3, "timeout_s": 0.6, "outage_s": 100.0, "streams": 1}
    with connected(3, configs=configs(tmp_path, **settings)) as ranks:
        cut_behind_a_message(proxy, *ranks[:2])
        time.sleep(0.3)
        ranks[1].close()
        start_s = time.monotonic()
        with pytest.raises(RunError, match="did not come within"):
            ranks[0].receive(2, "forward", Tag(0, 2, 0), waiting_for="what never comes")
        assert time.monotonic() - start_s < 90, "outage_s is 100"


@pytest.mark.parametrize("begins", ["before", "after"])
def test_who_leaves_does_not_wait_for_acknowledgements_of_a_rank_that_has_left(proxy, tmp_path, begins):
    ranks = connect_all(configs=configs(tmp_path, tls=False, timeout_s=100.0, streams=1))
    cut_behind_a_message(proxy, *ranks)
    ranks[0].send(1, "forward", Tag(1, 0, 0), b"345")
    start_s = time.monotonic()
    if begins == "before":
        in_parallel(ranks[0].close, lambda: time.sleep(0.5), lambda: (time.sleep(0.3), ranks[1].close()))
    else:
        ranks[1].close()
        ranks[0].close()
    assert time.monotonic() - start_s < 60, "timeout_s is 100"


def test_a_goodbye_ends_the_patience_that_an_outage_has_asked_for():
    health, said = Health(lambda reason: None), []
    topology = ControlTopology(0, ["", ""])
    plane = ControlPlane(topology, 2, health, ControlInbox(health), lambda *told: said.append(told))

    def hear(kind, target=EVERYBODY, payload=b""):
        plane.on_message(1, ControlMessage(kind, 1, target, payload=payload))

    for kind in (ControlFrame.DOWN, ControlFrame.DOWN, ControlFrame.UP):
        hear(kind)
    before_s = health.paused_s()
    time.sleep(0.01)
    assert health.paused_s() > before_s
    hear(ControlFrame.GOODBYE, 0, bytes(32))
    before_s = health.paused_s()
    time.sleep(0.01)
    assert health.paused_s() == before_s
    assert [peer for peer, _ in said] == [1]


def test_a_connection_that_ends_while_there_is_no_room_is_noticed_at_once():
    num_asked, down, loop = 0, threading.Event(), Loop("paused", 60.0, lambda error: None)

    class NoRoom:
        def pull(self):
            return None

        def begin(self, head, body_bytes):
            nonlocal num_asked
            num_asked += 1

    stream = Stream(NoRoom(), loop, time.monotonic_ns, lambda *_: down.set(), lambda *_: None, silence_s=300.0)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        ticket, _ = stream.displace()
        assert stream.attach(Connection(server.accept()[0]), ticket, 0)
        far.sendall(PREFIX.pack(FRAME, 4, 10, 0) + b"head" + bytes(10))
        wait_until(lambda: num_asked, "the stream had asked for room")
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    assert down.wait(60)
    assert 1 <= num_asked < 100, "the loop must not spin"
    stream.close()
    loop.close(time.monotonic() + 60)


@pytest.mark.slow
def test_an_outage_longer_than_the_limit_ends_the_run_with_peer_and_duration(proxy, tmp_path):
    with connected(configs=configs(tmp_path, tls=False, outage_s=1.0)) as (first, second):
        talk(first, second, 1, seed=0)
        proxy.blocked = True
        proxy.cut_all()
        start_s = time.monotonic()

        def wait(one, other):
            with pytest.raises(
                PeerError, match=rf"rank {other} \(site site {other}\) is lost: .* was interrupted for [1-9]\d*\.\d s"
            ) as e:
                one.receive(other, "forward", Tag(9, 0, 0), waiting_for="what never comes")
            return str(e.value)

        errors = in_parallel(lambda: wait(first, 1), lambda: wait(second, 0))
        assert time.monotonic() - start_s > 0.9
        assert all("the limit is 1 s (outage_s)" in text for text in errors)


@pytest.mark.slow
def test_a_link_that_swallows_everything_without_a_word_is_noticed(proxy, tmp_path):
    with connected(configs=configs(tmp_path, tls=False, outage_s=2.0)) as (first, second):
        talk(first, second, 1, seed=0)
        proxy.swallows = True
        with pytest.raises(PeerError, match=r"rank 0 .* is lost: .*\((nothing was heard for 1 s|it was closed)\); the"):
            second.receive(0, "forward", Tag(9, 0, 0), waiting_for="what is swallowed")


@pytest.mark.slow
def test_a_link_that_swallows_for_a_while_is_survived(proxy, tmp_path):
    with connected(configs=configs(tmp_path, tls=True, timeout_s=4.0, outage_s=30.0)) as (first, second):
        talk(first, second, 1, seed=0)
        proxy.swallows = True
        first.send(1, "forward", Tag(9, 0, 0), LONG)
        time.sleep(2.5)  # more than twice the silence from which a connection counts as broken
        proxy.swallows = False
        message = second.receive(0, "forward", Tag(9, 0, 0), waiting_for="what was swallowed at first")
        assert message.data == LONG


def rehearsal(num_steps, **transport):
    """Two ranks at two sites, 2 ms an action."""
    link = Link(latency_s=0.005, bandwidth_bytes_per_s=12.5e6)
    stage = {"forward_s": 0.002, "input_grad_s": 0.002, "weight_grad_s": 0.002}
    problem = Problem(
        num_microbatches=4,
        ranks=(Rank(),) * 2,
        stages=tuple(Stage(rank=rank, **stage) for rank in range(2)),
        links={"west>east": link, "east>west": link},
        hops=(
            Hop(forward=Transfer(link="west>east", bytes=50_000), backward=Transfer(link="east>west", bytes=50_000)),
        ),
    )
    return RunSpec.bare(
        problem=problem,
        schedule=order("1f1b", problem),
        sites=("west", "east"),
        num_steps=num_steps,
        device="sleep",
        emulate_links=False,
        transport=TransportSettings(**transport),
    )


@needs_wan
@pytest.mark.slow
def test_a_run_within_tls_over_kernel_links_survives_an_outage_in_place(tmp_path):
    tls_files(tmp_path, ("west", "east"))
    program = (*RANK_PROGRAM, "--certs", str(tmp_path / "authority"))
    with Wan.up(["west", "east"], both_ways(latency_s=0.005, mbit_per_s=100), name=free_name()) as wan:
        steps = []

        def on_step(line):
            steps.append(line)
            if len(steps) == 5:
                wan.cut("west<>east")
                threading.Timer(6.0, lambda: wan.mend("west<>east")).start()

        summary = run(
            rehearsal(60, timeout_s=4.0, outage_s=40.0),
            tmp_path / "run",
            on_step=on_step,
            wan=wan,
            rank_program=program,
        )
    assert [line["step"] for line in steps] == list(range(60))
    assert summary.num_steps == 60
    assert max(line["makespan_s"] for line in steps) > 3, "the cut was not felt"


@needs_wan
@pytest.mark.slow
def test_a_run_over_kernel_links_that_stay_cut_ends_with_the_link_and_the_limit(tmp_path):
    with Wan.up(["west", "east"], both_ways(latency_s=0.005, mbit_per_s=100), name=free_name()) as wan:
        steps = []

        def on_step(line):
            steps.append(line)
            if len(steps) == 3:
                wan.cut("west<>east")

        with pytest.raises(RunError, match=r"rank \d \(site (west|east)\) is lost: .* the limit is 3 s \(outage_s\)"):
            run(rehearsal(10_000, timeout_s=4.0, outage_s=3.0), tmp_path / "run", on_step=on_step, wan=wan)
