"""A subscriber's session with one process that publishes, and the version that it has of that process's part."""

import dataclasses
import socket
import time
from typing import Final, Self, TypeVar

import numpy as np

from farpipe.core.errors import RunError
from farpipe.core.spec.part import Part
from farpipe.core.strict import parse_json, validate
from farpipe.engine.publish.coding import CodingError, Decoder
from farpipe.engine.publish.version import BITS, PartForm, Version, digest
from farpipe.engine.publish.words import (
    ANSWERS,
    CHANNEL,
    MAX_CHUNK_BYTES,
    MEET_S,
    OUTAGE_S,
    PUBLISHER,
    SUBSCRIBER,
    WISHES,
    Fetch,
    Greeting,
    Newest,
    Publication,
    Wish,
)
from farpipe.engine.transport import Tag, Transport, TransportConfig, connect
from farpipe.engine.transport.handshake import Purpose
from farpipe.engine.transport.pair import PairMeeting, dial, hear, say
from farpipe.engine.transport.security.tls import TlsFiles, site_of

ANSWER_S: Final = 60.0
"""Longest wait for an answer that a process can give at once, or for the next chunk."""
_BUFFER_BYTES: Final = 64 << 20
_POLL_S: Final = 0.005
Answer = TypeVar("Answer", bound=Part)


class GoneError(RunError):
    """The version that was asked for is no longer there; a newer one is."""


class DamagedError(RunError):
    """What came is not the version that was asked for."""


@dataclasses.dataclass(frozen=True)
class Reach:
    """How a subscriber reaches processes that publish: its token, certificate, site and own address."""

    token: bytes
    tls: TlsFiles | None = None
    site: str = ""
    host: str | None = None
    """Address to listen on; None: the one from which it reaches the process."""
    port: int = 0
    """First port to listen on, one for each process; 0: any that is free."""
    allow_plaintext: bool = False


class Source:
    """The session with the process at an address. Made by `open`; `close` it at the end."""

    def __init__(self, transport: Transport, where: str) -> None:
        self._transport, self._where = transport, where
        self._form: PartForm | None = None
        self._num_fetches = 0
        self._coming: tuple[int, Fetch, Version | None] | None = None
        self.wire_bytes = 0
        """Bytes of all chunks that have come."""
        self.is_delta = False
        """True if the version that was last begun is coded beside the base."""

    @classmethod
    def open(cls, address: tuple[str, int], reach: Reach, number: int = 0) -> Self:
        """Connect to the process at `address`, the session having this `number`.

        OSError where nobody answers, HandshakeError for another token, RefusedError where one side refuses the other.
        """
        where = f"{address[0]}:{address[1]}"
        with dial(address, reach.tls, reach.token, Purpose(SUBSCRIBER, PUBLISHER, None)) as sock:
            say(sock, {"site": reach.site})
            greeting = validate(Greeting, hear(sock, time.monotonic() + MEET_S), where)
            config = _config(sock, reach, site_of(sock) or greeting.site, number)
            meeting = PairMeeting(sock, SUBSCRIBER, reach.token, asks=True)
            return cls(connect(SUBSCRIBER, 2, config, meeting), where)

    def _wish(self, **words: object) -> None:
        self._transport.post(PUBLISHER, WISHES, Wish.model_validate(words).model_dump_json().encode())

    def _answer(self, kind: type[Answer], limit_s: float = ANSWER_S) -> Answer:
        """The next answer, of this `kind`."""
        begin_s = time.monotonic()
        while (found := self._poll(kind)) is None:
            if time.monotonic() > begin_s + limit_s + self._transport.paused_s():
                raise RunError(f"{self._where}: waited {limit_s:g} s for an answer ({kind.__name__})")
            time.sleep(_POLL_S)
        return found

    def _poll(self, kind: type[Answer]) -> Answer | None:
        """The answer if it has come; one wish is answered at a time."""
        found = self._transport.poll(ANSWERS)
        return validate(kind, parse_json(found[0][1].decode(), self._where), self._where) if found else None

    def publication(self) -> Publication:
        """What the training publishes, and where."""
        self._wish(wish="publication")
        return self._answer(Publication)

    def form(self) -> PartForm:
        """The pieces that this process has."""
        if self._form is None:
            self._wish(wish="form")
            self._form = self._answer(PartForm)
        return self._form

    def ask_newest(self, after: int) -> None:
        """Ask for the newest version, as soon as there is one after step `after`; see `newest`."""
        self._wish(wish="newest", after=after)

    def newest(self) -> Newest | None:
        """The answer to `ask_newest`, after a moment; None: not yet."""
        found = self._poll(Newest)
        if found is None:
            time.sleep(_POLL_S)
        return found

    def settled(self) -> None:
        """Say that all processes have been asked for the version that `newest` named."""
        self._wish(wish="settled")

    def begin(self, step: int, base: Version | None) -> None:
        """Ask for the version after `step` steps, coded beside `base` if the process still has that; see `receive`.

        GoneError where the process no longer has it.
        """
        self._num_fetches += 1
        of_base = {} if base is None else {"base": base.step, "base_sha256": base.sha256}
        self._wish(wish="fetch", step=step, fetch=self._num_fetches, **of_base)
        answer = self._answer(Fetch, 2 * ANSWER_S)
        if answer.sha256 is None:
            raise GoneError(f"{self._where}: the version of step {step} is no longer there")
        self._coming, self.is_delta = (step, answer, base if answer.is_delta else None), answer.is_delta

    def receive(self) -> tuple[Version, int]:
        """The version that was begun, and how many of its weights differ from its base's; all that comes is checked.

        DamagedError where its digest is another one, or the bytes make no sense.
        """
        assert self._coming is not None
        assert self._form is not None
        (step, answer, base), number = self._coming, 0
        values = np.empty(self._form.num_elements, BITS[self._form.weight_type])
        decoder = Decoder(values, None if base is None else base.values)
        try:
            while chunk := self._chunk(step, number):
                decoder.take(chunk)
                number += 1
        except CodingError as error:
            raise DamagedError(f"{self._where}: the version of step {step}: {error}") from None
        if not decoder.is_done or digest(values) != answer.sha256:
            raise DamagedError(f"{self._where}: the version of step {step} is not what was published")
        return Version(step, values), decoder.num_changed

    def _chunk(self, step: int, number: int) -> memoryview:
        tag = Tag(self._num_fetches, number, 0)
        what = f"the version of step {step} from {self._where}"
        data = self._transport.receive(PUBLISHER, CHANNEL, tag, waiting_for=what).data
        self.wire_bytes += len(data)
        return data

    def close(self) -> None:
        """Leave."""
        try:
            self._wish(wish="bye")
            self._transport.close()
        except RunError:
            self._transport.close()  # broken by now: nothing more is sent

    def abort(self) -> None:
        """Leave at once, in the middle of whatever it is."""
        self._transport.abort("the subscriber has ended")
        self._transport.close()


def _config(sock: socket.socket, reach: Reach, their_site: str, number: int) -> TransportConfig:
    return TransportConfig(
        host=reach.host or str(sock.getsockname()[0]),
        port=reach.port + number if reach.port else 0,
        tls=reach.tls,
        allow_plaintext=reach.allow_plaintext,
        sites=(reach.site, their_site) if reach.site and their_site else (),
        timeout_s=ANSWER_S,
        outage_s=OUTAGE_S,
        connect_timeout_s=MEET_S,
        max_message_bytes=MAX_CHUNK_BYTES,
        buffer_bytes=_BUFFER_BYTES,
    )
