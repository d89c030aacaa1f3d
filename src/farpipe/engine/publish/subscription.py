"""A subscription to a training's weights: connected to every process that publishes, again after every outage."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

from torch import Tensor

from farpipe.core.errors import FarpipeError, InputError, RunError
from farpipe.core.units import format_bytes
from farpipe.engine.launch.host_memory import free_memory
from farpipe.engine.publish.pieces import assembled, expect_whole
from farpipe.engine.publish.source import DamagedError, GoneError, Reach, Source
from farpipe.engine.publish.version import PartForm, Version
from farpipe.engine.publish.words import Publication
from farpipe.engine.transport.handshake import HandshakeError
from farpipe.engine.transport.security.tls import RefusedError

Address = tuple[str, int]
"""Host and port."""
MAX_DAMAGED: Final = 3
"""Times in a row that a version arrives damaged before the subscription ends with an error."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_LEAVE_S: Final = 0.5


@dataclass(frozen=True)
class Received:
    """One version of the whole model's weights."""

    step: int
    """Steps that the training had done."""
    tensors: dict[str, Tensor]
    """By name in the whole model, equal to the bit to what was published; read them, but don't write to them."""
    publication: Publication
    wire_bytes: int
    """Bytes that came for this version."""
    whole_bytes: int
    """Bytes of all weights."""
    num_changed: int | None
    """Weights that differ from the version before; None where not every process had that one to compare."""


class Subscription:
    """Receives versions in a thread of its own; always the newest, of which the caller takes those it has time for.

    May be used by several threads, of which each version goes to one.
    """

    def __init__(
        self, locate: Callable[[], tuple[Address, Reach]], *, patience_s: float = 600.0, max_bytes: int | None = None
    ) -> None:
        """`locate` says where the first process is, for every connection anew.

        `patience_s`: longest time without a connection. `max_bytes`: of all weights; None: half of what is free.
        """
        self._locate, self._patience_s, self._max_bytes = locate, patience_s, max_bytes
        self._address, self._reach = locate()
        self._held: dict[str, Version] = {}
        """The newest version of every part, by the digest of its form."""
        self._publication: Publication | None = None
        self._step = -1
        self._sources: list[Source] = []
        self._num_damaged = 0
        self._newest: Received | None = None
        self._error: FarpipeError | None = None
        self._has_ended = self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="farpipe subscription", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float | None = None) -> Received | None:
        """The newest version that was not taken yet, waiting for one if need be.

        None after `timeout_s`, and when the training has ended. RunError when it can't be reached for `patience_s` or
        when what comes stays damaged; InputError for another training, and for one too large for this machine.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._newest or self._error or self._has_ended, timeout_s)
            found, self._newest = self._newest, None
            if found is None and self._error is not None:
                raise self._error
            return found

    def __iter__(self) -> Iterator[Received]:
        """Yield the newest version again and again, until the training has ended."""
        while (found := self.next()) is not None:
            yield found

    def close(self) -> None:
        """Leave; what has come and was not taken is lost."""
        self._is_closing = True
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive():  # in the middle of a version
            for source in list(self._sources):
                source.abort()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        error: FarpipeError | None = None
        try:
            self._follow()
        except FarpipeError as found:
            error = found
        except Exception as found:  # a fault of ours: the caller must not wait for ever
            error = RunError(f"the subscription has broken: {found!r}")
        with self._changed:
            self._error, self._has_ended = error, True
            self._changed.notify_all()

    def _follow(self) -> None:
        """Connect and take versions until the training ends; again when the connection is lost, within patience."""
        lost_s, pause_s, why = time.monotonic(), _FIRST_PAUSE_S, ""
        while not self._is_closing:
            try:
                with self._connected():
                    lost_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
                    while self._take_version():
                        lost_s = time.monotonic()
                    return
            except HandshakeError as error:
                raise RunError(f"{self._where}: {error}; give the token of its publish.json") from None
            except InputError:
                raise
            except (RunError, OSError) as error:
                if isinstance(error, RefusedError) and self._publication is None:  # to try again would not help
                    raise RunError(f"{self._where}: {error}") from None
                why = str(error)
            if time.monotonic() > lost_s + self._patience_s:
                raise RunError(f"{self._where}: no connection for {self._patience_s:g} s: {why}")
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @property
    def _where(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def _sleep(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not self._is_closing:
            time.sleep(0.02)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Context in which there is a session with every process that publishes."""
        self._sources = []
        is_well = False
        try:
            self._address, self._reach = self._locate()
            first = Source.open(self._address, self._reach)
            self._sources.append(first)
            publication = first.publication()
            self._expect_same(publication)
            for number, one in enumerate(publication.addresses[1:], 1):
                self._sources.append(Source.open((one.host, one.port), self._reach, number))
            self._expect_room([source.form() for source in self._sources])
            self._publication = publication
            yield
            is_well = True
        finally:
            for source in self._sources:
                if is_well:
                    source.close()
                else:
                    source.abort()

    def _expect_same(self, publication: Publication) -> None:
        if self._publication is not None and publication.training != self._publication.training:
            raise InputError(f"{self._where}: now publishes a different training; subscribe again")

    def _expect_room(self, forms: list[PartForm]) -> None:
        """InputError unless the forms make a whole model for which this machine has memory, before any is taken."""
        num_bytes, free = sum(form.num_bytes for form in forms), free_memory()
        limit = self._max_bytes if self._max_bytes is not None else None if free is None else free[0] // 2
        if limit is not None and num_bytes > limit:
            room = f"the limit is {format_bytes(limit)} (max_bytes; by default half of the free memory)"
            raise InputError(f"{self._where}: the weights have {format_bytes(num_bytes)}, and {room}")
        expect_whole(forms, self._where)

    def _take_version(self) -> bool:
        """Take the next version; False when the training has ended, or this side closes."""
        step = self._newest_step()
        if step is None:
            return False
        try:
            self._receive(step)
            self._num_damaged = 0
        except GoneError:
            self._settle_all()
        except DamagedError as error:
            self._held.clear()  # all of it comes next
            self._num_damaged += 1
            if self._num_damaged >= MAX_DAMAGED:
                raise InputError(f"{error} ({MAX_DAMAGED} times in a row)") from None
            raise
        return True

    def _newest_step(self) -> int | None:
        self._sources[0].ask_newest(self._step)
        while (answer := self._sources[0].newest()) is None:
            if self._is_closing:
                return None
        return answer.step

    def _settle_all(self) -> None:
        self._sources[0].settled()

    def _receive(self, step: int) -> None:
        forms = [source.form() for source in self._sources]
        bases = [self._held.get(form.sha256) for form in forms]
        sent_before = sum(source.wire_bytes for source in self._sources)
        with ThreadPoolExecutor(len(self._sources)) as pool:
            for begun in [pool.submit(s.begin, step, b) for s, b in zip(self._sources, bases, strict=True)]:
                begun.result()
            self._settle_all()
            coming = [pool.submit(source.receive) for source in self._sources]
            found = [one.result() for one in coming]
        versions = [version for version, _ in found]
        wire_bytes = sum(source.wire_bytes for source in self._sources) - sent_before
        changed = sum(count for _, count in found) if all(s.is_delta for s in self._sources) else None
        self._held = {form.sha256: version for form, version in zip(forms, versions, strict=True)}
        self._step = step
        assert self._publication is not None
        tensors = assembled(zip(forms, versions, strict=True))
        whole = sum(form.num_bytes for form in forms)
        with self._changed:
            self._newest = Received(step, tensors, self._publication, wire_bytes, whole, changed)
            self._changed.notify_all()
