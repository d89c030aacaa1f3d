"""Sums and gathers over the replicas of a stage, as rings of eager messages over farpipe's own transport.

A ring goes round in n - 1 rounds: a member sends a chunk to the next one, takes one from the one before, adds it to its
own and passes the sum on (Patarasuk and Yuan 2009). Who adds what to what is fixed, and everybody gets the finished sum
from the one member that made it, so all replicas have the same bits, in every run.

Several levels make it hierarchical: sum inside the site, each member a share of the tensor; then sum that share with
those who have it at the other sites; then hand out the sums inside the site. So each gradient crosses between two sites
once, whatever the number of replicas there.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Final

from torch import Tensor

from farpipe.runtime.peers import Messenger
from farpipe.transport import MessageTimes, Tag

PIECE_BYTES: Final = 4 << 20
"""Chunks travel in pieces, so that a piece can be passed on while the next is still on its way."""
WINDOW: Final = 32
"""Largest number of pieces that a member may be ahead of what it has received: bounds what waits in the transport."""
ALIGNMENT: Final = 64
"""Shares are whole multiples of so many elements."""


class Line:
    """The messages of one collective of one stage, numbered in the order in which each pair of processes uses them."""

    def __init__(self, peers: Messenger, step: int, stage: int, what: str, first_number: int = 0) -> None:
        """`first_number`: collectives of one stage in one step must not share numbers."""
        self._peers, self._step, self._stage, self._what = peers, step, stage, what
        self._sent: dict[int, Iterator[int]] = {}
        self._received: dict[int, Iterator[int]] = {}
        self._first_number = first_number
        self.sent_bytes: dict[int, int] = {}
        """By process."""
        self.link_ns = 0
        """Time for which the received messages occupied their link, in all."""

    def send(self, process: int, tensor: Tensor) -> None:
        """To `process`; nobody may write to `tensor` before `process` has used it."""
        number = next(self._sent.setdefault(process, count(self._first_number)))
        self.sent_bytes[process] = self.sent_bytes.get(process, 0) + tensor.nbytes
        self._peers.send(process, "sync", Tag(self._step, self._stage, number), tensor)

    def receive(self, process: int) -> Tensor:
        """The next one from `process`."""
        number = next(self._received.setdefault(process, count(self._first_number)))
        waiting_for = f"{self._what} of stage {self._stage} in step {self._step}"
        message = self._peers.receive(process, "sync", Tag(self._step, self._stage, number), waiting_for=waiting_for)
        self.link_ns += _link_ns(message.times)
        return message.tensor


def _link_ns(times: MessageTimes) -> int:
    return times.end_ns - times.start_ns


class Ring:
    """One level: the processes in `members`, of which `process` is one."""

    def __init__(self, members: tuple[int, ...], process: int) -> None:
        self.size, self.place = len(members), members.index(process)
        self.next, self.before = members[(self.place + 1) % self.size], members[self.place - 1]

    def reduce_scatter(self, flat: Tensor, line: Line) -> Tensor:
        """Sum over the members; the result is this member's share, a view of `flat`. The rest of `flat` is spoilt."""
        chunks = self._chunks(flat)

        def take(number: int, received: Tensor) -> Tensor:
            round_, piece = divmod(number, len(chunks[0]))
            mine = chunks[(self.place - 2 - round_) % self.size][piece]
            return mine.add_(received.to(mine.device))

        self._go_round(chunks[self.place - 1], take, line)
        return flat.tensor_split(self.size)[self.place]

    def all_gather(self, flat: Tensor, line: Line) -> None:
        """Give this member's share of `flat` to all and take theirs."""
        chunks = self._chunks(flat)

        def take(number: int, received: Tensor) -> Tensor:
            round_, piece = divmod(number, len(chunks[0]))
            chunks[(self.place - 1 - round_) % self.size][piece].copy_(received)
            return received

        self._go_round(chunks[self.place], take, line)

    def _chunks(self, flat: Tensor) -> list[tuple[Tensor, ...]]:
        """The pieces of every member's share."""
        return [pieces(chunk) for chunk in flat.tensor_split(self.size)]

    def _go_round(self, first: Sequence[Tensor], take: Callable[[int, Tensor], Tensor], line: Line) -> None:
        """Send the pieces of `first`; ``take(number, received)`` gives what is to be passed on in the next round."""
        waiting = deque(first)
        num_all, num_sent = len(first) * (self.size - 1), 0
        for number in range(num_all):
            while waiting and num_sent < number + WINDOW:
                line.send(self.next, waiting.popleft())
                num_sent += 1
            passed_on = take(number, line.receive(self.before))
            if number < num_all - len(first):
                waiting.append(passed_on)

    def swap(self, flat: Tensor, line: Line) -> None:
        """Sum over two members in one exchange: the bytes of a ring, and one latency where the ring has two."""
        assert self.size == 2
        mine = pieces(flat)
        num_sent = 0
        for number, piece in enumerate(mine):
            while num_sent < min(number + WINDOW, len(mine)):
                line.send(self.next, mine[num_sent].clone())  # for the sum is written over it
                num_sent += 1
            piece.add_(line.receive(self.before).to(piece.device))


class Rings:
    """The levels of one stage's replicas, as seen by one process; see `Places.ring_levels`."""

    def __init__(self, levels: Iterable[tuple[int, ...]], process: int) -> None:
        self._rings = [Ring(members, process) for members in levels if len(members) > 1]
        self.num_members = math.prod(ring.size for ring in self._rings)

    def padded(self, num_elements: int) -> int:
        """The next length that divides into shares."""
        unit = self.num_members * ALIGNMENT
        return -(-num_elements // unit) * unit

    def share(self, length: int) -> tuple[int, int]:
        """(start, end) of this process's share of a padded tensor."""
        start, size = 0, length
        for ring in self._rings:
            size //= ring.size
            start += ring.place * size
        return start, start + size

    def reduce_scatter(self, flat: Tensor, line: Line) -> None:
        """Sum over all members; afterwards this process's share of `flat` [padded] has the sum, the rest is spoilt."""
        for ring in self._rings:
            flat = ring.reduce_scatter(flat, line)

    def all_gather(self, flat: Tensor, line: Line) -> None:
        """Everybody's share of `flat` [padded] to everybody."""
        views = [flat]
        for ring in self._rings[:-1]:
            views.append(views[-1].tensor_split(ring.size)[ring.place])
        for ring, view in zip(reversed(self._rings), reversed(views), strict=False):
            ring.all_gather(view, line)

    def all_reduce(self, flat: Tensor, line: Line) -> None:
        """Sum over all members, for all members."""
        if not self._rings:
            return
        *inner, outer = self._rings
        views = [flat]
        for ring in inner:
            views.append(ring.reduce_scatter(views[-1], line))
        if outer.size == 2:
            outer.swap(views[-1], line)
        else:
            outer.reduce_scatter(views[-1], line)
            outer.all_gather(views[-1], line)
        for ring, view in zip(reversed(inner), reversed(views[:-1]), strict=True):
            ring.all_gather(view, line)


def pieces(flat: Tensor) -> tuple[Tensor, ...]:
    """Views of at most PIECE_BYTES; none of nothing."""
    num_pieces = -(-flat.nbytes // PIECE_BYTES)
    return flat.tensor_split(num_pieces) if num_pieces else ()
