"""Commands of any rank to all: a checkpoint at the end of this step, or to leave after one. Handles SIGTERM."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from farpipe.runtime.peers import Peers

CHECKPOINT: Final = b"c"
STOP: Final = b"s"


class Commands:
    """Commands ride ahead of the exchange that ends a step, so all ranks know the same ones when it is over.

    Posts and exchanges share a connection, and a command is not longer than a rank's part of that exchange: none is
    overtaken, on a real link or an emulated one.
    """

    def __init__(self, peers: Peers, stop: Callable[[], bool], every_s: float) -> None:
        """`stop`: whether this process was asked to leave. `every_s`: rank 0 asks for checkpoints; 0: it doesn't."""
        self._peers, self._stop, self._every_s = peers, stop, every_s
        self._last_s = time.monotonic()

    def give(self, step: int) -> None:
        """Before the exchange that ends `step`: ask for what this rank wants."""
        if self._stop():
            self.ask(step, STOP)
        if self._every_s and self._peers.rank == 0 and time.monotonic() > self._last_s + self._every_s:
            self.ask(step, CHECKPOINT)

    def ask(self, step: int, command: bytes) -> None:
        """Before the exchange that ends `step`: all ranks, this one too, are to know the command after it."""
        for rank in range(self._peers.world_size):
            self._peers.post(rank, f"commands {step}", command)

    def take(self, step: int) -> set[bytes]:
        """After that exchange: what was asked for, the same on all ranks."""
        return {command for _, command in self._peers.poll(f"commands {step}")}

    def checkpoint_begun(self) -> None:
        """The clock starts again."""
        self._last_s = time.monotonic()


@contextmanager
def sigterm_asks() -> Iterator[Callable[[], bool]]:
    """Within it, SIGTERM only makes what it gives out true; a second SIGTERM ends the process at once.

    In the main thread only.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGTERM, before)
