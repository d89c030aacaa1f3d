"""Delay of messages by lost packets and jitter: against closed forms, the emulator and what others have measured."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_jobs import layout
from farpipe.core.spec import Cluster, SiteLink, preset_site
from farpipe.engine.links.pipe import Pipe
from farpipe.engine.transport.tcp import choose_streams
from farpipe.planning.cost.links import StepLinks
from farpipe.planning.cost.lossy_links import (
    LEAST_TIMEOUT_S,
    SEGMENT_BYTES,
    LossyLink,
    lateness_s,
    lossy_link,
    mean_lateness_s,
)

NEAR = LossyLink(latency_s=0.020, bandwidth_bytes_per_s=25e6, round_trip_s=0.040)
BYTES, ALONE = 500_000, math.inf
SHAPE = (400, 10)

links = st.builds(
    LossyLink,
    latency_s=st.just(0.0),
    bandwidth_bytes_per_s=st.floats(1e6, 1e9),
    round_trip_s=st.floats(0.001, 0.3),
    loss=st.floats(0, 0.2),
    jitter_s=st.floats(0, 0.05),
)


def test_nothing_is_late_where_nothing_is_lost_and_nothing_jitters():
    assert not lateness_s(NEAR, BYTES, 0.06, SHAPE).any()
    assert mean_lateness_s(NEAR, BYTES, 0.06) == 0.0
    assert NEAR.goodput_bytes_per_s == 25e6


@pytest.mark.parametrize("loss", [0.0005, 0.002])
def test_a_message_alone_is_on_time_when_no_packet_is_lost(loss):
    link = replace(NEAR, loss=loss)
    late_s = lateness_s(link, BYTES, ALONE, (20_000, 1))
    on_time = (1 - loss) ** link.packets_of(BYTES)
    assert (late_s == 0).mean() == pytest.approx(on_time, abs=0.02)
    one_round = late_s[(late_s > 0) & (late_s <= 0.040)]
    assert one_round.min() >= 0.040 - BYTES / link.goodput_bytes_per_s  # what was still to be sent went on meanwhile
    assert one_round.size > 0.8 * (late_s > 0).sum()


def test_a_single_packet_is_late_by_the_timeout():
    """All of a message is its tail: no other packet shows that it is lost."""
    late_s = lateness_s(replace(NEAR, loss=0.1), SEGMENT_BYTES, ALONE, (5000, 1))
    assert (late_s > 0).mean() == pytest.approx(0.1, abs=0.02)
    assert np.median(late_s[late_s > 0]) == pytest.approx(2 * 0.040 + LEAST_TIMEOUT_S)
    followed_s = lateness_s(replace(NEAR, loss=0.1), SEGMENT_BYTES, 0.06, (5000, 1))
    assert np.median(followed_s[followed_s > 0]) == pytest.approx(0.06 + 0.040), "the next message shows it"


@settings(deadline=None, max_examples=60)
@given(links, st.floats(1, 1e7), st.sampled_from([0.01, 0.1, ALONE]))
def test_more_loss_and_more_jitter_never_make_messages_earlier(link, num_bytes, gap_s):
    mean_s = mean_lateness_s(link, num_bytes, gap_s)
    assert mean_s >= 0
    worse = replace(link, jitter_s=link.jitter_s + 0.02)
    assert mean_lateness_s(worse, num_bytes, gap_s) >= mean_s
    assert mean_lateness_s(replace(link, loss=0.0), num_bytes, gap_s) <= mean_s * 1.1 + 1e-3
    assert replace(link, loss=0.5).goodput_bytes_per_s <= link.goodput_bytes_per_s


@given(links, st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_equal_seeds_draw_equal_and_rows_are_as_long_as_asked(link, seed):
    one, other = (lateness_s(link, BYTES, 0.1, (3, 300), seed) for _ in range(2))
    assert one.shape == (3, 300)
    assert np.array_equal(one, other)


def emulated(jitter_s, num_messages=400):
    """Arrival of the last burst of messages on the emulator's link, beyond that without jitter."""
    pipe = Pipe(SiteLink(source="a", target="b", latency_s=0.02, bandwidth_bytes_per_s=25e6, jitter_s=jitter_s))
    burst_bytes = round(NEAR.bandwidth_bytes_per_s / NEAR.num_connections / 1024)
    count, late_s = BYTES // burst_bytes, []
    for number in range(num_messages):
        begin_ns, arrival_ns = number * 10**9, 0
        for burst in range(count):
            pipe.offer(b"", burst_bytes, 8, begin_ns + round(burst * burst_bytes / 25e6 * 1e9))
        while (next_ns := pipe.next_arrival_ns) is not None or pipe.queued_bytes:
            arrival_ns = next_ns or arrival_ns
            pipe.take_arrived(next_ns or begin_ns + 10**9 - 1)
        late_s.append((arrival_ns - begin_ns) / 1e9 - 0.02 - count * burst_bytes / 25e6)
    return np.array(late_s)


@pytest.mark.parametrize("jitter_s", [0.0003, 0.002, 0.010])
def test_jitter_is_the_emulator_s(jitter_s):
    link = replace(NEAR, jitter_s=jitter_s)
    modelled, measured = lateness_s(link, BYTES, ALONE, (4000, 1)), emulated(jitter_s)
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(modelled, share) == pytest.approx(np.quantile(measured, share), abs=0.06 * jitter_s)


@pytest.mark.parametrize("round_trip_s", [0.0, 0.001, 0.04, 0.1, 0.3])
@pytest.mark.parametrize("rate", [1e6, 25e6, 125e6, 1.25e9])
def test_connections_are_as_many_as_the_transport_opens(monkeypatch, round_trip_s, rate):
    monkeypatch.setattr("farpipe.engine.transport.tcp.send_buffer_limit_bytes", lambda: 4 << 20)
    assert replace(NEAR, bandwidth_bytes_per_s=rate, round_trip_s=round_trip_s).num_connections == choose_streams(
        round_trip_s, rate
    )


def test_congestion_control_that_takes_losses_for_congestion_loses_nearly_all():
    """netperf over 100 ms with 1 % of loss (Dumazet, 2016): 3.3 Mbit/s under CUBIC, 9.2 of 10 Gbit/s under BBR."""
    far = LossyLink(0.050, 1.25e9, 0.1, loss=0.01)
    one_cubic = replace(far, congestion_control="cubic").goodput_bytes_per_s / far.num_connections * 8 / 1e6
    assert 1 < one_cubic < 4
    assert far.goodput_bytes_per_s * 8 / 1e9 == pytest.approx(9.9)


def test_reno_keeps_the_law_of_mathis():
    far = LossyLink(0.050, 1.25e9, 0.1, loss=0.0001, congestion_control="reno")
    each = SEGMENT_BYTES / 0.1 * math.sqrt(1.5 / 0.0001)
    assert far.goodput_bytes_per_s == pytest.approx(far.num_connections * each)
    cubic = replace(far, congestion_control="cubic")
    assert cubic.goodput_bytes_per_s > far.goodput_bytes_per_s


def test_the_round_trip_is_both_ways_with_half_of_the_jitter():
    sites = tuple(preset_site(name, "a100-80gb", 8) for name in "ab")
    there = SiteLink(source="a", target="b", latency_s=0.01, bandwidth_bytes_per_s=1e9, jitter_s=0.004, loss=0.01)
    back = SiteLink(source="b", target="a", latency_s=0.03, bandwidth_bytes_per_s=1e9)
    assert lossy_link(Cluster(sites=sites, links=(there, back)), there).round_trip_s == pytest.approx(0.042)
    assert lossy_link(Cluster(sites=sites, links=(there,)), there).round_trip_s == pytest.approx(0.024)
    assert lossy_link(Cluster(sites=sites, links=(there, back)), there).is_disturbed


def test_a_message_of_a_step_takes_its_link_at_its_goodput_and_is_late_in_the_mean():
    sites = tuple(preset_site(name, "a100-80gb", 8) for name in "ab")
    ways = [
        SiteLink(source=a, target=b, latency_s=0.01, bandwidth_bytes_per_s=1e9, loss=0.001) for a, b in ("ab", "ba")
    ]
    cluster = Cluster(sites=sites, links=tuple(ways))
    of_step = StepLinks(cluster, replace(layout(), replica_sites=("a", "b")), dict(enumerate(sites)))
    transfer, lossy = of_step.ring_over_sites(BYTES), lossy_link(cluster, ways[0])
    assert lossy.goodput_bytes_per_s < 1e9
    assert transfer.occupies_s == of_step.occupied_s(transfer) == BYTES / lossy.goodput_bytes_per_s
    late_s = mean_lateness_s(lossy, BYTES, math.inf)
    assert transfer.arrives_after_s == of_step.seconds(transfer) == transfer.occupies_s + 0.01 + late_s
