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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import torch
from torch import Tensor, nn

from farpipe.engine.executor.peers import Messenger
from farpipe.engine.stages.weight_grads import local_part
from farpipe.engine.transport import Tag

PIECE_BYTES: Final = 4 << 20
"""Chunks travel in pieces, so that a piece can be passed on while the next is still on its way."""
WINDOW: Final = 32
"""Largest number of pieces that a member may be ahead of what it has received: bounds what waits in the transport."""
ALIGNMENT: Final = 64
"""Shares are whole multiples of this number of elements."""


class Line:
    """The messages of one collective of one stage, numbered in the order in which each pair of processes uses them."""

    def __init__(
        self, peers: Messenger, step: int, stage: int, what: str, first_number: int = 0, *, copies: bool = False
    ) -> None:
        """`first_number`: collectives of one stage in one step must not share numbers. `copies`: of what is sent, for
        the next step, which writes into its memory, may begin before it is received."""
        self._copies = copies
        self._peers, self._step, self._stage, self._what = peers, step, stage, what
        self._sent: dict[int, Iterator[int]] = {}
        self._received: dict[int, Iterator[int]] = {}
        self._first_number = first_number
        self.sent_bytes: dict[int, int] = {}
        """Bytes sent, by process."""
        self.link_ns = 0
        """Time for which the received messages occupied their link, in all."""

    def send(self, process: int, tensor: Tensor) -> None:
        """Send `tensor` to `process`; it must not be written to before `process` has used it."""
        number = next(self._sent.setdefault(process, count(self._first_number)))
        self.sent_bytes[process] = self.sent_bytes.get(process, 0) + tensor.nbytes
        sent = tensor.clone() if self._copies else tensor
        self._peers.send(process, "sync", Tag(self._step, self._stage, number), sent)

    def place(self, process: int, targets: Sequence[Tensor | None]) -> None:
        """Do nothing: what comes next from `process` comes in memory of its own, and not where it belongs."""

    def receive(self, process: int) -> Tensor:
        """The next one from `process`."""
        number = next(self._received.setdefault(process, count(self._first_number)))
        waiting_for = f"{self._what} of stage {self._stage} in step {self._step}"
        message = self._peers.receive(process, "sync", Tag(self._step, self._stage, number), waiting_for=waiting_for)
        self.link_ns += message.times.end_ns - message.times.start_ns
        return message.tensor


class Ring:
    """One level: the processes in `members`, of which `process` is one."""

    def __init__(self, members: tuple[int, ...], process: int) -> None:
        self.size, self.place = len(members), members.index(process)
        self.next, self.before = members[(self.place + 1) % self.size], members[self.place - 1]

    def reduce_scatter(self, flat: Tensor, line: Line) -> Tensor:
        """Sum over the members; the result is this member's share, a view of `flat`. The rest of `flat` is spoilt."""
        self._go_round(flat, line, range(self.size - 1))
        return flat.tensor_split(self.size)[self.place]

    def all_gather(self, flat: Tensor, line: Line) -> None:
        """Give this member's share of `flat` to all and take theirs."""
        self._go_round(flat, line, range(self.size - 1, 2 * self.size - 2))

    def all_reduce(self, flat: Tensor, line: Line) -> None:
        """Sum over the members, for all of them; a piece of the sum is passed on while others are still added up."""
        self._go_round(flat, line, range(2 * self.size - 2))

    def _go_round(self, flat: Tensor, line: Line, rounds: range) -> None:
        """In round r send the share of member place - 1 - r and take that of place - 2 - r, counted round the ring.

        What comes in the first size - 1 rounds is added to this member's own; after that the sums go round.
        """
        chunks = self._chunks(flat)
        taken = [(round_, piece) for round_ in rounds for piece in chunks[(self.place - 2 - round_) % self.size]]
        line.place(self.before, [None if round_ < self.size - 1 else piece for round_, piece in taken])
        waiting, num_sent = deque(chunks[(self.place - 1 - rounds.start) % self.size]), 0
        for number, (round_, mine) in enumerate(taken):
            while waiting and num_sent < number + WINDOW:
                line.send(self.next, waiting.popleft())
                num_sent += 1
            passed_on = received = line.receive(self.before)
            if round_ < self.size - 1:
                passed_on = mine.add_(received.to(mine.device))
            elif received.data_ptr() != mine.data_ptr():
                mine.copy_(received)
            if round_ + 1 in rounds:
                waiting.append(passed_on)

    def _chunks(self, flat: Tensor) -> list[tuple[Tensor, ...]]:
        """The pieces of every member's share, equally many of each; the first share is the longest."""
        shares = flat.tensor_split(self.size)
        num_pieces = len(pieces(shares[0]))
        return [share.tensor_split(num_pieces) if num_pieces else () for share in shares]

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
        """Give every member's share of `flat` [padded] to all."""
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
            outer.all_reduce(views[-1], line)
        for ring, view in zip(reversed(inner), reversed(views[:-1]), strict=True):
            ring.all_gather(view, line)


def pieces(flat: Tensor) -> tuple[Tensor, ...]:
    """Views of at most PIECE_BYTES; none of nothing."""
    num_pieces = -(-flat.nbytes // PIECE_BYTES)
    return flat.tensor_split(num_pieces) if num_pieces else ()


@dataclass(frozen=True)
class Shard:
    """Part of a module's parameter in one process's optimizer: elements ``start <= i < end``, or a box of it."""

    stage: int
    name: str
    """Name of the whole parameter, in the whole model."""
    start: int
    end: int
    whole: nn.Parameter
    parameter: nn.Parameter
    """Parameter that the optimizer updates: `whole`, or a view of the masters of a part of it, of a matrix as one row,
    for matrices decay."""
    is_share: bool = False
    """True if no other process of the site has the same part to put into checkpoints: with ZeRO, and of twins."""
    offset: tuple[int, ...] | None = None
    """Place of a box's first element in `whole`, per dimension; None for a run."""

    def take_grad(self) -> None:
        """Give the part its part of the gradient."""
        if self.parameter is not self.whole:
            grad = local_grad(self.whole).view(-1)
            own = grad if grad.numel() == self.parameter.numel() else grad[self.start : self.end]
            self.parameter.grad = own.view_as(self.parameter)


def local_grad(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, or of the part of it that this process has."""
    assert parameter.grad is not None, "every microbatch of the step goes through every parameter"
    return local_part(parameter.grad)


def whole_shards(stage: int, parameters: Mapping[str, nn.Parameter]) -> list[Shard]:
    """Every parameter as one shard."""
    return [Shard(stage, name, 0, p.numel(), p, p) for name, p in parameters.items()]


class Flat:
    """Some parameters of a stage in one tensor, the gradients in another; both are padded for `rings`.

    Weights may be kept in the dtype that stages compute in; then a process has more digits in `masters`, what its
    optimizer updates: with ZeRO-1 of its own share only. Gradients are summed in the masters' dtype.
    """

    def __init__(
        self,
        stage: int,
        parameters: Mapping[str, nn.Parameter],
        rings: Rings,
        *,
        sharded: bool,
        scattered: bool,
        compute: torch.dtype = torch.float32,
    ) -> None:
        """`sharded`: a process updates its share of the weights only; `scattered`: it gets that share of the sum only.

        Parameters of one dtype and device; from now on they live in the flat tensor, in the dtype `compute`.
        """
        self.stage, self.rings, self.sharded, self.scattered = stage, rings, sharded, scattered
        self.parameters = dict(parameters)
        like = next(iter(parameters.values()), torch.empty(0))
        length = rings.padded(sum(p.numel() for p in parameters.values()))
        self._first, self._end = rings.share(length) if sharded else (0, length)
        self._weights = torch.zeros(length, dtype=compute, device=like.device)
        self.masters = self._weights[self._first : self._end]
        """[end - first]: the share with all its digits; a view of the weights where they have as many."""
        if self._weights.dtype != like.dtype:
            self.masters = torch.zeros(self._end - self._first, dtype=like.dtype, device=like.device)
        self._take_over()
        self._grads = torch.zeros(length, dtype=self.masters.dtype, device=like.device)

    @torch.no_grad()
    def _take_over(self) -> None:
        """Move the parameters, one after the other, so that hardly more memory is needed than there is afterwards."""
        for (parameter, view), part in zip(self._views(self._weights), self._parts(), strict=True):
            low, high, master = part
            master.copy_(parameter.view(-1)[low:high])
            view.copy_(parameter)
            parameter.data = view
            parameter.grad_dtype = self.masters.dtype

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        start = 0
        for parameter in self.parameters.values():
            yield parameter, flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def _parts(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the ranges of every parameter's elements in this process's share (first, end), and their masters."""
        before = 0
        for parameter in self.parameters.values():
            low = min(max(self._first - before, 0), parameter.numel())
            high = max(min(self._end - before, parameter.numel()), low)
            place = before + low - self._first
            yield low, high, self.masters[max(place, 0) : max(place, 0) + high - low]
            before += parameter.numel()

    def clear_grads(self) -> None:
        """All gradients are zero, and views."""
        self._grads.zero_()
        for parameter, view in self._views(self._grads):
            parameter.grad = view

    @torch.no_grad()
    def sum_grads(self, line: Line) -> None:
        """Sum the gradients over the replicas; if scattered, only this process's share is right afterwards."""
        if self.scattered:
            self.rings.reduce_scatter(self._grads, line)
        else:
            self.rings.all_reduce(self._grads, line)

    @torch.no_grad()
    def take_masters(self) -> None:
        """Round the masters, which have changed, to this process's share of the weights."""
        if self.masters.dtype != self._weights.dtype:
            self._weights[self._first : self._end].copy_(self.masters)

    @torch.no_grad()
    def gather_weights(self, line: Line) -> None:
        """Give every process's share of the weights to all."""
        if self.sharded:
            self.rings.all_gather(self._weights, line)

    def shards(self) -> Iterator[Shard]:
        """Yield the parts of the parameters that this process's optimizer has."""
        if not self.sharded and self.masters.dtype == self._weights.dtype:
            yield from whole_shards(self.stage, self.parameters)
            return
        for (name, parameter), (low, high, part) in zip(self.parameters.items(), self._parts(), strict=True):
            if low < high:
                view = nn.Parameter(part.view(1, -1) if parameter.ndim >= 2 else part)
                yield Shard(self.stage, name, low, high, parameter, view, self.sharded)
