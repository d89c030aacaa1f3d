"""The transport over kernel links (network namespaces; needs root): 1 Gbit/s, 25 and 50 ms one way, within TLS 1.3.
Prints JSON.

Per case: `gbit_per_s_by_second`, what arrived in each second after the channel was opened, when the sender had
LARGE_BYTES messages ready from the start; `sustained_share`, the rate from the second second on over what the link
can carry; `small_idle_ms`, `small_busy_ms`: median time from send to arrival of SMALL_BYTES messages of another kind
while the link is idle and while it is full; `after_idle_ms` of half a megabyte after two idle seconds, and
`half_mb_ms`, the least it could take. IP headers are counted by the link: a stream carries 96.5 % of it at most. The
channel knows the link's rate, so its streams are paced.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

SITES = ("west", "east")
BYTES_PER_S = 125e6
LATENCIES_S = (0.025, 0.050)
HEADER_SHARE = 0.965
LARGE_BYTES, NUM_LARGE, NUM_BEHIND = 2 << 20, 260, 120
SMALL_BYTES, NUM_SMALL = 1024, 40
HALF_MB = 500_000


def main() -> None:
    print(json.dumps({f"{latency_s * 1e3:.0f} ms": measure_link(latency_s) for latency_s in LATENCIES_S}))


def measure_link(latency_s: float) -> dict:
    from farpipe.core.spec import SiteLink
    from farpipe.engine.launch.launcher import launch
    from farpipe.engine.links.wan import Wan
    from farpipe.engine.transport.security.authority import init, issue

    ends = (SITES, SITES[::-1])
    links = [SiteLink(source=a, target=b, latency_s=latency_s, bandwidth_bytes_per_s=BYTES_PER_S) for a, b in ends]
    with (
        tempfile.TemporaryDirectory() as name,
        Wan.up(list(SITES), links, name=f"bench{os.getpid()}") as wan,
    ):
        folder, places = Path(name), [wan.namespaces[site] for site in SITES]
        init(folder / "certs")
        for site in SITES:
            issue(folder / "certs", site)
        commands = [[sys.executable, __file__, name, place.address] for place in places]
        launch(lambda rank: commands[rank], 2, log_dir=folder / "logs", namespaces=places)
        figures = json.loads((folder / "1.json").read_text())
    figures["half_mb_ms"] = round((latency_s + HALF_MB / BYTES_PER_S) * 1e3, 1)
    return figures


def run_rank(folder: Path, host: str) -> None:
    """One side: rank 0 sends, rank 1 receives and leaves its figures in `folder`."""
    from farpipe.engine.launch.reports import reporting_errors
    from farpipe.engine.rendezvous import rendezvous_from_env
    from farpipe.engine.transport import TransportConfig, connect
    from farpipe.engine.transport.security.tls import TlsFiles

    rank = int(os.environ["RANK"])
    config = TransportConfig(
        host=host,
        tls=TlsFiles.find(folder / "certs", SITES[rank]),
        sites=SITES,
        bandwidths={(0, 1): BYTES_PER_S, (1, 0): BYTES_PER_S},
    )
    with reporting_errors(), connect(rank, 2, config, rendezvous_from_env()) as transport:
        figures = (send_all if rank == 0 else receive_all)(transport)
        transport.exchange("done", b"", waiting_for="the other side")
    (folder / f"{rank}.json").write_text(json.dumps(figures))


def send_all(transport) -> dict:
    from farpipe.engine.transport import Tag

    large, small, half = bytes(LARGE_BYTES), bytes(SMALL_BYTES), bytes(HALF_MB)
    for number in range(NUM_LARGE):
        transport.send(1, "forward", Tag(0, 0, number), large)
    transport.exchange("large", b"", waiting_for="the other side")
    time.sleep(2)
    transport.send(1, "forward", Tag(1, 0, 0), half)
    transport.send(1, "backward", Tag(1, 0, 0), small)
    transport.exchange("idle", b"", waiting_for="the other side")
    for step in (2, 3):
        for number in range(NUM_BEHIND if step == 3 else 0):
            transport.send(1, "forward", Tag(step, 0, number), large)
        time.sleep(1.0)
        for number in range(NUM_SMALL):
            time.sleep(0.02)
            transport.send(1, "backward", Tag(step, 0, number), small)
    return {}


def receive_all(transport) -> dict:
    begin_ns = transport.clock.now_ns()
    arrivals_s = [(receive(transport, "forward", 0, n).arrival_ns - begin_ns) / 1e9 for n in range(NUM_LARGE)]
    transport.exchange("large", b"", waiting_for="the other side")
    after_idle = receive(transport, "forward", 1, 0)
    receive(transport, "backward", 1, 0)
    transport.exchange("idle", b"", waiting_for="the other side")
    small = {step: [journey_ms(receive(transport, "backward", step, n)) for n in range(NUM_SMALL)] for step in (2, 3)}
    for number in range(NUM_BEHIND):
        receive(transport, "forward", 3, number)
    seconds = range(int(max(arrivals_s)))
    by_second = [sum(s <= arrival < s + 1 for arrival in arrivals_s) * LARGE_BYTES * 8 / 1e9 for s in seconds]
    later = sorted(arrival for arrival in arrivals_s if arrival >= 1)
    sustained = (len(later) - 1) * LARGE_BYTES / (later[-1] - later[0])
    return {
        "gbit_per_s_by_second": [round(rate, 3) for rate in by_second],
        "sustained_share": round(sustained / BYTES_PER_S, 3),
        "of_the_possible": round(sustained / BYTES_PER_S / HEADER_SHARE, 3),
        "small_idle_ms": round(statistics.median(small[2]), 1),
        "small_busy_ms": round(statistics.median(small[3]), 1),
        "after_idle_ms": round(journey_ms(after_idle), 1),
    }


def receive(transport, kind: str, step: int, number: int):
    from farpipe.engine.transport import Tag

    return transport.receive(0, kind, Tag(step, 0, number), waiting_for=f"message {number}").times


def journey_ms(times) -> float:
    """From send to arrival; both ranks are on one machine and have one clock."""
    return (times.arrival_ns - times.ready_ns) / 1e6


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main()
