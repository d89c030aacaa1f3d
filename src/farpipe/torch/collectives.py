"""Collectives of a group over farpipe's transport: none of them needs another network between the sites.

Sums of long tensors and gathers go round a ring of the ranks in their order (Patarasuk and Yuan 2009); short ones, and
reductions other than sums, are sent to everybody and reduced by each rank in the same order: all have the same bits. A
broadcast goes once to every site. Every piece says which collective it belongs to, so ranks that are in different ones
hear of it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from farpipe.core.errors import InputError, RunError
from farpipe.engine.executor.peers import describe, tensor_bytes, tensor_of
from farpipe.engine.replicas.collectives import Ring
from farpipe.engine.transport import Message, Tag, Transport
from farpipe.engine.transport.inbox import Accept
from farpipe.engine.transport.outbox import Loan

KIND: Final = "sync"
DIRECT_BYTES: Final = 64 << 10
"""Largest bytes for which one latency counts for more than what a ring saves."""
_HEAD_BYTES: Final = 2
_REDUCTIONS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
"""Reductions by torch's name."""


def reduction_name(op: Any) -> str:
    """torch's name of `op`, such as SUM; InputError for one that there is not."""
    for name in _REDUCTIONS:
        if op == getattr(ReduceOp, name):
            return name
    raise InputError(f"farpipe has no reduction {op}; it has {', '.join(_REDUCTIONS)}")


class GroupMessages:
    """Messages of the group's collective number `number`, called `what`; all ranks must be in the same."""

    def __init__(self, transport: Transport, number: int, what: str) -> None:
        self._transport, self._number, self.what = transport, number, what
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._loans: list[Loan] = []
        self._placed: dict[tuple[int, Tag], Future[Message]] = {}

    def send(self, process: int, tensor: Tensor) -> None:
        """Send `tensor` (contiguous); it must not be written to before `end`, or before `process` has used it."""
        tag = Tag(self._number, 0, self._sent[process])
        self._sent[process] += 1
        description = describe(tensor) + self.what.encode()
        self._loans.append(self._transport.lend(process, KIND, tag, tensor_bytes(tensor), description))

    def end(self) -> None:
        """Return when the memory of all that was sent may be written to."""
        for loan in self._loans:
            loan.end()
        self._loans.clear()

    def place(self, process: int, targets: Sequence[Tensor | None]) -> None:
        """Where the next pieces from `process` belong: they come in there, unless most of one has come already."""
        for number, target in enumerate(targets, self._received[process]):
            if target is not None:
                tag = Tag(self._number, 0, number)
                accept = self._accept(tensor_bytes(target), describe(target) + self.what.encode())
                found = self._transport.expect(process, KIND, tag, waiting_for=self.what, accept=accept)
                self._placed[process, tag] = found

    @staticmethod
    def _accept(memory: memoryview, expected: bytes) -> Accept:
        return lambda size, description: memory if size == len(memory) and description == expected else None

    def receive(self, process: int) -> Tensor:
        """The next piece from `process`; RunError where that is in another collective."""
        tag = Tag(self._number, 0, self._received[process])
        self._received[process] += 1
        data, description, _ = self._message(process, tag)
        end = _HEAD_BYTES + 8 * (description[1] if len(description) > 1 else 0)
        if (theirs := description[end:].decode(errors="replace")) != self.what:
            raise RunError(f"rank {self._transport.rank} is in {self.what}, and rank {process} in {theirs}")
        return tensor_of(data, description[:end])

    def _message(self, process: int, tag: Tag) -> Message:
        if (placed := self._placed.pop((process, tag), None)) is None:
            return self._transport.receive(process, KIND, tag, waiting_for=self.what)
        self._transport.limit(process, KIND, tag)
        return placed.result()


class GroupCollectives:
    """The collectives of rank `rank` of a group, `sites` by rank. Tensors are contiguous and in CPU memory."""

    def __init__(self, rank: int, sites: Sequence[str]) -> None:
        self.rank, self.size, self._sites = rank, len(sites), sites
        self._ring = Ring(tuple(range(self.size)), rank)
        self._others = [other for other in range(self.size) if other != rank]

    def all_reduce(self, tensor: Tensor, op: str, line: GroupMessages) -> Tensor:
        """Return the reduction over all ranks' `tensor`, which is spoilt: a long sum is made in its memory."""
        combine = _REDUCTIONS[op]
        flat = tensor.view(-1)
        if combine is torch.add and tensor.nbytes > DIRECT_BYTES:
            self._ring.all_reduce(flat, line)  # type: ignore[arg-type]
        else:
            parts = self.to_all([flat] * self.size, line)
            flat = parts[0].clone()
            for part in parts[1:]:
                flat = combine(flat, part)
        total = flat.view(tensor.shape)
        if op != "AVG":
            return total
        return total.div_(self.size) if total.is_floating_point() else total / self.size

    def reduce_scatter(self, tensor: Tensor, op: str, line: GroupMessages) -> Tensor:
        """This rank's share of the reduction over all ranks' `tensor`, whose length is a multiple of theirs."""
        if _REDUCTIONS[op] is not torch.add:
            return self.all_reduce(tensor, op, line).view(-1).tensor_split(self.size)[self.rank]
        share = self._ring.reduce_scatter(tensor.view(-1), line)  # type: ignore[arg-type]
        return share / self.size if op == "AVG" else share

    def all_gather(self, tensor: Tensor, line: GroupMessages) -> Tensor:
        """All ranks' tensors, flat, one after the other; they have one size."""
        flat = tensor.new_empty(self.size * tensor.numel())
        flat.tensor_split(self.size)[self.rank].copy_(tensor.view(-1))
        self._ring.all_gather(flat, line)  # type: ignore[arg-type]
        return flat

    def broadcast(self, tensor: Tensor, root: int, line: GroupMessages) -> Tensor:
        """The tensor of rank `root`, on every rank; it crosses once to each other site."""
        source, *targets = self._tree(root)
        found = tensor if self.rank == root else line.receive(source)
        for target in targets:
            line.send(target, found)
        return found

    def _tree(self, root: int) -> list[int]:
        """The rank from which this one has a broadcast of `root`, and those to which it passes it on."""
        leaders = {site: rank for rank, site in reversed(list(enumerate(self._sites)))} | {self._sites[root]: root}
        leader = leaders[self._sites[self.rank]]
        if self.rank != leader:
            return [leader]
        members = [other for other in self._others if self._sites[other] == self._sites[self.rank]]
        far = [other for other in leaders.values() if other != root] if self.rank == root else []
        return [root, *far, *members]

    def gather(self, tensor: Tensor, root: int, line: GroupMessages) -> list[Tensor]:
        """All ranks' tensors by rank on rank `root`, nothing elsewhere."""
        if self.rank != root:
            line.send(root, tensor)
            return []
        return [tensor if other == root else line.receive(other) for other in range(self.size)]

    def scatter(self, tensors: Sequence[Tensor], root: int, line: GroupMessages) -> Tensor:
        """This rank's one of the `tensors` of rank `root`."""
        if self.rank != root:
            return line.receive(root)
        for other in self._others:
            line.send(other, tensors[other])
        return tensors[root]

    def to_all(self, tensors: Sequence[Tensor], line: GroupMessages) -> list[Tensor]:
        """Tensors that every rank has for this one, by rank; ``tensors[r]`` is this one's for rank r."""
        for other in self._others:
            line.send(other, tensors[other])
        return [tensors[other] if other == self.rank else line.receive(other) for other in range(self.size)]
