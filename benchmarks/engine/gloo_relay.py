"""A WAN between two gloo ranks on one machine, without root: their TCP connection goes through a relay that shapes it.

Gloo ranks publish their addresses in torch's key-value store and connect pairwise. `ShapedStore` hands two of the ranks
a relay's address in place of each other's, and `Relay` passes bytes on with a rate and a one-way latency per direction.
What gloo does on top (asking for a message before it is sent, for one) then costs what it costs over a distance.
"""

import contextlib
import re
import socket
import threading
import time
from collections import deque
from typing import Final

import torch.distributed as dist

CHUNK_BYTES: Final = 8192
MAX_AHEAD_BYTES: Final = 4 << 20
"""The most that the relay takes in before it has passed it on: like the buffers of the sockets between."""
_LOW, _HIGH = "127.0.0.1", "127.1.1.1"
_SMALL_PORTS = range(10240, 30000, 256)  # smaller than any rank's own, whichever of the two bytes is compared first
_ADDRESS = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)


class Relay:
    """Passes connections on between rank `near` and rank `far`.

    Of two gloo ranks the one with the greater address connects. The relay in front of `near` has a smaller address than
    any rank, the one in front of `far` a greater one, so that both ranks agree who that is.
    """

    def __init__(self, store: dist.Store, near: int, far: int, latency_s: float, bytes_per_s: float) -> None:
        self.ranks, self._store = (near, far), store
        self._links = {way: _Link(latency_s, bytes_per_s) for way in ("there", "back")}
        self.addresses = {near: _listen(_LOW, _SMALL_PORTS), far: _listen(_HIGH, range(1))}
        for rank, listener in self.addresses.items():
            threading.Thread(target=self._accept, args=(rank, listener), daemon=True).start()
        for rank, listener in self.addresses.items():
            host, port = listener.getsockname()
            store.set(f"relay/{rank}", f"{host}:{port}")

    def _accept(self, rank: int, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            port = int(self._store.get(f"real port/{rank}"))
            other = socket.create_connection((_LOW, port))
            ways = ("there", "back") if rank == self.ranks[1] else ("back", "there")
            for source, target, way in ((sock, other, ways[0]), (other, sock, ways[1])):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _Pipe(source, target, self._links[way]).start()


def _listen(host: str, ports: range) -> socket.socket:
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((host, port))
    raise OSError(f"no free port on {host} in {ports}")


class _Link:
    """One direction: when bytes that come now are through, and when they arrive."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def arrival_s(self, num_bytes: int) -> float:
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._bytes_per_s
            return self._free_s + self._latency_s


class _Pipe:
    """Moves the bytes of one direction of one connection: a thread takes them in, another hands them on in time."""

    def __init__(self, source: socket.socket, target: socket.socket, link: _Link) -> None:
        self._source, self._target, self._link = source, target, link
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()

    def start(self) -> None:
        threading.Thread(target=self._take_in, daemon=True).start()
        threading.Thread(target=self._hand_on, daemon=True).start()

    def _take_in(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := self._source.recv(CHUNK_BYTES):
                with self._changed:
                    self._changed.wait_for(lambda: self._num_bytes < MAX_AHEAD_BYTES)
                    self._chunks.append((self._link.arrival_s(len(chunk)), chunk))
                    self._num_bytes += len(chunk)
                    self._changed.notify_all()
        with self._changed:
            self._chunks.append((0.0, b""))
            self._changed.notify_all()

    def _hand_on(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._chunks)
                    arrival_s, chunk = self._chunks.popleft()
                    self._num_bytes -= len(chunk)
                    self._changed.notify_all()
                time.sleep(max(0.0, arrival_s - time.monotonic()))
                if not chunk:
                    self._target.shutdown(socket.SHUT_WR)
                    return
                self._target.sendall(chunk)


class ShapedStore(dist.Store):
    """A rank's view of the store in which the address of the rank behind the relay is the relay's."""

    def __init__(self, inner: dist.Store, rank: int, ranks: tuple[int, int]) -> None:
        super().__init__()
        self._inner = inner
        self._behind = dict(zip(ranks, reversed(ranks), strict=True)).get(rank)
        self.num_rewritten = 0

    def get(self, key: str) -> bytes:
        value: bytes = self._inner.get(key)
        if self._behind is not None and key.rpartition("/")[2] == str(self._behind):
            return self._rewrite(value)
        return value

    def _rewrite(self, value: bytes) -> bytes:
        found = _ADDRESS.search(value)
        if found is None:
            return value
        self._inner.set(f"real port/{self._behind}", str(int.from_bytes(found[1])))
        host, port = self._inner.get(f"relay/{self._behind}").decode().split(":")
        self.num_rewritten += 1
        return _ADDRESS.sub(b"\x02\x00" + int(port).to_bytes(2) + socket.inet_aton(host), value)

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, value)

    def wait(self, *args: object) -> None:
        self._inner.wait(*args)

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def set_timeout(self, timeout: object) -> None:
        self._inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False
