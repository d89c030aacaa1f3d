"""One subscriber's session with one process of a training: a thread that answers its wishes."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from farpipe.core.errors import RunError
from farpipe.core.spec.part import Part
from farpipe.core.strict import parse_json, validate
from farpipe.engine.publish.coding import blocks
from farpipe.engine.publish.version import PartForm, Shelf, Version
from farpipe.engine.publish.words import ANSWERS, CHANNEL, SUBSCRIBER, WISHES, Fetch, Newest, Publication, Wish
from farpipe.engine.transport import Tag, Transport
from farpipe.engine.transport.free_rate import FreeRate

ENDED: Final = "the process that publishes has ended"
_IDLE_S: Final = 0.02
_BEHIND_S: Final = 60.0
"""Longest wait for a version that another process has had: all take it after the same step."""


@dataclass
class Served:
    """What a session needs of its process."""

    publication: Publication
    form: PartForm
    shelf: Shelf
    rate: FreeRate
    is_closing: bool = False


class Session:
    """Answers one subscriber until it leaves, breaks, or the process closes."""

    def __init__(self, transport: Transport, served: Served) -> None:
        self._transport, self._served = transport, served
        self._wishes: deque[Wish] = deque()
        self._after: int | None = None
        self._has_left = False
        self._has: Version | None = None
        """Keeps the version that the subscriber has, or is getting."""

    def run(self) -> None:
        """Until the end of the session; RunError when it breaks."""
        try:
            while not self._is_over:
                self._hear()
                if self._wishes:
                    self._answer(self._wishes.popleft())
                else:
                    self._tell_newest()
                    time.sleep(_IDLE_S)
        finally:
            self._served.shelf.settled(self)
        if not self._has_left:
            raise RunError(ENDED)

    @property
    def _is_over(self) -> bool:
        return self._has_left or self._served.is_closing

    def _hear(self) -> None:
        """Take what the subscriber wishes; that it has settled and leaves counts at once."""
        for _, payload in self._transport.poll(WISHES):
            wish = validate(Wish, parse_json(payload.decode(), "a subscriber"), "a subscriber")
            if wish.wish == "settled":
                self._served.shelf.settled(self)
            elif wish.wish == "bye":
                self._has_left = True
            else:
                self._wishes.append(wish)

    def _answer(self, wish: Wish) -> None:
        if wish.wish == "publication":
            self._say(self._served.publication)
        elif wish.wish == "form":
            self._say(self._served.form)
        elif wish.wish == "newest":
            self._after = wish.after
            self._tell_newest()
        else:
            self._send_version(wish)

    def _say(self, words: Part) -> None:
        self._transport.post(SUBSCRIBER, ANSWERS, words.model_dump_json().encode())

    def _tell_newest(self) -> None:
        """Answer `newest`, if that is what the subscriber waits for and there is an answer."""
        if self._after is None:
            return
        has_ended = self._served.shelf.has_ended  # looked at first: no version comes after it
        step = self._served.shelf.tell(self, self._after)
        if step is not None or has_ended:
            self._after = None
            self._say(Newest(step=step))

    def _send_version(self, wish: Wish) -> None:
        version, base = self._served.shelf.take(wish.step, _BEHIND_S), None
        if wish.base is not None and wish.base_sha256 is not None:
            base = self._served.shelf.find(wish.base, wish.base_sha256)
        if version is None:
            self._say(Fetch())
            return
        self._has = version  # the base of what comes next
        self._say(Fetch(sha256=version.sha256, is_delta=base is not None))
        number = 0
        for chunk in self._chunks(version, base):
            self._send(Tag(wish.fetch, number, 0), chunk)
            number += 1
            if self._is_over:
                return
        self._send(Tag(wish.fetch, number, 0), memoryview(b""))

    def _chunks(self, version: Version, base: Version | None) -> Iterator[memoryview]:
        """Yield the coded version in parts that the link may carry at once."""
        rate, waiting = self._served.rate, bytearray()
        for block in blocks(version.values, None if base is None else base.values):
            waiting += block
            while len(waiting) >= (size := rate.chunk_bytes):
                yield memoryview(bytes(waiting[:size]))
                del waiting[:size]
        if waiting:
            yield memoryview(bytes(waiting))

    def _send(self, tag: Tag, chunk: memoryview) -> None:
        """Send it when the link may be used and there is space; what the subscriber wishes meanwhile is heard."""
        ready_s = time.monotonic() + self._served.rate.turn(len(chunk))
        while not self._is_over:
            self._hear()
            wait_s = ready_s - time.monotonic()
            if wait_s <= 0 and self._transport.has_space(SUBSCRIBER, CHANNEL, len(chunk)):
                self._transport.send(SUBSCRIBER, CHANNEL, tag, chunk)
                return
            time.sleep(min(max(wait_s, 0.001), _IDLE_S))
