"""Small payloads that have come in: those that someone will wait for, and those that are picked up some time."""

import time
from collections import defaultdict, deque
from typing import NamedTuple

from farpipe.transport.clock import PingTimes
from farpipe.transport.health import Health, Later, PeerError


class _ControlMessage(NamedTuple):
    peer: int
    payload: bytes
    deliver_ns: int
    """Arrival on an emulated link, machine's clock; 0: it is there."""


class ControlInbox:
    """Messages that arrived on the control connections of one rank."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._changed = health.condition()
        self._exchanged: defaultdict[tuple[str, int], deque[_ControlMessage]] = defaultdict(deque)
        self._posted: defaultdict[str, list[_ControlMessage]] = defaultdict(list)
        self._pongs: defaultdict[int, deque[PingTimes]] = defaultdict(deque)

    def put_exchange(self, peer: int, name: str, payload: bytes, deliver_ns: int) -> None:
        """`peer`'s part of the exchange `name`."""
        with self._changed:
            self._exchanged[name, peer].append(_ControlMessage(peer, payload, deliver_ns))
            self._changed.notify_all()

    def put_post(self, peer: int, name: str, payload: bytes, deliver_ns: int) -> None:
        """Something that `peer` posted."""
        with self._changed:
            self._posted[name].append(_ControlMessage(peer, payload, deliver_ns))

    def put_pong(self, peer: int, ping: PingTimes) -> None:
        """`peer`'s answer to a ping."""
        with self._changed:
            self._pongs[peer].append(ping)
            self._changed.notify_all()

    def depart(self, peer: int) -> None:
        """`peer` has said goodbye; who waits for it may give up."""
        self._health.depart(peer)
        with self._changed:
            self._changed.notify_all()

    def take_exchange(self, peer: int, name: str, deadline_s: float, context: str) -> bytes | None:
        """`peer`'s part of the exchange `name`; None when it is not there by `deadline_s` (monotonic)."""

        def find() -> bytes | Later | None:
            messages = self._exchanged.get((name, peer))
            if not messages:
                self._check_present(peer, context)
                return None
            if messages[0].deliver_ns > time.monotonic_ns():
                return Later(messages[0].deliver_ns)
            payload = messages.popleft().payload
            if not messages:
                del self._exchanged[name, peer]
            return payload

        with self._changed:
            return self._health.wait(self._changed, find, deadline_s, context)

    def take_pong(self, peer: int, deadline_s: float, context: str) -> PingTimes | None:
        """`peer`'s next answer; None when there is none by `deadline_s` (monotonic)."""

        def find() -> PingTimes | None:
            if pongs := self._pongs[peer]:
                return pongs.popleft()
            self._check_present(peer, context)
            return None

        with self._changed:
            return self._health.wait(self._changed, find, deadline_s, context)

    def _check_present(self, peer: int, context: str) -> None:
        if self._health.has_departed(peer):
            raise PeerError(f"{context}: that rank has ended its work")

    def take_posted(self, name: str) -> list[tuple[int, bytes]]:
        """Take the messages posted under `name` that have arrived, each once."""
        now_ns = time.monotonic_ns()
        with self._changed:
            messages = self._posted.pop(name, [])
            if later := [message for message in messages if message.deliver_ns > now_ns]:
                self._posted[name] = later
        return [(message.peer, message.payload) for message in messages if message.deliver_ns <= now_ns]
