"""Outages, reconnections and bursts of retransmissions leave events."""

import time

from farpipe.engine.figures.metrics import event_text
from farpipe.engine.transport import Tag
from farpipe.engine.transport.link_events import BURST_PACKETS, MAX_EVENTS, LinkEvent, LinkEventLog
from transports import connected
from waiting import wait_until


def test_connections_that_are_lost_together_are_one_outage():
    log = LinkEventLog()
    log.lost(3, "a", "it was closed")
    log.lost(3, "b", "timed out")
    log.lost(3, "a", "lost again while it was being made")
    log.restored(3, "a", 2, 1000)
    assert [event.kind for event in log.take()] == ["outage"]
    log.restored(3, "b", 1, 500)
    (event,) = log.take()
    assert (event.kind, event.peer, event.reason) == ("reconnection", 3, "it was closed")
    assert (event.num_connections, event.resent_frames, event.resent_bytes) == (2, 3, 1500)
    assert event.duration_s > 0
    assert log.take() == []


def test_a_first_connection_is_no_reconnection():
    log = LinkEventLog()
    log.restored(1, "a", 0, 0)
    assert log.take() == []


def test_outages_of_two_peers_are_two():
    log = LinkEventLog()
    log.lost(1, "a", "x")
    log.lost(2, "b", "y")
    log.restored(2, "b", 0, 0)
    assert [(event.kind, event.peer) for event in log.take()] == [("outage", 1), ("outage", 2), ("reconnection", 2)]


def test_an_outage_begins_when_something_was_heard_last():
    log = LinkEventLog()
    log.lost(1, "a", "nothing was heard", silent_s=30.0)
    log.restored(1, "a", 0, 0)
    outage, back = log.take()
    assert 30.0 <= back.duration_s < 60.0
    assert 30.0 <= back.unix_s - outage.unix_s < 60.0


def test_few_packets_sent_again_are_no_event_and_many_are_one():
    log = LinkEventLog()
    log.retransmitted(1, BURST_PACKETS - 1, 1000)
    log.retransmitted(2, BURST_PACKETS, 1000)
    (event,) = log.take()
    assert (event.kind, event.peer, event.num_packets, event.of_packets) == ("retransmissions", 2, BURST_PACKETS, 1000)
    assert event_text(event.to_data()) == "10 of 1000 packets sent again by TCP"


def test_events_that_nobody_takes_are_bounded():
    log = LinkEventLog()
    for _ in range(2 * MAX_EVENTS):
        log.retransmitted(1, 100, 1000)
    assert len(log.take()) == MAX_EVENTS


def test_an_event_survives_its_data():
    event = LinkEvent("reconnection", 5.0, 0, "it was closed", 10.2, num_connections=3)
    assert LinkEvent(**event.to_data()) == event
    assert event_text(event.to_data()) == "back after 10.2 s: 3 connections, 0 frames (0 B) sent again"


def test_a_broken_connection_is_told_by_both_ends_with_what_was_sent_again():
    with connected(streams=1) as (first, second):
        first.send(1, "forward", Tag(0, 0, 0), b"1")
        second.receive(0, "forward", Tag(0, 0, 0), waiting_for="the first")
        assert first.take_events() == []
        (outbox,) = first._outboxes.values()
        stream = outbox.reconnectors[0].stream
        stream.break_off(OSError("broken off by the test"))
        wait_until(lambda: stream.is_up, "the connection was made anew")
        first.send(1, "forward", Tag(0, 0, 1), b"2")
        second.receive(0, "forward", Tag(0, 0, 1), waiting_for="the second")
        lost, back = first.take_events()
        assert (lost.kind, lost.peer, lost.reason) == ("outage", 1, "sending forward messages: broken off by the test")
        assert (back.kind, back.num_connections) == ("reconnection", 1)
        assert abs(back.unix_s - time.time()) < 60
