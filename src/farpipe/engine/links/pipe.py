"""One emulated directed link: a queue, a transmitter with a rate, and packets on their way. Pure: time is passed in.

Times are nanoseconds of one clock that never goes back. Sizes are bytes on the wire, headers of every packet included.
"""

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Final

from farpipe.core.spec import SiteLink

MIN_QUEUE_S: Final = 0.002
MIN_QUEUE_BYTES: Final = 256 << 10
"""Four of the largest bursts that a kernel hands over at once."""


@dataclass
class Counters:
    """Counts of a link's packets by their fate."""

    packets: int = 0
    """Delivered."""
    bytes: int = 0
    """Delivered."""
    dropped_full: int = 0
    """The queue was full."""
    dropped_lost: int = 0
    """Lost at random."""
    dropped_cut: int = 0
    """The link was cut."""


def queue_limit_bytes(link: SiteLink) -> float:
    """Largest queue of `link`: as given, or its bandwidth times a round trip (the return taken for as long)."""
    if link.queue_bytes is not None:
        return link.queue_bytes
    return max(MIN_QUEUE_BYTES, link.bandwidth_bytes_per_s * max(MIN_QUEUE_S, 2 * link.latency_s))


class Pipe:
    """Packets of one direction between two sites, in order.

    Each takes bytes/bandwidth seconds of the transmitter, then the latency and a random part of the jitter. One that
    finds the queue full is dropped, but an idle transmitter takes any.
    """

    def __init__(self, link: SiteLink) -> None:
        self.link = link
        self.is_cut = False
        self.counters = Counters()
        self.queued_bytes = 0
        self._random = Random(link.name)
        self._queue: deque[tuple[int, int, int, bytes]] = deque()  # came at, bytes, packets, data
        self._in_flight: deque[tuple[int, int, int, bytes]] = deque()  # arrives at, bytes, packets, data
        self._free_ns = 0
        self._last_arrival_ns = 0
        self._read_link()

    def _read_link(self) -> None:
        self._latency_ns = self.link.latency_s * 1e9
        self._jitter_ns = self.link.jitter_s * 1e9
        self._ns_per_byte = 1e9 / self.link.bandwidth_bytes_per_s
        self._limit_bytes = queue_limit_bytes(self.link)

    def change(self, link: SiteLink, now_ns: int) -> None:
        """Change the link from now on; what has been transmitted already arrives as it would have."""
        self.transmit(now_ns)
        self.link = link
        self._read_link()

    def cut(self) -> None:
        """Drop everything, also what is under way, until `mend`."""
        self.is_cut = True
        self.counters.dropped_cut += sum(packets for _, _, packets, _ in (*self._queue, *self._in_flight))
        self._queue.clear()
        self._in_flight.clear()
        self.queued_bytes = 0

    def mend(self) -> None:
        """Carry packets again."""
        self.is_cut = False
        self._free_ns = 0

    def lose(self, num_packets: int) -> list[int]:
        """Choose those of `num_packets` on the link that are lost at random: their places, from 0."""
        share = self.link.loss
        if not share or self.is_cut:
            return []
        lost = [place for place in range(num_packets) if self._random.random() < share]
        self.counters.dropped_lost += len(lost)
        return lost

    def offer(self, data: bytes, num_bytes: int, num_packets: int, now_ns: int) -> None:
        """`num_packets` come to the link at `now_ns`, together `num_bytes` on the wire; it takes or drops them all."""
        self.transmit(now_ns)
        if self.is_cut:
            self.counters.dropped_cut += num_packets
        elif self._queue and self.queued_bytes + num_bytes > self._limit_bytes:
            self.counters.dropped_full += num_packets
        else:
            self._queue.append((now_ns, num_bytes, num_packets, data))
            self.queued_bytes += num_bytes
            self.transmit(now_ns)

    def take_arrived(self, now_ns: int) -> list[bytes]:
        """The packets that have arrived by `now_ns` and were not taken yet."""
        self.transmit(now_ns)
        arrived = []
        while self._in_flight and self._in_flight[0][0] <= now_ns:
            _, num_bytes, num_packets, data = self._in_flight.popleft()
            self.counters.packets += num_packets
            self.counters.bytes += num_bytes
            arrived.append(data)
        return arrived

    @property
    def next_arrival_ns(self) -> int | None:
        """Time at which there will be something to take; None while no packet is being carried.

        Nothing can wait in the queue then: the transmitter would have been free for it.
        """
        return self._in_flight[0][0] if self._in_flight else None

    def transmit(self, now_ns: int) -> None:
        """Put on their way the packets whose transmission has begun by `now_ns`."""
        while self._queue:
            came_ns, num_bytes, num_packets, data = self._queue[0]
            start_ns = max(self._free_ns, came_ns)
            if start_ns > now_ns:
                return
            self._queue.popleft()
            self.queued_bytes -= num_bytes
            self._free_ns = start_ns + round(num_bytes * self._ns_per_byte)
            delay_ns = self._latency_ns + (self._random.random() * self._jitter_ns if self._jitter_ns else 0.0)
            # in order, also where jitter or a latency that has just become shorter would let one overtake another
            self._last_arrival_ns = max(self._last_arrival_ns, self._free_ns + round(delay_ns))
            self._in_flight.append((self._last_arrival_ns, num_bytes, num_packets, data))
