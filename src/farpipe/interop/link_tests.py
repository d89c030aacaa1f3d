"""Latency, bandwidth, loss and jitter of a link from what iperf3, ping, mtr, nccl-tests, perftest and qperf print."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.strict import parse_json, read_text, shaped
from farpipe.core.units import format_rate
from farpipe.interop.cells import inner, json_in, number, plain_number

_PING: Final = re.compile(r"(?:rtt|round-trip) min/avg/max\S* = ([\d.]+)/[\d.]+/[\d.]+(?:/([\d.]+))? ms")
"""The least round trip, and where it is told how far they spread (mdev, stddev)."""
_PING_COUNTS: Final = re.compile(r"^(\d+) [^\d\n]+, (\d+) [^\d\n]+, .*?%", re.MULTILINE)
"""Packets sent and received, in whatever language."""
_PING_HOST: Final = re.compile(r"^PING (\S+)(?: \(([^)\s]+)\))?", re.MULTILINE)
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
_NCCL_HOSTS: Final = re.compile(r"^#\s+Rank\s+\d+ .*?\bon\s+(\S+)\s+device", re.MULTILINE)
_RDMA_ENDS: Final = re.compile(r"^ *(?:local|remote) address: LID (\w+) .*(?:\n *GID: (\S+))?", re.MULTILINE)
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
_LOOPBACK: Final = re.compile(r"localhost|127(\.\d+){3}|::1")
_REACHED: Final = 0.9
"""Share of a rate asked for from which on a test says that the link has it, but not what it has."""
_OVERLOAD: Final = 0.05
"""Loss of UDP from which on more was sent than the link carries."""
_STEADY: Final = 0.01
"""Share of the latency below which round trips that differ are no jitter."""
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
    """Rate from the side that ran the test to the other; of tools that do not say, in any direction."""
    back_bytes_per_s: float | None = None
    """Rate in the other direction, where the test tells it."""
    loss: float | None = None
    jitter_s: float | None = None
    bound: str = ""
    """Reason for which the rate is a lower bound, in words."""
    note: str = ""
    """Sentence on what of the measurement does not become a figure of the link."""
    ends: tuple[str, str] = ("", "")
    """Hosts from which and to which it was run."""

    @property
    def origin(self) -> str:
        """The words for where a figure comes from."""
        return f"{self.tool}, {self.source}"


def read_link_test(path: Path) -> LinkTest | None:
    """The figures in the file at `path`; None for a file of no known tool, InputError for a test that failed or that
    was run on one machine."""
    text, name = _OF_TASKS.sub("", read_text(path)), path.name
    with shaped(str(path), "the output of a network tool"):
        if data := _stream(text) or json_in(text, str(path)):
            return next((found for read in (_iperf3, _mtr) if (found := read(data, name, str(path)))), None)
        readers: Iterable[Callable[[str, str], LinkTest | None]] = (_ping, _nccl, _perftest, _perftest_latency, _qperf)
        return next((found for read in readers if (found := read(text, name))), None)


def _stream(text: str) -> dict[str, Any] | None:
    """The start and the end of ``iperf3 --json-stream``; None for other texts."""
    if not text.lstrip().startswith('{"event":'):
        return None
    lines = [line for line in text.splitlines() if line.startswith('{"event":') and line.endswith("}")]
    events = [parse_json(line, "an event") for line in lines]
    found = {str(event.get("event")): event.get("data") for event in events if isinstance(event, dict)}
    return {name: data for name, data in found.items() if name in ("start", "end", "error")}


def _iperf3(data: Mapping[str, Any], name: str, source: str) -> LinkTest | None:
    """All streams together, as the receiver counts them; round trips as TCP of the sender saw them."""
    if not _is_iperf3(data):
        return None
    if "error" in data:
        raise InputError(f"{source}: iperf3 failed: {data['error']!s:.200}")
    connected = inner(data, "start", "connected", 0)
    ends = str(inner(connected, "local_host") or ""), str(inner(connected, "remote_host") or "")
    _expect_two_machines(source, "iperf3", ends[1] or str(inner(data, "start", "connecting_to", "host")), ends[0])
    there, back = _rates_of_iperf3(data["end"])
    if not there and not back:
        raise InputError(f"{source}: iperf3 received nothing (end.sum_received)")
    if inner(data, "start", "test_start", "reverse"):
        there, back = None, there
    streams = inner(data, "end", "streams")
    trips = [plain_number(inner(one, "sender", "min_rtt")) for one in streams] if isinstance(streams, list) else []
    latency_s = min(filter(None, trips), default=0.0) * 1e-6 / 2 or None
    bound = _cap_of_iperf3(data["start"], max(there or 0.0, back or 0.0))
    loss, jitter_s, note = _disturbance(data["end"], bool(bound))
    return LinkTest("iperf3", name, latency_s, there, back, loss, jitter_s, bound, note, ends)


def _is_iperf3(data: Any) -> bool:
    """True for an output of iperf3: its start or its end has what no other file has there."""
    marks = {"start": ("version", "connected", "test_start"), "end": ("sum_received", "sum_sent", "sum")}
    parts = {key: inner(data, key) for key in marks}
    of_iperf3 = [key for key, part in parts.items() if isinstance(part, Mapping) and part.keys() & {*marks[key]}]
    return bool(of_iperf3) and all(isinstance(part, Mapping) for part in parts.values() if "error" not in data)


def _rates_of_iperf3(end: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Bytes a second that arrived, and with ``--bidir`` those that arrived in the other direction."""
    there = plain_number(inner(end, "sum_received", "bits_per_second"))
    if not there and (sent := plain_number(inner(end, "sum", "bits_per_second"))):
        there = sent * (1 - (plain_number(inner(end, "sum", "lost_percent")) or 0.0) / 100)  # UDP until 3.10
    back = plain_number(inner(end, "sum_received_bidir_reverse", "bits_per_second"))
    return there / 8 if there else None, back / 8 if back else None


def _cap_of_iperf3(start: Mapping[str, Any], rate: float) -> str:
    """Reason for a lower bound: the sender was held to it (``-b``, ``--fq-rate``; UDP: 1 Mbit/s by default)."""
    of_test = {**start, **(inner(start, "test_start") or {})}
    caps = [plain_number(of_test.get(key)) or 0.0 for key in ("target_bitrate", "fq_rate")]
    asked = min(filter(None, caps), default=0.0) * (plain_number(of_test.get("num_streams")) or 1.0) / 8
    if asked and rate >= _REACHED * asked:
        return f"a lower bound, iperf3 was held to {format_rate(asked)}"
    is_unknown = of_test.get("protocol") == "UDP" and "target_bitrate" not in of_test
    return "a lower bound, UDP is sent at a fixed rate" if is_unknown else ""


def _disturbance(end: Mapping[str, Any], was_held: bool) -> tuple[float | None, float | None, str]:
    """Loss and jitter by iperf3's UDP, and a note where more was sent than the link carries."""
    part = next((one for key in ("sum_received", "sum") if "lost_percent" in (one := inner(end, key) or {})), {})
    loss = (plain_number(part.get("lost_percent")) or 0.0) / 100
    jitter_s = (plain_number(part.get("jitter_ms")) or 0.0) * 1e-3 or None
    if loss > _OVERLOAD and not was_held:
        return None, None, f"{loss:.1%} of iperf3's UDP packets were lost: taken as more than the link carries"
    return loss or None, jitter_s, ""


def _expect_two_machines(source: str, tool: str, *hosts: str) -> None:
    """InputError for a test from a machine to itself; `hosts` are its ends, as far as they are known."""
    known = [host for host in hosts if host]
    if any(_LOOPBACK.fullmatch(host) for host in known) or (len(known) > 1 and len({*known}) == 1):
        raise InputError(
            f"{source}: {tool} was run on one machine ({known[0]}): that is no link between sites; run it from a "
            "machine of one site to one of the other"
        )


def _mtr(data: Mapping[str, Any], name: str, source: str) -> LinkTest | None:
    """The last hop's least round trip."""
    last = inner(data, "report", "hubs", -1)
    if not isinstance(last, Mapping) or "host" not in last:
        return None
    lost = plain_number(last.get("Loss%")) or 0.0
    wanted, host = str(inner(data, "report", "mtr", "dst")), str(last["host"])
    if lost >= 100:
        raise InputError(f"{source}: mtr got no answer of the last hop, {host}")
    if wanted != host and _ADDRESS.fullmatch(wanted) and _ADDRESS.fullmatch(host):
        raise InputError(f"{source}: mtr ended at {host}, before {wanted}: allow more hops (-m)")
    _expect_two_machines(source, "mtr", wanted)
    best = plain_number(last.get("Best")) or plain_number(last.get("Avg"))
    if not best:
        raise InputError(f"{source}: mtr has no round trip of the last hop, {host} (Best)")
    latency_s = best * 1e-3 / 2
    return LinkTest("mtr", name, latency_s, loss=lost / 100 or None, jitter_s=_jitter_s(last.get("StDev"), latency_s))


def _jitter_s(spread_ms: Any, latency_s: float) -> float | None:
    """Jitter by the spread of round trips; None where it is next to nothing."""
    jitter_s = (plain_number(spread_ms) or 0.0) * 1e-3
    return jitter_s if jitter_s >= _STEADY * latency_s and jitter_s > 0 else None


def _ping(text: str, name: str) -> LinkTest | None:
    """The least round trip; lost packets and the spread of round trips as loss and jitter."""
    if _NO_ANSWER.search(text):
        raise InputError(f"{name}: ping got no answer")
    match = _PING.search(text)
    if match is None:
        return None
    host = _PING_HOST.search(text)
    _expect_two_machines(name, "ping", *((host[2] or host[1],) if host else ()))
    latency_s = number(match[1], f"{name}: ping") * 1e-3 / 2
    counts = _PING_COUNTS.search(text)
    sent, received = (int(counts[1]), int(counts[2])) if counts else (1, 1)
    loss = max(0.0, 1 - received / sent) if sent else 0.0
    return LinkTest(
        "ping",
        name,
        latency_s,
        loss=round(loss, 6) or None,
        jitter_s=_jitter_s(number(match[2] or "0", f"{name}: ping"), latency_s),
    )


def _nccl(text: str, name: str) -> LinkTest | None:
    """Bus bandwidth of the largest message, least time of a short one: what a link carries, whatever the collective."""
    head = _NCCL.search(text)
    if head is None:
        return None
    hosts = _NCCL_HOSTS.findall(text)
    if len(hosts) > 1 and len({*hosts}) == 1:
        raise InputError(
            f"{name}: all {len(hosts)} ranks of nccl-tests are on one machine ({hosts[0]}): that measures NVLink or "
            "PCIe, and no link between sites; run it with one machine of each site"
        )
    columns = head[1].split()  # neither every version nor every collective has redop and root
    time, busbw = columns.index("time"), columns.index("busbw")
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+\w+", line)]
    rows = [row for row in rows if len(row) > busbw and row[busbw] != "N/A"]
    if not rows:
        raise InputError(f"{name}: nccl-tests printed no row of figures")
    largest = max(rows, key=_num_bytes)
    rate = number(largest[busbw], f"{name}: busbw")
    if not rate:
        raise InputError(f"{name}: nccl-tests measured 0 {head[2]}: every process ran alone (build it with MPI=1)")
    times = [number(row[time], f"{name}: time") * 1e-6 for row in rows if _num_bytes(row) <= _SHORT_BYTES]
    note = "" if hosts else "nccl-tests does not say its hosts (first lines): taken as machines of two sites"
    return LinkTest("nccl-tests", name, min(times, default=None), rate * _unit(head[2], name), note=note)


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
    _expect_two_ports(text, name)
    num_directions = 2 if _BOTH_WAYS.search(text, 0, head.start()) else 1
    rate = number(max(rows, key=_num_bytes)[3], f"{name}: BW average")
    return LinkTest("perftest", name, None, rate * _UNITS[head[1]] / num_directions)


def _expect_two_ports(text: str, name: str) -> None:
    """InputError for a test of perftest from a port to itself."""
    ends = _RDMA_ENDS.findall(text)
    if len(ends) > 1 and len({*ends}) == 1 and (ends[0][1] or int(ends[0][0], 16)):
        _expect_two_machines(name, "perftest", *(gid or f"LID {lid}" for lid, gid in ends))


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
    _expect_two_ports(text, name)
    trips = 2 if _ROUND_TRIPS.search(text, 0, head.start()) else 1
    return LinkTest("perftest", name, number(row[place], f"{name}: {columns[place]}") * 1e-6 / trips)


def _qperf(text: str, name: str) -> LinkTest | None:
    """The largest rate and the least latency of short messages, of all tests and sizes in the file."""
    rates, latencies = list[float](), list[tuple[int, float]]()
    test = ""
    for title, kind, figure, unit in _QPERF.findall(text):
        value = number(figure.replace(",", "") or "0", f"{name}: qperf")
        if title:
            test = title
        elif kind == "msg_size" and latencies:
            latencies[-1] = round(value * _QPERF_SIZES.get(unit, 1)), latencies[-1][1]
        elif kind == "latency":
            latencies.append((0, value * _unit(unit, name) / (2 if _ROUND_TRIPS.fullmatch(test) else 1)))
        elif kind != "msg_size":
            rates.append(value * _unit(unit, name) / (2 if _BOTH_WAYS.fullmatch(test) else 1))
    short = [seconds for size, seconds in latencies if size <= _SHORT_BYTES]
    return LinkTest("qperf", name, min(short, default=None), max(rates, default=None)) if short or rates else None


def _unit(word: str, name: str) -> float:
    """Bytes a second, or seconds, of a unit; InputError for one that the tools do not print."""
    if word not in _UNITS:
        raise InputError(f"{name}: unit {word!r} is unknown; expected one of {', '.join(_UNITS)}")
    return _UNITS[word]
