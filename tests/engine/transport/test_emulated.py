import time
from itertools import pairwise

import pytest

from farpipe.core.errors import InputError, RunError
from farpipe.engine.links import LinkShape
from farpipe.engine.transport import PeerError, Tag, TransportConfig
from farpipe.engine.transport.clock import Clock
from transports import both_ways, connected, in_parallel

MS = 1_000_000
SHAPE = LinkShape(latency_s=0.020, bandwidth_bytes_per_s=25e6)
HALF_MB = bytes(500_000)


def send_many(transport, peer, count, data=HALF_MB, kind="forward"):
    for i in range(count):
        transport.send(peer, kind, Tag(0, transport.rank, i), data)


def receive_many(transport, peer, count, kind="forward"):
    """The times of `count` messages, and how late each was handed over."""
    times, late_ns = [], []
    for i in range(count):
        times.append(transport.receive(peer, kind, Tag(0, peer, i), waiting_for=f"message {i}").times)
        late_ns.append(transport.clock.now_ns() - times[-1].arrival_ns)
    return times, late_ns


@pytest.mark.slow
@pytest.mark.alone
def test_messages_follow_each_other_at_the_rate_and_arrive_after_the_latency():
    with connected(links=both_ways(0, 1, SHAPE)) as (first, second):
        start_ns = time.monotonic_ns()
        first.send(1, "forward", Tag(1, 0, 0), bytes(20_000_000))  # 0.8 s: the others are sent meanwhile
        send_many(first, 1, 5)
        sent_ns = time.monotonic_ns()
        before = second.receive(0, "forward", Tag(1, 0, 0), waiting_for="the first").times
        times, late_ns = receive_many(second, 0, 5)
    assert before.start_ns >= before.ready_ns >= start_ns
    assert before.end_ns == before.start_ns + 800 * MS
    assert sent_ns < before.end_ns, "sending waited for the link"
    for i, message in enumerate(times):
        assert message.start_ns == before.end_ns + i * 20 * MS
        assert message.end_ns == message.start_ns + 20 * MS
        assert message.end_ns + 20 * MS <= message.arrival_ns < message.end_ns + 220 * MS
    assert min(late_ns) >= 0


def test_a_message_that_is_asked_for_late_is_handed_over_at_once():
    with connected(links=both_ways(0, 1, SHAPE)) as (first, second):
        send_many(first, 1, 1)
        time.sleep(0.5)
        before_ns = time.monotonic_ns()
        (times,), _ = receive_many(second, 0, 1)
    assert times.arrival_ns < before_ns < time.monotonic_ns() < before_ns + 2000 * MS


@pytest.mark.slow
def test_directions_do_not_share_the_rate():
    with connected(links=both_ways(0, 1, SHAPE)) as (first, second):
        send_many(first, 1, 25)
        send_many(second, 0, 2)
        there, back = receive_many(second, 0, 25)[0], receive_many(first, 1, 2)[0]
    assert back[0].start_ns < there[-1].start_ns
    assert back[1].end_ns < there[-1].end_ns


def test_kinds_share_the_link_but_not_their_queues():
    with connected(links=both_ways(0, 1, SHAPE)) as (first, second):
        send_many(first, 1, 20, kind="forward")
        send_many(first, 1, 1, kind="backward")
        forward, backward = receive_many(second, 0, 20)[0], receive_many(second, 0, 1, kind="backward")[0]
    assert backward[0].start_ns == forward[-1].end_ns


def test_two_rank_pairs_on_one_link_take_turns():
    links = {(0, 2): ("west>east", SHAPE), (1, 3): ("west>east", SHAPE)}
    with connected(4, links=links) as ranks:
        in_parallel(lambda: send_many(ranks[0], 2, 4), lambda: send_many(ranks[1], 3, 4))
        times = receive_many(ranks[2], 0, 4)[0] + receive_many(ranks[3], 1, 4)[0]
    passages = sorted((message.start_ns, message.end_ns) for message in times)
    assert all(later[0] >= earlier[1] for earlier, later in pairwise(passages))
    assert passages[-1][1] - passages[0][0] >= 8 * 20 * MS


def test_control_has_the_latency_but_does_not_wait_behind_data():
    with connected(links=both_ways(0, 1, SHAPE)) as ranks:
        for count in (0, 100, 0):  # the second time behind two seconds of data
            start_ns = time.monotonic_ns()
            send_many(ranks[0], 1, count)
            in_parallel(*(lambda r=r: r.exchange("norm", b"1234", waiting_for="the norm") for r in ranks))
            assert 20 * MS <= time.monotonic_ns() - start_ns < 1900 * MS


@pytest.mark.slow
def test_a_post_arrives_after_the_latency():
    with connected(links=both_ways(0, 1, LinkShape(0.2, 1e9))) as (first, second):
        start_s = time.monotonic()
        second.post(0, "report", b"x")
        while not (posts := first.poll("report")):
            assert time.monotonic() < start_s + 60
            time.sleep(0.002)
        assert time.monotonic() - start_s >= 0.2
        assert posts == [(1, b"x")]


def test_stamps_of_an_emulated_link_are_on_the_clocks_of_the_ranks():
    clocks = [Clock(5_000_000_000), Clock(-4_000_000_000)]
    with connected(links=both_ways(0, 1, SHAPE), clocks=clocks) as (first, second):
        send_many(first, 1, 1)
        (times,), _ = receive_many(second, 0, 1)
        offsets = first.clock_offsets()
    assert times.end_ns - times.start_ns == 20 * MS
    journey_ns = (times.arrival_ns + 4_000_000_000) - (times.end_ns - 5_000_000_000)
    assert 20 * MS <= journey_ns < 2000 * MS
    assert abs(offsets[1] + 9_000_000_000) < 10 * MS, "the emulated latency must not count"


@pytest.mark.slow
def test_what_is_on_the_way_longer_than_the_limit_is_overdue():
    with connected(links=both_ways(0, 1, LinkShape(0.8, 1e9)), timeout_s=0.3, connect_timeout_s=20.0) as (
        first,
        second,
    ):
        send_many(first, 1, 1)
        with pytest.raises(RunError, match=r"it did not come within 0\.3 s"):
            receive_many(second, 0, 1)


@pytest.mark.slow
def test_latency_does_not_delay_bad_news():
    with connected(links=both_ways(0, 1, LinkShape(10.0, 1e9))) as (first, second):
        start_s = time.monotonic()
        first.abort("the disk is full")
        with pytest.raises(PeerError, match="rank 0 gave up: the disk is full"):
            receive_many(second, 0, 1)
        assert time.monotonic() - start_s < 9, "the latency is 10 s"


def test_links_without_a_shape_are_only_names():
    with connected(links=both_ways(0, 1, None)) as (first, second):
        send_many(first, 1, 1, bytes(12))
        (times,), _ = receive_many(second, 0, 1)
    assert times.start_ns <= times.end_ns


def test_one_link_with_two_shapes_is_refused():
    with pytest.raises(InputError, match="link 'a>b' is given with two different shapes"):
        TransportConfig(links={(0, 1): ("a>b", SHAPE), (2, 3): ("a>b", LinkShape(0.5, 1e6))})


@pytest.mark.slow
def test_ranks_that_were_given_different_links_do_not_start():
    configs = [TransportConfig(links=both_ways(0, 1, LinkShape(0.02 * k, 1e6)), connect_timeout_s=1.0) for k in (1, 2)]
    with pytest.raises(InputError, match="the ranks were given different links"), connected(configs=configs):
        pass
