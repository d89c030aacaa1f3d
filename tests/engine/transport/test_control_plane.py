"""The control plane of more processes than a tree has in one level, at several sites."""

import time
from functools import partial

import pytest

from farpipe.core.errors import RunError
from farpipe.engine.transport import PeerError, TransportConfig
from farpipe.engine.transport.clock import Clock
from transports import connect_all, connected, in_parallel
from waiting import wait_until

SITES = tuple("west" if rank < 13 else "east" for rank in range(24))
NUM_RANKS = len(SITES)


def config(**settings):
    return TransportConfig(**{"timeout_s": 100.0, "connect_timeout_s": 100.0, "sites": SITES} | settings)


@pytest.fixture(scope="module")
def ranks():
    clocks = [Clock(1_000_000_000 * rank) for rank in range(NUM_RANKS)]
    with connected(NUM_RANKS, configs=[config()] * NUM_RANKS, clocks=clocks) as transports:
        yield transports


def test_an_exchange_gives_everybody_everything_by_rank_again_and_again(ranks):
    for turn in range(5):
        parts = [bytes([rank, turn]) * (rank % 5) * 100 for rank in range(NUM_RANKS)]
        found = in_parallel(*(partial(t.exchange, "norm", parts[t.rank], waiting_for="the norm") for t in ranks))
        assert found == [parts] * NUM_RANKS


@pytest.mark.slow
def test_what_is_posted_before_an_exchange_is_there_after_it(ranks):
    def one(transport, turn):
        for peer in range(NUM_RANKS):
            transport.post(peer, f"topic {turn}", bytes([transport.rank]))
        transport.exchange("end of the step", b"x" * 10, waiting_for="the others")
        return sorted(transport.poll(f"topic {turn}"))

    for turn in range(5):
        found = in_parallel(*(partial(one, transport, turn) for transport in ranks))
        assert found == [[(rank, bytes([rank])) for rank in range(NUM_RANKS)]] * NUM_RANKS


@pytest.mark.parametrize("asks", [0, 12, 23])
def test_clocks_are_compared_through_others(ranks, asks):
    offsets = ranks[asks].clock_offsets()
    assert [round(offset / 1e9, 1) for offset in offsets] == list(range(NUM_RANKS))


def test_few_connections_stand(ranks):
    assert sum(len(transport._control.reconnectors) for transport in ranks) == 2 * (NUM_RANKS - 1)


def test_everybody_hears_why_one_gives_up():
    transports = connect_all(NUM_RANKS, configs=[config()] * NUM_RANKS)

    def wait(transport):
        with pytest.raises(PeerError, match="rank 22 gave up: the disk is full"):
            transport.exchange("never", b"", waiting_for="what never comes")

    def give_up():
        time.sleep(0.2)
        transports[22].abort("the disk is full")

    in_parallel(give_up, *(partial(wait, transport) for transport in transports if transport.rank != 22))
    in_parallel(*(transport.close for transport in transports))


@pytest.mark.slow
def test_the_one_that_is_late_is_named():
    transports = connect_all(NUM_RANKS, configs=[config(timeout_s=1.0)] * NUM_RANKS)
    late = 12  # two levels below the leader of its site
    assert transports[late]._control.topology.parent not in (None, 0)

    def wait(transport):
        with pytest.raises(RunError, match="waited for rank 12 in the exchange 'norm'"):
            transport.exchange("norm", b"", waiting_for="the norm")

    in_parallel(*(partial(wait, transport) for transport in transports if transport.rank != late))
    in_parallel(*(transport.close for transport in transports))


@pytest.mark.slow
def test_a_process_through_which_others_talk_stays_until_they_have_left():
    transports = connect_all(NUM_RANKS, configs=[config()] * NUM_RANKS)
    relays = [transport for transport in transports if transport._control.topology.is_relay]
    others = [transport for transport in transports if not transport._control.topology.is_relay]
    assert relays

    def post_and_leave(transport):
        time.sleep(0.5)
        transport.post(others[-1].rank, "last words", b"!")
        if transport is not others[-1]:
            transport.close()

    def listen():
        found = []
        wait_until(lambda: found.extend(others[-1].poll("last words")) or len(found) >= len(others), "all had posted")
        others[-1].close()
        return sorted(rank for rank, _ in found)

    start_s = time.monotonic()
    results = in_parallel(
        listen, *(transport.close for transport in relays), *(partial(post_and_leave, t) for t in others)
    )
    assert results[0] == [transport.rank for transport in others]
    assert time.monotonic() - start_s < 80, "a farewell was lost: somebody waited for it until the limit, 100 s"
