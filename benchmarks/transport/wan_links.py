"""The kernel-level WAN on one machine: round trip, rate and CPU of emulated links. Prints JSON.

Two network namespaces, as `farpipe wan up` makes them. `round_trip_ms` is the median of single bytes there and back,
`late_us` what of it is not the link's. Rates are what arrives of plain Python sockets from the second on that TCP needs
to find the rate; a link's bandwidth counts IP packets with their headers, so at most 96.5 % of it can be data.
`forwarder_cpu` is the share of a core that the emulation takes meanwhile. Needs root and /dev/net/tun.
"""

import contextlib
import os
import socket
import statistics
import threading
import time
from typing import Any

from benchmarks.shared.kernel_wan import print_where_possible

CASES = ((0.020, 200e6), (0.050, 1e9), (0.005, 4e9))  # one-way seconds, bit/s
STREAMS = (1, 4)
NUM_ROUND_TRIPS = 30
WARM_UP_S, MEASURED_S = 2.0, 4.0
PORT = 5555
BLOCK_BYTES = 1 << 18


def main() -> None:
    print_where_possible(lambda: {"links": [measure(*case) for case in CASES]})


def measure(latency_s: float, bit_per_s: float) -> dict[str, Any]:
    """One row of the table."""
    from farpipe.core.spec import SiteLink
    from farpipe.engine.links import Wan

    speed = {"latency_s": latency_s, "bandwidth_bytes_per_s": bit_per_s / 8}
    links = [SiteLink(source=a, target=b, **speed) for a, b in (("west", "east"), ("east", "west"))]
    row: dict[str, Any] = {"latency_ms": latency_s * 1e3, "bandwidth_mbit_per_s": bit_per_s / 1e6}
    with Wan.up(["west", "east"], links, name=f"benchmark{os.getpid()}") as wan:
        round_trip_s = round_trip(*pairs(wan, 1)[0])
        row |= {"round_trip_ms": round_trip_s * 1e3, "late_us": (round_trip_s - 2 * latency_s) * 1e6}
        for streams in STREAMS:
            row |= {f"{name} {streams} streams": value for name, value in rate(wan, streams).items()}
    return row


def pairs(wan: Any, count: int) -> list[tuple[socket.socket, socket.socket]]:
    """Connections from west to east: both ends of each, in this process."""
    from farpipe.engine.links.tun import in_namespace

    west, east = (wan.namespaces[site] for site in ("west", "east"))
    found = []
    with east.listen(PORT) as listener:
        for _ in range(count):
            near = in_namespace(west.name, lambda: socket.create_connection((east.address, PORT), timeout=10))
            found.append((near, listener.accept()[0]))
    return found


def round_trip(near: socket.socket, far: socket.socket) -> float:
    """Seconds of a byte there and back."""
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found = []
    with near, far:
        for _ in range(NUM_ROUND_TRIPS):
            start_s = time.monotonic()
            near.sendall(b"x")
            far.sendall(far.recv(1))
            near.recv(1)
            found.append(time.monotonic() - start_s)
    return statistics.median(found)


def rate(wan: Any, streams: int) -> dict[str, float]:
    """Mbit/s that arrive, and the forwarder's share of a core."""
    counts = [0] * streams

    def send(sock: socket.socket) -> None:
        block = bytes(BLOCK_BYTES)
        with contextlib.suppress(OSError):  # the end of the measurement
            while True:
                sock.sendall(block)

    def receive(index: int, sock: socket.socket) -> None:
        block = bytearray(BLOCK_BYTES)
        with contextlib.suppress(OSError):
            while num_bytes := sock.recv_into(block):
                counts[index] += num_bytes

    connections = pairs(wan, streams)
    threads = [threading.Thread(target=send, args=(near,)) for near, _ in connections]
    threads += [threading.Thread(target=receive, args=(index, far)) for index, (_, far) in enumerate(connections)]
    for thread in threads:
        thread.start()
    time.sleep(WARM_UP_S)
    before, cpu_s, start_s = sum(counts), wan.status()["cpu_s"], time.monotonic()
    time.sleep(MEASURED_S)
    after, used_s, elapsed_s = sum(counts), wan.status()["cpu_s"] - cpu_s, time.monotonic() - start_s
    for near, far in connections:
        near.shutdown(socket.SHUT_RDWR)
        far.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for near, far in connections:
        near.close()
        far.close()
    return {"mbit_per_s": (after - before) * 8 / 1e6 / elapsed_s, "forwarder_cpu": used_s / elapsed_s}


if __name__ == "__main__":
    main()
