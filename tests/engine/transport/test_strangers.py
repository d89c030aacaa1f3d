"""Connections to a rank's port that do not belong to the run must neither break nor hold it up."""

import os
import random
import socket
import time
from contextlib import ExitStack, suppress

import pytest

from farpipe.engine.transport import PeerError, Tag, handshake
from farpipe.engine.transport.handshake import HandshakeError, Purpose
from farpipe.engine.transport.security.tls import RefusedError
from transports import connected


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(handshake, "LIMIT_S", 1.0)
    with connected(streams=1) as transports:
        yield transports


def address_of(transport):
    return transport._dialler._ranks[transport.rank].address


def knock(transport):
    return socket.create_connection(address_of(transport), timeout=60)


def was_closed(connection, within_s):
    """True if the other side has closed the connection, whatever it said before."""
    connection.settimeout(within_s)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def assert_still_works(pair):
    """A new channel can be opened, and something sent over it."""
    pair[0].send(1, "sync", Tag(0, 0, 0), b"01234")
    assert pair[1].receive(0, "sync", Tag(0, 0, 0), waiting_for="proof").data == b"01234"


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [1, 40, 10_000])
def test_random_bytes_are_turned_away(pair, num_bytes):
    with knock(pair[1]) as stranger:
        stranger.sendall(random.Random(num_bytes).randbytes(num_bytes))
        assert was_closed(stranger, within_s=60)
    assert_still_works(pair)


@pytest.mark.slow
def test_silent_and_half_open_connections_hold_nobody_up(pair):
    with ExitStack() as stack:
        strangers = [stack.enter_context(knock(pair[1])) for _ in range(20)]
        for stranger in strangers[::2]:
            stranger.sendall(b"farpipe\0\1")
        start_s = time.monotonic()
        assert_still_works(pair)
        assert time.monotonic() - start_s < 15.0, "one after the other, twenty of them take twenty seconds"
        assert all(was_closed(stranger, within_s=60) for stranger in strangers)


@pytest.mark.slow
def test_more_silent_connections_than_places_only_delay(pair):
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(knock(pair[1]))
        assert_still_works(pair)


@pytest.mark.slow
def test_dripping_bytes_do_not_prolong_the_limit(pair):
    with knock(pair[1]) as stranger:
        deadline_s = time.monotonic() + 60
        stranger.settimeout(0.05)
        with suppress(ConnectionError):
            while time.monotonic() < deadline_s:
                stranger.sendall(b"f")
                with suppress(TimeoutError):
                    if not stranger.recv(1):
                        break
        assert time.monotonic() < deadline_s, "it was still listened to"
    assert_still_works(pair)


def test_a_wrong_token_is_turned_away_by_both_sides(pair):
    with knock(pair[1]) as stranger, pytest.raises(HandshakeError, match="does not know this run's token"):
        handshake.offer(stranger, Purpose(0, 1, "forward"), os.urandom(32), 0)
    with knock(pair[1]) as stranger:
        stranger.sendall(handshake._HELLO.pack(b"farpipe\0", handshake.VERSION, 0, 0, 1, 0, bytes(16)))
        stranger.recv(48, socket.MSG_WAITALL)
        stranger.sendall(os.urandom(40))
        assert was_closed(stranger, within_s=60)
    assert_still_works(pair)


def test_an_answer_can_not_be_played_back_as_a_proof(pair):
    with knock(pair[1]) as stranger:
        stranger.sendall(handshake._HELLO.pack(b"farpipe\0", handshake.VERSION, 0, 0, 1, 0, bytes(16)))
        stranger.sendall(bytes(8) + stranger.recv(48, socket.MSG_WAITALL)[16:])
        assert was_closed(stranger, within_s=60)
    assert_still_works(pair)


def test_another_version_is_turned_away(pair):
    with knock(pair[1]) as stranger:
        stranger.sendall(handshake._HELLO.pack(b"farpipe\0", handshake.VERSION + 1, 0, 0, 1, 0, bytes(16)))
        assert was_closed(stranger, within_s=60)


@pytest.mark.parametrize("purpose", [Purpose(0, 0, "forward"), Purpose(1, 1, "forward"), Purpose(9, 1, None)])
def test_a_connection_for_someone_else_is_refused_with_the_reason(pair, purpose):
    with knock(pair[1]) as misled:
        with pytest.raises(RefusedError, match="this is rank 1 of 2, and the call is for"):
            handshake.offer(misled, purpose, pair[1]._dialler._token, 0)
        assert was_closed(misled, within_s=60)
    assert_still_works(pair)


def test_a_control_connection_dialled_by_the_wrong_side_is_refused(pair):
    with knock(pair[1]) as second, pytest.raises(RefusedError, match="rank 1 calls rank 0, and not vice versa"):
        handshake.offer(second, Purpose(0, 1, None), pair[1]._dialler._token, 0)
    assert_still_works(pair)


def test_a_rank_that_dials_again_takes_over_and_what_it_claims_is_checked(pair):
    pair[0].send(1, "forward", Tag(0, 0, 0), b"01234")
    pair[1].receive(0, "forward", Tag(0, 0, 0), waiting_for="the first")
    with knock(pair[1]) as second:
        assert handshake.offer(second, Purpose(0, 1, "forward"), pair[1]._dialler._token, 0) == 1
    pair[0].send(1, "forward", Tag(0, 0, 1), b"01234")
    assert pair[1].receive(0, "forward", Tag(0, 0, 1), waiting_for="proof").data == b"01234"
    with knock(pair[1]) as liar:
        handshake.offer(liar, Purpose(0, 1, "forward"), pair[1]._dialler._token, 100)
        assert was_closed(liar, within_s=60)


def test_a_rank_that_sends_nonsense_ends_the_run_with_its_name(pair):
    with knock(pair[1]) as rank:
        handshake.offer(rank, Purpose(0, 1, "forward"), pair[1]._dialler._token, 0)
        rank.sendall(b"nonsense" * 100)
        with pytest.raises(PeerError, match=r"rank 0 is lost: receiving forward messages: not a frame: b'nonsense'"):
            pair[1].receive(0, "forward", Tag(0, 0, 0), waiting_for="1F0")
