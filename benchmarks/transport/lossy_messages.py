"""Delay of a message by lost packets and jitter: the transport over kernel links (network namespaces; needs root).
Prints JSON.

One message every `gap_s`, the first 20 left out. Late is what a message takes beyond the latency of its way and its
bytes over the bandwidth, in milliseconds at some quantiles, beside what `farpipe.planning.cost.lossy_links` says.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared.kernel_wan import print_where_possible

SITES = ("west", "east")
PROGRAM = (sys.executable, "-m", "benchmarks.transport.lossy_messages")
NUM_MESSAGES, NUM_LEFT_OUT = 300, 20


class Case(NamedTuple):
    latency_s: float
    bit_per_s: float
    message_bytes: int
    gap_s: float
    loss: float
    jitter_s: float = 0.0


CASES = (
    Case(0.020, 200e6, 500_000, 0.060, 0.0),
    Case(0.020, 200e6, 500_000, 0.060, 0.01),
    Case(0.020, 200e6, 500_000, 0.060, 0.001),
    Case(0.020, 200e6, 500_000, 0.060, 0.0, 0.010),
    Case(0.050, 1e9, 4_000_000, 0.120, 0.0),
    Case(0.050, 1e9, 4_000_000, 0.120, 0.01),
    Case(0.050, 1e9, 4_000_000, 0.120, 0.001),
)


def main() -> None:
    chosen = [CASES[int(n)] for n in sys.argv[1:]] or CASES
    print_where_possible(lambda: {"cases": [measure(case) for case in chosen]})


def measure(case: Case) -> dict[str, Any]:
    from farpipe.core.spec import SiteLink
    from farpipe.engine.launch.launcher import launch
    from farpipe.engine.links.wan import Wan

    figures = {"latency_s": case.latency_s, "bandwidth_bytes_per_s": case.bit_per_s / 8, "loss": case.loss}
    links = [SiteLink(source=a, target=b, jitter_s=case.jitter_s, **figures) for a, b in (SITES, SITES[::-1])]
    with tempfile.TemporaryDirectory() as name, Wan.up(list(SITES), links, name=f"bench{os.getpid()}") as wan:
        places = [wan.namespaces[site] for site in SITES]
        commands = [[*PROGRAM, "rank", name, place.address, json.dumps(case)] for place in places]
        launch(lambda rank: commands[rank], 2, log_dir=Path(name) / "logs", namespaces=places)
        late_s = json.loads((Path(name) / "1.json").read_text())
    return {**case._asdict(), "measured": figures_of(late_s), "modelled": figures_of(modelled(case))}


def modelled(case: Case) -> list[float]:
    from farpipe.planning.cost.lossy_links import LossyLink, lateness_s

    round_trip_s = 2 * case.latency_s + case.jitter_s
    link = LossyLink(case.latency_s, case.bit_per_s / 8, round_trip_s, case.loss, case.jitter_s)
    drawn = lateness_s(link, case.message_bytes, case.gap_s, (200, 128))
    return [float(one) for one in drawn[:, NUM_LEFT_OUT:].ravel()]


def figures_of(late_s: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(late_s, n=20)
    shown = {"mean": statistics.fmean(late_s), "p10": cuts[1], "p50": cuts[9], "p90": cuts[17], "p95": cuts[18]}
    return {name: round(seconds * 1e3, 1) for name, seconds in shown.items()}


def run_rank(folder: Path, host: str, case: Case) -> None:
    from farpipe.engine.launch.reports import reporting_errors
    from farpipe.engine.rendezvous import rendezvous_from_env
    from farpipe.engine.transport import Tag, TransportConfig, connect

    rank = int(os.environ["RANK"])
    rates = dict.fromkeys([(0, 1), (1, 0)], case.bit_per_s / 8)
    config = TransportConfig(host=host, allow_plaintext=True, sites=SITES, bandwidths=rates)
    late_s = []
    with reporting_errors(), connect(rank, 2, config, rendezvous_from_env()) as transport:
        if rank == 0:
            transport.open(1, "forward")
            transport.await_channels(20.0)
        transport.exchange("open", b"", waiting_for="the other side")
        begin_s = time.monotonic()
        for number in range(NUM_MESSAGES):
            if rank == 0:
                time.sleep(max(0.0, begin_s + number * case.gap_s - time.monotonic()))
                transport.send(1, "forward", Tag(0, 0, number), bytes(case.message_bytes))
            else:
                times = transport.receive(0, "forward", Tag(0, 0, number), waiting_for=f"message {number}").times
                late_s.append((times.arrival_ns - times.ready_ns) / 1e9)
        transport.exchange("done", b"", waiting_for="the other side")
    least_s = case.latency_s + case.message_bytes * 8 / case.bit_per_s
    (folder / f"{rank}.json").write_text(json.dumps([one - least_s for one in late_s[NUM_LEFT_OUT:]]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(Path(sys.argv[2]), sys.argv[3], Case(*json.loads(sys.argv[4])))
    else:
        main()
