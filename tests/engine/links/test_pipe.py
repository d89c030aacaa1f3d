from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.engine.links.pipe import MIN_QUEUE_BYTES, Pipe, queue_limit_bytes
from wans import link

MS = 1_000_000
PACKET = 25_000  # one millisecond at 200 Mbit/s


def offer(pipe, number, now_ns, num_bytes=PACKET):
    pipe.offer(bytes([number]), num_bytes, 1, now_ns)


def arrivals(pipe, step_ns=MS // 4, until_ns=1000 * MS):
    """(time, packet) of everything that arrives, looked at every quarter of a millisecond."""
    return [(now_ns, data[0]) for now_ns in range(0, until_ns, step_ns) for data in pipe.take_arrived(now_ns)]


def test_a_packet_takes_its_bytes_over_the_rate_and_then_the_latency():
    pipe = Pipe(link("a", "b", 0.020, 200))
    offer(pipe, 1, 5 * MS)
    assert pipe.next_arrival_ns == 26 * MS
    assert pipe.take_arrived(26 * MS - 1) == []
    assert pipe.take_arrived(26 * MS) == [b"\1"]


def test_packets_follow_each_other_and_their_latencies_overlap():
    pipe = Pipe(link("a", "b", 0.020, 200))
    for number in range(5):
        offer(pipe, number, 0)
    assert arrivals(pipe) == [((21 + number) * MS, number) for number in range(5)]


def test_what_does_not_fit_the_queue_is_dropped_but_an_idle_link_takes_anything():
    pipe = Pipe(link("a", "b", 0.0, 200, queue_bytes=2.5 * PACKET))
    offer(pipe, 0, 0, num_bytes=10 * PACKET)
    for number in range(1, 5):
        offer(pipe, number, 0)
    assert (pipe.counters.dropped_full, pipe.queued_bytes) == (2, 2 * PACKET)
    assert [number for _, number in arrivals(pipe)] == [0, 1, 2]
    assert (pipe.counters.packets, pipe.counters.bytes, pipe.queued_bytes) == (3, 12 * PACKET, 0)


def test_the_usual_queue_holds_a_round_trip_and_never_less_than_some_bursts():
    assert queue_limit_bytes(link("a", "b", 0.050, 1000)) == pytest.approx(12.5e6)
    assert queue_limit_bytes(link("a", "b", 0.0, 10_000)) == pytest.approx(2.5e6)
    assert queue_limit_bytes(link("a", "b", 0.001, 1)) == MIN_QUEUE_BYTES
    assert queue_limit_bytes(link("a", "b", 0.001, 1, queue_bytes=1500)) == 1500


def test_jitter_delays_by_less_than_it_says_and_keeps_the_order():
    pipe = Pipe(link("a", "b", 0.020, 200, jitter_s=0.010))
    for number in range(100):
        offer(pipe, number, number * 2 * MS)
    found = arrivals(pipe)
    delays = [time_ns - number * 2 * MS - 21 * MS for time_ns, number in found]
    assert [number for _, number in found] == list(range(100))
    assert min(delays) >= 0
    assert 8 * MS < max(delays) <= 10 * MS + MS // 4


def test_loss_takes_about_its_share_of_the_packets():
    pipe = Pipe(link("a", "b", 0.0, 200, loss=0.2))
    places = [place for _ in range(200) for place in pipe.lose(10)]
    assert 300 < len(places) == pipe.counters.dropped_lost < 500
    assert set(places) == set(range(10))
    assert Pipe(link("a", "b")).lose(10) == []


def test_a_new_rate_counts_for_what_waits_and_not_for_what_has_left():
    pipe = Pipe(link("a", "b", 0.020, 200))
    for number in range(3):
        offer(pipe, number, 0)
    pipe.change(link("a", "b", 0.020, 100), MS // 2)
    assert arrivals(pipe) == [(21 * MS, 0), (23 * MS, 1), (25 * MS, 2)]


def test_a_shorter_latency_lets_nothing_overtake():
    pipe = Pipe(link("a", "b", 0.050, 200))
    offer(pipe, 0, 0)
    pipe.change(link("a", "b", 0.001, 200), 2 * MS)
    offer(pipe, 1, 2 * MS)
    assert arrivals(pipe) == [(51 * MS, 0), (51 * MS, 1)]


def test_a_cut_drops_what_waits_what_is_under_way_and_what_comes():
    pipe = Pipe(link("a", "b", 0.020, 200))
    for number in range(3):
        offer(pipe, number, 0)
    pipe.cut()
    offer(pipe, 3, MS)
    assert arrivals(pipe) == []
    assert (pipe.counters.dropped_cut, pipe.queued_bytes, pipe.next_arrival_ns) == (4, 0, None)
    pipe.mend()
    offer(pipe, 4, 30 * MS)
    assert arrivals(pipe) == [(51 * MS, 4)]


links = st.builds(
    link,
    st.just("a"),
    st.just("b"),
    st.sampled_from([0.0, 0.001, 0.020]),
    st.sampled_from([1, 200, 100_000]),
    queue_bytes=st.sampled_from([None, 1.0, 50_000.0]),
    jitter_s=st.sampled_from([0.0, 0.005]),
)


@given(links, st.lists(links, max_size=3), st.integers(0, 2**32))
def test_whatever_happens_packets_keep_their_order_and_none_gets_lost_uncounted(first, later, seed):
    pipe, random, now_ns, taken = Pipe(first), Random(seed), 0, []
    changes = list(later)
    for number in range(60):
        now_ns += random.choice([0, 1, MS, 10 * MS])
        pipe.offer(bytes([number]), random.choice([40, 1500, 65_000]), 1, now_ns)
        if changes and random.random() < 0.1:
            pipe.change(changes.pop(), now_ns)
        taken += pipe.take_arrived(now_ns)
    while (arrives_ns := pipe.next_arrival_ns) is not None:
        taken += pipe.take_arrived(arrives_ns)
    counters = pipe.counters
    assert taken == sorted(taken)
    assert counters.packets == len(taken)
    assert counters.packets + counters.dropped_full == 60
    assert pipe.queued_bytes == 0
