"""Bytes that one stream sends and receives, event by event: the test is its loop and its peer."""

import select
import socket
import time
from collections import deque
from contextlib import closing

import pytest

from farpipe.engine.transport.connection import Connection
from farpipe.engine.transport.loop import Loop
from farpipe.engine.transport.stream import Stream
from farpipe.engine.transport.wire import ACKNOWLEDGEMENT, FRAME, PADDING, PREFIX, STAMP, Frame
from waiting import wait_until

FRAGMENT_BYTES = 40_000
"""So long that a stream leaves the next fragment to another stream, if there is one that is free."""


class Calls(deque):
    """A loop that makes the calls that it was asked for when the test says so."""

    def ignore(self, *_, **__):
        """A stream's other wishes."""

    join = watch = forget = want = acknowledge_later = ignore
    call = deque.append

    def make(self):
        for _ in range(len(self)):
            self.popleft()()


class Fragments:
    """The ends of a stream: so many fragments to send, and the bodies that have come."""

    def __init__(self, num_fragments=0):
        self.waiting, self.num_pulled, self.num_acknowledged, self.come = num_fragments, 0, 0, []

    def pull(self):
        if self.num_pulled == self.waiting:
            return None
        self.num_pulled += 1
        return Frame(b"", bytes(FRAGMENT_BYTES))

    def acknowledged(self, frame):
        self.num_acknowledged += 1

    def begin(self, head, body_bytes):
        body = bytearray(body_bytes)
        return body, memoryview(body)

    def complete(self, known, end_ns):
        self.come.append(bytes(known))


def joined(ends):
    """A stream with a connection, its loop's calls, and the other end of the connection."""
    calls = Calls()
    stream = Stream(
        ends, calls, time.monotonic_ns, lambda stream, error: None, lambda stream, now_s: None, silence_s=5.0
    )
    calls.clear()
    return stream, calls, reconnect(stream)


def reconnect(stream):
    near, far = socket.socketpair()
    ticket, _ = stream.displace()
    assert stream.attach(Connection(near), ticket, stream.sender._num_acknowledged)
    stream._loop.make()
    return far


def test_an_acknowledgement_pulls_no_second_fragment_out_of_turn():
    ends = Fragments()
    stream, calls, far = joined(ends)
    with far, closing(stream):
        ends.waiting = 3
        stream.advance()
        assert ends.num_pulled == 1, "the next is for another stream"
        far.sendall(PREFIX.pack(ACKNOWLEDGEMENT, 0, 0, 1))
        stream.on_event(select.EPOLLIN)
        assert ends.num_acknowledged == 1
        assert ends.num_pulled == 1
        calls.make()
        assert ends.num_pulled == 2, "when the others had their turn"


def test_what_has_come_may_be_answered_at_once():
    ends = Fragments()
    stream, _, far = joined(ends)
    with far, closing(stream):
        ends.waiting = 1
        far.sendall(PREFIX.pack(FRAME, 0, 1, 0) + b"?" + STAMP.pack(0))
        stream.on_event(select.EPOLLIN)
        assert ends.come == [b"?"]
        assert ends.num_pulled == 1


@pytest.mark.parametrize("num_bytes", [0, 1, 99_999, 100_000])
def test_of_padding_that_was_cut_off_nothing_is_left_on_the_next_connection(num_bytes):
    ends = Fragments()
    stream, _, far = joined(ends)
    with far:
        far.sendall(PREFIX.pack(PADDING, 0, 100_000, 0) + bytes(num_bytes))
        stream.on_event(select.EPOLLIN)
    with reconnect(stream) as far, closing(stream):
        far.sendall(PREFIX.pack(FRAME, 0, 4, 0) + b"true" + STAMP.pack(0))
        stream.on_event(select.EPOLLIN)
        assert ends.come == [b"true"]


def test_a_call_that_asks_for_itself_again_and_again_holds_nobody_up():
    """As a connection does whose peer sends or takes as much as one can: others are served, and the time is kept."""
    ticks, give_up_s = [], time.monotonic() + 5.0

    class Member:
        def on_tick(self, now_s):
            ticks.append(now_s)

    loop = Loop("a test's", 0.01, lambda error: None)

    def busy():
        if not ticks and time.monotonic() < give_up_s:
            loop.call(busy)

    loop.call(busy)
    loop.join(Member())
    wait_until(lambda: ticks, "the loop had ticked")
    loop.close(time.monotonic() + 60)
    assert ticks
    assert ticks[0] < give_up_s
