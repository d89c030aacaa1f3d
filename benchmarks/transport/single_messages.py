"""Goodput of single messages after idle gaps over a far link: plain TCP, and the transport. Prints JSON.

Plain TCP is as Linux comes (CUBIC, slow start after idleness, buffers up to 4 and 6 MB), over one connection and over
eight; connections stay open. A message is sent `gap_s` after the last one has arrived. Its goodput is its bytes over
what it took beyond the latency; the share is that of the link's rate. "cold" is the first message of a connection,
"warm" the median of those after the first NUM_LEFT_OUT, beside it what farpipe.planning.cost.messages says. Kernel
links in network namespaces; needs root and /dev/net/tun.

    chrt -f 5 python -m benchmarks.transport.single_messages [ONE_WAY_MS ...]
"""

import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared.kernel_wan import print_where_possible
from benchmarks.transport.host_settings import set_defaults

SITES = ("west", "east")
PROGRAM = (sys.executable, "-m", "benchmarks.transport.single_messages")
NUM_MESSAGES, NUM_LEFT_OUT = 16, 6
ONE_WAY_MS = (1.0, 5.0, 10.0, 25.0, 50.0)
BIT_PER_S = 1e9
SIZES = (3_000_000, 8_000_000)
GAPS_S = (0.05, 0.15, 1.0)


class Case(NamedTuple):
    latency_s: float
    bit_per_s: float
    message_bytes: int
    gap_s: float

    @property
    def least_s(self) -> float:
        """Seconds of the bytes at the link's rate."""
        return self.message_bytes * 8 / self.bit_per_s


def main() -> None:
    one_way_ms = [float(word) for word in sys.argv[1:]] or ONE_WAY_MS
    cases = [
        Case(ms / 1e3, BIT_PER_S, *of) for ms, of in itertools.product(one_way_ms, itertools.product(SIZES, GAPS_S))
    ]
    print_where_possible(lambda: {"messages": [measure(case) for case in cases]})


def measure(case: Case) -> dict[str, Any]:
    """A row: the share of the link's rate that messages get."""
    from farpipe.core.spec import SiteLink
    from farpipe.engine.launch.launcher import launch
    from farpipe.engine.links.tun import in_namespace
    from farpipe.engine.links.wan import Wan

    figures = {"latency_s": case.latency_s, "bandwidth_bytes_per_s": case.bit_per_s / 8}
    links = [SiteLink(source=a, target=b, **figures) for a, b in (SITES, SITES[::-1])]
    row: dict[str, Any] = {
        "one_way_ms": case.latency_s * 1e3,
        "message_mb": case.message_bytes / 1e6,
        "gap_ms": case.gap_s * 1e3,
    }
    with tempfile.TemporaryDirectory() as name, Wan.up(list(SITES), links, name=f"bench{os.getpid()}") as wan:
        places = [wan.namespaces[site] for site in SITES]
        for place in places:
            in_namespace(place.name, set_defaults)
        for count in (1, 8):
            took_s = plain(places, case, count)
            row |= shares(f"plain {count}", case, took_s)
        commands = [[*PROGRAM, "rank", name, place.address, json.dumps(case)] for place in places]
        launch(lambda rank: commands[rank], 2, log_dir=Path(name) / "logs", namespaces=places)
        row |= shares("transport", case, json.loads((Path(name) / "1.json").read_text()))
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def shares(name: str, case: Case, took_s: Sequence[float]) -> dict[str, float]:
    """Of the first message, and the median of the later ones."""
    found = [case.least_s / (seconds - case.latency_s) for seconds in took_s]
    return {f"{name} cold": round(found[0], 3), f"{name} warm": round(statistics.median(found[NUM_LEFT_OUT:]), 3)}


def plain(places: Sequence[Any], case: Case, count: int) -> list[float]:
    """Seconds of every message over `count` connections."""
    from farpipe.engine.links.tun import in_namespace

    listener = places[1].listen(0)
    address = listener.getsockname()
    ends = []
    for _ in range(count):
        there = in_namespace(places[0].name, lambda: dial(address))
        ends.append((there, listener.accept()[0]))
    share = case.message_bytes // count
    took_s = []
    for _ in range(NUM_MESSAGES):
        arrived_s: list[float] = []
        takers = [threading.Thread(target=take, args=(end[1], share, arrived_s)) for end in ends]
        senders = [threading.Thread(target=end[0].sendall, args=(bytes(share),)) for end in ends]
        for thread in takers:
            thread.start()
        begin_s = time.monotonic()
        for thread in senders:
            thread.start()
        for thread in (*takers, *senders):
            thread.join()
        took_s.append(max(arrived_s) - begin_s)
        time.sleep(case.gap_s)
    for sock in (*itertools.chain(*ends), listener):
        sock.close()
    return took_s


def dial(address: tuple[str, int]) -> socket.socket:
    """A connection under CUBIC, whatever this machine's own default is."""
    sock = socket.create_connection(address, timeout=20.0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return sock


def take(sock: socket.socket, num_bytes: int, arrived_s: list[float]) -> None:
    """Receive `num_bytes`, and note when the last of them came."""
    buffer = memoryview(bytearray(1 << 18))
    while num_bytes > 0:
        num_bytes -= sock.recv_into(buffer, min(num_bytes, len(buffer)))
    arrived_s.append(time.monotonic())


def run_rank(folder: Path, host: str, case: Case) -> None:
    """A rank of the transport: the first sends."""
    from farpipe.engine.launch.reports import reporting_errors
    from farpipe.engine.rendezvous import rendezvous_from_env
    from farpipe.engine.transport import Tag, TransportConfig, connect

    rank = int(os.environ["RANK"])
    rates = dict.fromkeys([(0, 1), (1, 0)], case.bit_per_s / 8)
    config = TransportConfig(host=host, allow_plaintext=True, sites=SITES, bandwidths=rates)
    took_s = []
    with reporting_errors(), connect(rank, 2, config, rendezvous_from_env()) as transport:
        if rank == 0:
            transport.open(1, "forward")
            transport.await_channels(20.0)
        transport.exchange("open", b"", waiting_for="the other side")
        period_s = case.latency_s + case.least_s + case.gap_s
        begin_s = time.monotonic()
        for number in range(NUM_MESSAGES):
            if rank == 0:
                time.sleep(max(0.0, begin_s + number * period_s - time.monotonic()))
                transport.send(1, "forward", Tag(0, 0, number), bytes(case.message_bytes))
            else:
                times = transport.receive(0, "forward", Tag(0, 0, number), waiting_for=f"message {number}").times
                took_s.append((times.arrival_ns - times.ready_ns) / 1e9)
        transport.exchange("done", b"", waiting_for="the other side")
    (folder / f"{rank}.json").write_text(json.dumps(took_s))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(Path(sys.argv[2]), sys.argv[3], Case(*json.loads(sys.argv[4])))
    else:
        main()
