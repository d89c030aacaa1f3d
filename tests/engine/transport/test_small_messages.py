"""Over a link of the kernel's, small messages never wait behind big ones."""

import time
from statistics import median

import pytest

from farpipe.engine.links import Wan
from farpipe.engine.links.tun import in_namespace
from farpipe.engine.transport import Rendezvous, Tag, TransportConfig, connect
from transports import MemoryStore, in_parallel
from wans import both_ways, free_name, needs_wan

pytestmark = [needs_wan, pytest.mark.slow, pytest.mark.alone]

SITES = ("west", "east")
MBIT_PER_S = 40
BIG_BYTES = 10_000_000
"""Two seconds on the link."""
SMALL_S = 0.5
"""One way takes 0.02 s; the rest is for a busy machine."""


@pytest.mark.parametrize("paced", [True, False], ids=["paced", "not paced"])
def test_exchanges_and_messages_of_another_kind_pass_a_big_one(paced):
    links, store = both_ways(*SITES, latency_s=0.020, mbit_per_s=MBIT_PER_S), MemoryStore()
    with Wan.up(SITES, links, name=free_name()) as wan:

        def at(rank, do):
            return in_namespace(wan.namespaces[SITES[rank]].name, do)

        def join(rank):
            host, rate = wan.namespaces[SITES[rank]].address, MBIT_PER_S * 1e6 / 8
            rates = {(0, 1): rate, (1, 0): rate}
            config = TransportConfig(host=host, allow_plaintext=True, bandwidths=rates, paced=paced, timeout_s=20)
            return at(rank, lambda: connect(rank, 2, config, Rendezvous(store, rank, 2)))

        ranks = in_parallel(lambda: join(0), lambda: join(1))
        first, second = ranks
        at(0, lambda: first.open(1, "backward"))
        at(0, lambda: first.send(1, "forward", Tag(0, 0, 0), bytes(BIG_BYTES)))
        time.sleep(0.3)
        lasted_s = []
        for number in range(8):
            start_s = time.monotonic()
            in_parallel(*(lambda rank=rank: rank.exchange("norm", b"12345678", waiting_for="norm") for rank in ranks))
            lasted_s.append(time.monotonic() - start_s)
            at(0, lambda number=number: first.send(1, "backward", Tag(0, 0, number), bytes(16)))
            small = second.receive(0, "backward", Tag(0, 0, number), waiting_for="a small one").times
            lasted_s.append((small.arrival_ns - small.ready_ns) / 1e9)
        big = second.receive(0, "forward", Tag(0, 0, 0), waiting_for="the big one").times
        in_parallel(first.close, second.close)
    assert big.arrival_ns > small.arrival_ns, "nothing was in the way"
    assert median(lasted_s) < SMALL_S, lasted_s
