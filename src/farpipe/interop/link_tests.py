"""Latency and bandwidth of a link from what iperf3, ping, mtr, nccl-tests, perftest and qperf print."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from farpipe.errors import InputError
from farpipe.spec import Job
from farpipe.strict import parse_json, read_text
from farpipe.units import format_rate

_PING: Final = re.compile(r"(?:rtt|round-trip) min/avg/max\S* = [\d.]+/([\d.]+)/[\d.]+\S* ms")
_QPERF: Final = re.compile(r"^\s*(?:(\w+):|(bw|recv_bw|latency|msg_size)\s*=\s*([\d.,]+)\s*(\S+))", re.MULTILINE)
"""Name of a test of qperf, or one of its figures; of what was sent and what was received, the latter."""
_QPERF_SIZES: Final = {"bytes": 1, "KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
_ROUND_TRIPS: Final = re.compile(r"RDMA_Read|Atomic|\w*(?:rdma_read|compare_swap|fetch_add)\w*")
"""Tests whose latency is a whole round trip: perftest divides the others by two, qperf counts their messages twice."""
_BOTH_WAYS: Final = re.compile(r"Bidirectional|\w*_bi_bw")
"""Tests whose rate is the sum of two directions."""
_PERFTEST: Final = re.compile(r"BW average\s*\[(MB|MiB|Gb)/sec\]")
_PERFTEST_LATENCY: Final = re.compile(r"#bytes\s+#iterations\s.*(?:t_typical|t_avg)\[usec\].*")
_NO_ANSWER: Final = re.compile(r"packets transmitted, 0 (?:packets )?received")
_NCCL: Final = re.compile(r"#\s+(size\s+count\s+type.*)\n#\s+\(B\).*\(us\)\s+\((\S+)\)", re.MULTILINE)
_OF_TASKS: Final = re.compile(r"^[ \t]*(?:\[\d+,\d+\]<std\w+>:|\d+: )", re.MULTILINE)
"""Prefix of every line by mpirun --tag-output and by srun --label."""
_ADDRESS: Final = re.compile(r"\d+(?:\.\d+){3}")
_UNITS: Final = {
    "MiB": 2.0**20,
    "MB": 2.0**20,
    "Gb": 1e9 / 8,  # perftest: its MB are 2^20 bytes
    "bytes/sec": 1.0,
    "KB/sec": 1e3,
    "MB/sec": 1e6,
    "GB/sec": 1e9,
    "Gb/sec": 1e9 / 8,
    "TB/sec": 1e12,
    "bits/sec": 1 / 8,
    "Kb/sec": 1e3 / 8,
    "Mb/sec": 1e6 / 8,
    "Tb/sec": 1e12 / 8,
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "sec": 1.0,
    "GB/s": 1e9,
}
"""Bytes a second, or seconds, of the units that the tools print."""
_SAME_RATE: Final = 0.1
"""Relative difference of two measurements of one link."""
_SHORT_BYTES: Final = 4096
"""Largest message whose time counts as latency."""


@dataclass(frozen=True)
class LinkTest:
    """Figures that a tool measured of a link; None for what it does not measure."""

    tool: str
    source: str
    latency_s: float | None = None
    """One way: half of a round trip."""
    bandwidth_bytes_per_s: float | None = None

    @property
    def origin(self) -> str:
        """The words for where a figure comes from."""
        return f"{self.tool}, {self.source}"


def read_link_test(path: Path) -> LinkTest | None:
    """The figures in the file at `path`; None for a file of no known tool, InputError for a test that failed."""
    text, name = _OF_TASKS.sub("", read_text(path)), path.name
    if text.lstrip().startswith("{"):
        data = _stream(text) or parse_json(text, str(path))
        return next((found for read in (_iperf3, _mtr) if (found := read(data, name, str(path)))), None)
    readers: Iterable[Callable[[str, str], LinkTest | None]] = (_ping, _nccl, _perftest, _perftest_latency, _qperf)
    return next((found for read in readers if (found := read(text, name))), None)


def _stream(text: str) -> dict[str, Any] | None:
    """The start and the end of ``iperf3 --json-stream``; None for other texts."""
    if not text.lstrip().startswith('{"event":'):
        return None
    events = [json.loads(line) for line in text.splitlines() if line.startswith('{"event":') and line.endswith("}")]
    return {event["event"]: event["data"] for event in events if event["event"] in ("start", "end", "error")}


def _iperf3(data: Mapping[str, Any], name: str, source: str) -> LinkTest | None:
    """All streams together, as the receiver counts them; round trips as TCP of the sender saw them."""
    if "start" not in data or not data.keys() & {"end", "error"}:
        return None
    if "error" in data:
        raise InputError(f"{source}: iperf3 failed: {data['error']}")
    end = data["end"]
    rate = (end.get("sum_received") or {}).get("bits_per_second")
    if not rate and (sent := end.get("sum")):  # UDP until 3.10: what was sent, with what of it was lost
        rate = sent.get("bits_per_second", 0) * (1 - sent.get("lost_percent", 0) / 100)
    if not rate:
        raise InputError(f"{source}: iperf3 received nothing (end.sum_received)")
    trips = [
        stream["sender"]["min_rtt"] for stream in end.get("streams", ()) if stream.get("sender", {}).get("min_rtt")
    ]
    latency_s = min(trips) * 1e-6 / 2 if trips else None
    return LinkTest("iperf3", name, latency_s, rate / 8)


def _mtr(data: Mapping[str, Any], name: str, source: str) -> LinkTest | None:
    """The last hop's mean round trip."""
    hubs = data.get("report", {}).get("hubs") if isinstance(data.get("report"), dict) else None
    if not hubs:
        return None
    if hubs[-1].get("Loss%", 0) >= 100:
        raise InputError(f"{source}: mtr got no answer of the last hop, {hubs[-1].get('host')}")
    wanted, last = str(data["report"].get("mtr", {}).get("dst")), str(hubs[-1].get("host"))
    if wanted != last and _ADDRESS.fullmatch(wanted) and _ADDRESS.fullmatch(last):
        raise InputError(f"{source}: mtr ended at {last}, before {wanted}: allow more hops (-m)")
    return LinkTest("mtr", name, hubs[-1]["Avg"] * 1e-3 / 2)


def _ping(text: str, name: str) -> LinkTest | None:
    if _NO_ANSWER.search(text):
        raise InputError(f"{name}: ping got no answer")
    match = _PING.search(text)
    return LinkTest("ping", name, float(match[1]) * 1e-3 / 2) if match else None


def _nccl(text: str, name: str) -> LinkTest | None:
    """Bus bandwidth of the largest message, least time of a short one: what a link carries, whatever the collective."""
    head = _NCCL.search(text)
    if head is None:
        return None
    columns = head[1].split()  # neither every version nor every collective has redop and root
    time, rate = columns.index("time"), columns.index("busbw")
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+\w+", line)]
    rows = [row for row in rows if len(row) > rate and row[rate] != "N/A"]
    if not rows:
        raise InputError(f"{name}: nccl-tests printed no row of figures")
    largest = max(rows, key=_num_bytes)
    if not float(largest[rate]):
        raise InputError(f"{name}: nccl-tests measured 0 {head[2]}: every process ran alone (build it with MPI=1)")
    times = [float(row[time]) * 1e-6 for row in rows if _num_bytes(row) <= _SHORT_BYTES]
    return LinkTest("nccl-tests", name, min(times, default=None), float(largest[rate]) * _unit(head[2], name))


def _num_bytes(row: list[str]) -> int:
    return int(row[0])


def _perftest(text: str, name: str) -> LinkTest | None:
    head = _PERFTEST.search(text)
    if head is None:
        return None
    rows = [
        line.split() for line in text[head.end() :].splitlines() if re.match(r"\s*\d+\s+\d+\s+[\d.]+\s+[\d.]+", line)
    ]
    if not rows:
        raise InputError(f"{name}: perftest printed no row of figures")
    num_directions = 2 if _BOTH_WAYS.search(text, 0, head.start()) else 1
    return LinkTest("perftest", name, None, float(max(rows, key=_num_bytes)[3]) * _UNITS[head[1]] / num_directions)


def _perftest_latency(text: str, name: str) -> LinkTest | None:
    """The typical time of the shortest message, one way; of a timed run (-D) the mean."""
    head = _PERFTEST_LATENCY.search(text)
    if head is None:
        return None
    columns = head[0].split()
    place = columns.index("t_typical[usec]") if "t_typical[usec]" in columns else columns.index("t_avg[usec]")
    rows = [line.split() for line in text[head.end() :].splitlines() if re.match(r"\s*\d+\s+\d+\s+[\d.]+", line)]
    if not rows:
        raise InputError(f"{name}: perftest printed no row of figures")
    row = min(rows, key=_num_bytes)
    if _num_bytes(row) > _SHORT_BYTES:
        raise InputError(f"{name}: the shortest message of perftest has {row[0]} bytes; measure latency with -s 2")
    trips = 2 if _ROUND_TRIPS.search(text, 0, head.start()) else 1
    return LinkTest("perftest", name, float(row[place]) * 1e-6 / trips)


def _qperf(text: str, name: str) -> LinkTest | None:
    """The largest rate and the least latency of short messages, of all tests and sizes in the file."""
    rates, latencies = list[float](), list[tuple[int, float]]()
    test = ""
    for title, kind, figure, unit in _QPERF.findall(text):
        number = float(figure.replace(",", "") or 0)
        if title:
            test = title
        elif kind == "msg_size" and latencies:
            latencies[-1] = round(number * _QPERF_SIZES.get(unit, 1)), latencies[-1][1]
        elif kind == "latency":
            latencies.append((0, number * _unit(unit, name) / (2 if _ROUND_TRIPS.fullmatch(test) else 1)))
        elif kind != "msg_size":
            rates.append(number * _unit(unit, name) / (2 if _BOTH_WAYS.fullmatch(test) else 1))
    short = [seconds for size, seconds in latencies if size <= _SHORT_BYTES]
    return LinkTest("qperf", name, min(short, default=None), max(rates, default=None)) if short or rates else None


def _unit(word: str, name: str) -> float:
    """Bytes a second, or seconds, of a unit; InputError for one that the tools do not print."""
    if word not in _UNITS:
        raise InputError(f"{name}: unit {word!r} is unknown; expected one of {', '.join(_UNITS)}")
    return _UNITS[word]


def mixed_units(tests: Iterable[LinkTest], known: Iterable[float] = ()) -> tuple[str, ...]:
    """Sentences on rates that are eight times another one: bits there and bytes here. `known` are rates of a job."""
    rates = [(test.bandwidth_bytes_per_s, test.origin) for test in tests if test.bandwidth_bytes_per_s]
    rates += [(rate, "the job") for rate in dict.fromkeys(known)]
    return tuple(
        f"{format_rate(high)} ({source}) is 8 times {format_rate(low)} ({other}): were bits and bytes mixed up?"
        for high, source in rates
        for low, other in rates
        if abs(high / low / 8 - 1) < _SAME_RATE
    )


def with_measured_links(job: Job, paths: Iterable[Path]) -> tuple[Job, tuple[str, ...]]:
    """The job with the figures in files in place of those of the link between its two sites, in both directions; and
    sentences on units that seem mixed up.

    InputError for a file of no known tool, and for a job with links between several pairs of sites.
    """
    tests = list[LinkTest]()
    for path in paths:
        if (test := read_link_test(path)) is None:
            raise InputError(f"{path}: no output of iperf3, ping, mtr, nccl-tests, perftest or qperf")
        tests.append(test)
    links = job.cluster.links
    if len({frozenset((link.source, link.target)) for link in links}) != 1:
        raise InputError(
            f"measured links: the job has links between {len(links)} pairs of sites, and the files name none; write "
            "the figures into cluster.links (`farpipe import FILE` prints them)"
        )
    latencies = [test.latency_s for test in tests if test.latency_s is not None]
    rates = [test.bandwidth_bytes_per_s for test in tests if test.bandwidth_bytes_per_s is not None]
    figures = {"latency_s": min(latencies, default=None), "bandwidth_bytes_per_s": max(rates, default=None)}
    update = {key: value for key, value in figures.items() if value is not None}
    cluster = job.cluster.model_copy(update={"links": tuple(link.model_copy(update=update) for link in links)})
    notes = mixed_units(tests, (link.bandwidth_bytes_per_s for link in links))
    return job.model_copy(update={"cluster": cluster, "text": ""}), notes


def link_of(tests: Iterable[LinkTest]) -> dict[str, tuple[str, str]]:
    """`latency` and `bandwidth` as a job.toml writes them, each with its origin.

    Of several figures the least latency and the largest bandwidth count: what the link does when nothing disturbs.
    """
    tests = list(tests)
    latencies = [(test.latency_s, test.origin) for test in tests if test.latency_s is not None]
    rates = [(test.bandwidth_bytes_per_s, test.origin) for test in tests if test.bandwidth_bytes_per_s is not None]
    found = {}
    if latencies:
        seconds, origin = min(latencies)
        found["latency"] = (f"{seconds * 1e3:.4g} ms", f"{origin}, one way")
    if rates:
        rate, origin = max(rates)
        found["bandwidth"] = (f"{rate * 8e-9:.4g} Gbit/s", origin)
    return found
