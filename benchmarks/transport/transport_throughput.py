"""Transport speed between two processes: throughput and latency by number of streams, plain, within TLS, and with an
emulated link. Prints JSON.

Per case: `large_gbit_per_s` of NUM_LARGE messages of LARGE_BYTES sent back to back, from the first byte to the last;
`small_latency_us` from send to arrival of SMALL_BYTES messages sent one at a time, and `send_us`, how long such a send
keeps the sender, both medians. On the emulated link `late_us` is how much later than its arrival a message was handed
over (median and 95th percentile), and the rate is to be held against the link's own, LINK_BYTES_PER_S. Both processes
and all their threads share the machine's cores; over loopback the kernel copies every byte twice.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

STREAMS = (1, 4, 16)
SITE = "here"
LARGE_BYTES, NUM_LARGE = 64 << 20, 8
SMALL_BYTES, NUM_SMALL = 4096, 200
LINK_LATENCY_S, LINK_BYTES_PER_S = 0.020, 125e6
EMULATED_BYTES, NUM_EMULATED = 1 << 20, 100


def main() -> None:
    from farpipe.engine.launch.launcher import launch
    from farpipe.engine.transport.security.authority import init, issue

    result: dict = {"large_bytes": LARGE_BYTES, "small_bytes": SMALL_BYTES}
    for link in ("plain", "tls", "emulated"):
        for streams in STREAMS:
            with tempfile.TemporaryDirectory() as folder:
                init(Path(folder) / "certs")
                issue(Path(folder) / "certs", SITE)
                command = [sys.executable, __file__, folder, str(streams), link]
                launch(lambda _, command=command: command, 2, log_dir=Path(folder))
                figures = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
            result.setdefault(link, {})[f"streams {streams}"] = figures[0] | figures[1]
    print(json.dumps(result))


def run_rank(folder: Path, streams: int, kind: str) -> None:
    """One side of a case; rank 0 sends, rank 1 receives, each leaves its figures in `folder`."""
    from farpipe.engine.links import LinkShape
    from farpipe.engine.rendezvous import rendezvous_from_env
    from farpipe.engine.transport import TransportConfig, connect
    from farpipe.engine.transport.security.tls import TlsFiles

    rank = int(os.environ["RANK"])
    links = {(0, 1): ("west>east", LinkShape(LINK_LATENCY_S, LINK_BYTES_PER_S))} if kind == "emulated" else {}
    tls = TlsFiles.find(folder / "certs", SITE) if kind == "tls" else None
    config = TransportConfig(streams=streams, links=links, tls=tls, sites=(SITE,) * 2)
    with connect(rank, 2, config, rendezvous_from_env()) as transport:
        figures = (measure_emulated if kind == "emulated" else measure_plain)(transport)
        transport.exchange("done", b"", waiting_for="the other side")
    (folder / f"{rank}.json").write_text(json.dumps(figures))


def measure_plain(transport) -> dict[str, float]:
    large, small = bytes(LARGE_BYTES), bytes(SMALL_BYTES)
    if transport.rank == 0:
        for number in range(NUM_LARGE):
            send(transport, number, large)
        transport.exchange("large", b"", waiting_for="the large messages")
        sends_us = [send(transport, NUM_LARGE + number, small, after_s=0.002) for number in range(NUM_SMALL)]
        return {"send_us": median(sends_us)}
    times = [receive(transport, number) for number in range(NUM_LARGE)]
    transport.exchange("large", b"", waiting_for="the large messages")
    span_ns = max(t.arrival_ns for t in times) - times[0].start_ns
    small_times = [receive(transport, NUM_LARGE + number) for number in range(NUM_SMALL)]
    return {
        "large_gbit_per_s": round(NUM_LARGE * LARGE_BYTES * 8 / span_ns, 2),
        "small_latency_us": median([(t.arrival_ns - t.ready_ns) / 1e3 for t in small_times]),
    }


def measure_emulated(transport) -> dict[str, float]:
    if transport.rank == 0:
        data = bytes(EMULATED_BYTES)
        return {"send_us": median([send(transport, number, data) for number in range(NUM_EMULATED)])}
    times, late_us = [], []
    for number in range(NUM_EMULATED):
        times.append(receive(transport, number))
        late_us.append((transport.clock.now_ns() - times[-1].start_ns) / 1e3 - passage_us())
    span_ns = times[-1].arrival_ns - times[0].arrival_ns
    return {
        "large_gbit_per_s": round(EMULATED_BYTES * 8 * (NUM_EMULATED - 1) / span_ns, 4),
        "late_us": median(late_us),
        "late_p95_us": round(statistics.quantiles(late_us, n=20)[-1], 1),
    }


def passage_us() -> float:
    """From the start of a message on the emulated link to its arrival."""
    return (LINK_LATENCY_S + EMULATED_BYTES / LINK_BYTES_PER_S) * 1e6


def send(transport, number: int, data: bytes, after_s: float = 0.0) -> float:
    """Send message `number`; how long that took, in microseconds."""
    from farpipe.engine.transport import Tag

    time.sleep(after_s)
    start = time.perf_counter()
    transport.send(1, "forward", Tag(0, 0, number), data)
    return (time.perf_counter() - start) * 1e6


def receive(transport, number: int):
    from farpipe.engine.transport import Tag

    return transport.receive(0, "forward", Tag(0, 0, number), waiting_for=f"message {number}").times


def median(values: list[float]) -> float:
    return round(statistics.median(values), 1)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        run_rank(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
