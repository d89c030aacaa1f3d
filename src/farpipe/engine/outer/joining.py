"""Worlds of one process: the one that it is in, one that is being made beside the training, and how they end."""

import threading
from collections.abc import Callable
from contextlib import suppress

from farpipe.core.errors import FarpipeError
from farpipe.engine.outer.meeting import Offer
from farpipe.engine.transport import Transport


class World:
    """A world as one process sees it, from the offer on; `transport` is there when all members have come."""

    def __init__(self, offer: Offer, own: int, connect: Callable[[], Transport]) -> None:
        """``connect()`` waits for the members; it runs in a thread of its own."""
        self.offer, self.own = offer, own
        self.transport: Transport | None = None
        self.problem = ""
        """Reason why it can't be used; empty: none is known."""
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._connect, args=(connect,), name="farpipe joins", daemon=True)
        self._thread.start()

    def _connect(self, connect: Callable[[], Transport]) -> None:
        try:
            transport = connect()
        except (FarpipeError, OSError) as error:
            self.problem = str(error) or type(error).__name__
            return
        with self._lock:
            self.transport = transport
        if self._closing:
            self.close()

    @property
    def is_giver(self) -> bool:
        """True if this site gives the others its state."""
        return self.offer.giver == self.own

    @property
    def rank_of_giver(self) -> int:
        """Place of the giver among the members."""
        return self.offer.members.index(self.offer.giver)

    def others(self, *, waiting: bool) -> list[int]:
        """Places of the members, without the giver, that had not begun when the offer was made, or that had."""
        places = enumerate(zip(self.offer.members, self.offer.waiting, strict=True))
        return [place for place, (site, waits) in places if site != self.offer.giver and waits == waiting]

    @property
    def state(self) -> str:
        """``joining``, ``ready`` or ``failed``."""
        if self.transport is not None and not self.problem:
            try:
                self.transport.check("a world of sites")
            except FarpipeError as error:
                self.problem = str(error)
        return "failed" if self.problem else "joining" if self.transport is None else "ready"

    def leave(self) -> None:
        """Say goodbye when all that was sent has arrived; does not wait."""
        threading.Thread(target=self.close, name="farpipe leaves a world", daemon=True).start()

    def close(self) -> None:
        """End it; waits for what was sent where it is whole."""
        self._closing = True
        with self._lock:
            transport, self.transport = self.transport, None
        if transport is not None:
            self.problem = self.problem or "it was left"
            with suppress(FarpipeError):
                transport.close()
