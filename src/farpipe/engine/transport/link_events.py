"""Events of a process's links beside messages: outages, reconnections, bursts of retransmitted packets."""

import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

MAX_EVENTS: Final = 1000
"""Events that wait to be taken; of more, the oldest are dropped."""
BURST_PACKETS: Final = 10
"""Fewer packets sent again between two calls of `take` are no event: a few are lost on every link."""

Kind = Literal["outage", "reconnection", "retransmissions"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True)
class LinkEvent:
    """One event on the link between this process and `peer`; fields that don't belong to its kind are zero."""

    kind: Kind
    """An outage is reported when it begins, a reconnection when the last of its connections is back."""
    unix_s: float
    """Time of the event, seconds since 1970."""
    peer: int
    reason: str = ""
    """Reason why the first connection was lost."""
    duration_s: float = 0.0
    """Duration of the outage that has ended."""
    num_connections: int = 0
    """TCP connections that were lost and made again."""
    resent_frames: int = 0
    """Frames sent a second time, for they had not arrived before the outage."""
    resent_bytes: int = 0
    num_packets: int = 0
    """Packets that TCP has sent again since the last step."""
    of_packets: int = 0
    """Packets sent since the last step."""

    def to_data(self) -> dict[str, Any]:
        """Data for JSON: what is not zero."""
        return {name: value for name, value in asdict(self).items() if value or name in ("peer", "unix_s")}


@dataclass
class _Outage:
    """The connections to one peer that are lost at the moment, and those that are back since the outage began."""

    since_s: float
    reason: str
    lost: set[object]
    num_connections: int = 0
    resent_frames: int = 0
    resent_bytes: int = 0


class LinkEventLog:
    """Collects the events of one process; may be used by several threads.

    Connections to one peer that are lost together are one outage: it begins with the first loss, and is over when all
    are back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[LinkEvent] = deque(maxlen=MAX_EVENTS)
        self._outages: dict[int, _Outage] = {}

    def lost(self, peer: int, connection: object, reason: str, silent_s: float = 0.0) -> None:
        """`connection`, one of those to `peer`, is gone, after `silent_s` seconds in which nothing was heard on it."""
        with self._lock:
            if peer not in self._outages:
                self._outages[peer] = _Outage(time.monotonic() - silent_s, reason, set())
                self._events.append(LinkEvent("outage", time.time() - silent_s, peer, reason))
            self._outages[peer].lost.add(connection)

    def restored(self, peer: int, connection: object, resent_frames: int, resent_bytes: int) -> None:
        """`connection` is back, and this number of frames is sent a second time; does nothing if it was never lost."""
        with self._lock:
            outage = self._outages.get(peer)
            if outage is None or connection not in outage.lost:
                return
            outage.lost.remove(connection)
            outage.num_connections += 1
            outage.resent_frames += resent_frames
            outage.resent_bytes += resent_bytes
            if not outage.lost:
                del self._outages[peer]
                self._events.append(
                    LinkEvent(
                        kind="reconnection",
                        unix_s=time.time(),
                        peer=peer,
                        reason=outage.reason,
                        duration_s=time.monotonic() - outage.since_s,
                        num_connections=outage.num_connections,
                        resent_frames=outage.resent_frames,
                        resent_bytes=outage.resent_bytes,
                    )
                )

    def retransmitted(self, peer: int, num_packets: int, of_packets: int) -> None:
        """TCP has sent `num_packets` again of `of_packets`; few are no event."""
        if num_packets >= BURST_PACKETS:
            with self._lock:
                self._events.append(
                    LinkEvent("retransmissions", time.time(), peer, num_packets=num_packets, of_packets=of_packets)
                )

    def take(self) -> list[LinkEvent]:
        """The events since the last call, in their order."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events
