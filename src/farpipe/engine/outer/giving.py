"""How a site that returns gets the others' state: weights and moments once, then the gradient of every later step.

Both sides are of one process, with the process of the same number at the other site. 12 bytes a parameter travel for
the state, and 4 for each step's gradient.
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from farpipe.core.errors import FarpipeError, RunError
from farpipe.engine.outer.joining import World
from farpipe.engine.outer.replica_sum import PIECE_BYTES, fill_piece, send_piece
from farpipe.engine.transport import Tag

STATE: Final = 1 << 20
GRADIENT: Final = STATE + 1
"""Stages in the tags of what is given: no stage of a model."""
BEGINS: Final = "state"
AT: Final = "at"
"""Names of posts: the step of the state that is sent, and the steps that a member has done."""
MAX_WAITING: Final = 4
"""Gradients that may wait to be sent; then the giver's training waits too, since the link is slower than its steps."""
_LAST: Final = b"enter"
_POLL_S: Final = 0.005


class Giving(threading.Thread):
    """Sends the giver's state to those that return, beside its training."""

    def __init__(self, world: World, takers: Sequence[int], step: int, state: Sequence[Tensor]) -> None:
        """`takers`: their places in the world; `state`: a copy, as it is after `step` steps."""
        super().__init__(name="farpipe gives", daemon=True)
        self._world, self._takers, self._step, self._state = world, takers, step, state
        self._gradients: queue.Queue[tuple[int, Tensor, bytes]] = queue.Queue(MAX_WAITING)
        self.num_bytes = 0
        """Bytes sent, to all of them."""
        self.start()

    def put(self, step: int, total: Tensor, *, is_last: bool) -> None:
        """Give them the sum of `step` as well, which must not be written to; with the last one they enter."""
        while self.is_alive() and self._world.state == "ready":
            try:
                self._gradients.put((step, total, _LAST if is_last else b""), timeout=0.1)
                return
            except queue.Full:
                continue

    def run(self) -> None:
        """Send all of it; an error breaks the world, and so it ends."""
        try:
            self._send()
        except (FarpipeError, AttributeError) as error:  # the world was left meanwhile
            self._world.problem = self._world.problem or str(error)

    def _send(self) -> None:
        transport = self._world.transport
        if transport is None:
            return
        for taker in self._takers:
            transport.post(taker, BEGINS, str(self._step).encode())
        for taker in self._takers:
            for number, piece in enumerate(_pieces(self._state)):
                send_piece(transport, taker, Tag(self._step, STATE, number), piece)
                self.num_bytes += piece.nbytes
        self._state = ()
        while self._world.state == "ready":
            try:
                step, total, said = self._gradients.get(timeout=0.1)
            except queue.Empty:
                continue
            for taker in self._takers:
                for number, piece in enumerate(_pieces([total])):
                    send_piece(transport, taker, Tag(step, GRADIENT, number), piece, said)
                    self.num_bytes += piece.nbytes
            if said:
                return


class Taking:
    """The returning side: receives from the giver of `world`."""

    def __init__(self, world: World, limit_s: float) -> None:
        """`limit_s`: longest wait for the giver to begin."""
        assert world.transport is not None
        self._transport, self._giver = world.transport, world.rank_of_giver
        self._limit_s = limit_s

    def first_step(self) -> int:
        """Steps that the state, which comes next, has behind it. RunError when nothing comes in time."""
        deadline_s = time.monotonic() + self._limit_s
        while not (found := self._transport.poll(BEGINS)):
            if time.monotonic() > deadline_s:
                raise RunError(f"waited {self._limit_s:g} s for the state of the site that is furthest on")
            time.sleep(_POLL_S)
        return int(found[0][1])

    def fill(self, state: Sequence[Tensor], step: int) -> None:
        """Fill `state` with what the giver has after `step` steps."""
        for number, piece in enumerate(_pieces(state)):
            fill_piece(self._transport, self._giver, Tag(step, STATE, number), piece, "the state of another site")

    def gradient(self, step: int, flat: Tensor) -> bool:
        """Fill `flat` with the sum of `step`; True if this site enters after it."""
        self._transport.post(self._giver, AT, str(step).encode())
        said = b""
        for number, piece in enumerate(_pieces([flat])):
            said = fill_piece(self._transport, self._giver, Tag(step, GRADIENT, number), piece, "a missed gradient")
        return said == _LAST


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of at most PIECE_BYTES of all of them, in order."""
    flats = [tensor.view(-1) for tensor in tensors]
    return [piece for flat in flats if flat.numel() for piece in flat.tensor_split(-(-flat.nbytes // PIECE_BYTES))]
