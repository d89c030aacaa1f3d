"""The sum of the sites' gradients: made share by share and added in one order, so that it has the same bits whoever
computes a share, and however many sites there are."""

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from farpipe.engine.executor.peers import tensor_bytes
from farpipe.engine.transport import Tag, Transport

PIECE_BYTES: Final = 4 << 20
WINDOW: Final = 32
"""Largest number of pieces that a process may be ahead of what it has received."""
_LOSS: Final = struct.Struct("<d")
_SUMMED: Final = 1 << 20
"""First number of the pieces of a sum; those of shares are below."""


class Gradient(NamedTuple):
    """The gradient of one process's parameters, or of a part, in one tensor, and its part of the loss."""

    flat: Tensor
    """[num_elements], in CPU memory."""
    loss: float
    """NaN where the process has no last stage."""


def shares_of(member: int, members: Sequence[int], num_sites: int) -> tuple[int, ...]:
    """The sites whose shares of the batch `member` computes: its own, and its part of those that are away.

    Shares are never divided: then the order of the additions inside them would be another, and so the last bits.
    """
    away = [site for site in range(num_sites) if site not in members]
    others = [site for number, site in enumerate(away) if members[number % len(members)] == member]
    return (member, *others)


def add(gradients: Mapping[int, Gradient]) -> Gradient:
    """The sum over all sites' shares, in the order of the sites."""
    first, *others = (gradients[site] for site in sorted(gradients))
    flat, loss = first.flat, first.loss
    for other in others:
        flat, loss = flat + other.flat, loss + other.loss
    return Gradient(flat, loss)


def sum_over(
    transport: Transport, step: int, mine: Mapping[int, Gradient], members: Sequence[int], num_sites: int
) -> Gradient:
    """Sum the shares that the members of a world have computed; `mine` are this process's by site.

    All members get the same bits. Two members with a share each send it whole: one latency. Otherwise every member adds
    a slice of all shares, and sends the sum to the others: as many bytes as a ring. RunError when the world breaks.
    """
    shares = {rank: shares_of(member, members, num_sites) for rank, member in enumerate(members)}
    if len(members) == 2 and num_sites == 2:
        other = 1 - transport.rank
        found = _swap(transport, step, mine, {other: shares[other]}, [slice(None)] * 2)
        return add({**mine, **found})
    slices = _slices(next(iter(mine.values())).flat.numel(), len(members))
    own = slices[transport.rank]
    others = {rank: theirs for rank, theirs in shares.items() if rank != transport.rank}
    found = _swap(transport, step, mine, others, slices)
    part = add({site: Gradient(one.flat[own], one.loss) for site, one in mine.items()} | found)
    return _hand_out(transport, step, part, slices)


def received_bytes(num_bytes: int, num_own: int, num_members: int, num_sites: int) -> int:
    """Bytes that `sum_over` receives from the other members; `num_bytes` of a share, of which `num_own` are here."""
    if num_members == num_sites == 2:
        return num_bytes
    return (num_bytes * (num_sites - num_own) + num_bytes * (num_members - 1)) // num_members


def _slices(length: int, count: int) -> list[slice]:
    bounds = [length * number // count for number in range(count + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def _swap(
    transport: Transport,
    step: int,
    mine: Mapping[int, Gradient],
    others: Mapping[int, Sequence[int]],
    slices: Sequence[slice],
) -> dict[int, Gradient]:
    """Send each of `others` its slice of all shares here; this process's slice of theirs, by site."""
    outgoing = [
        _Piece(rank, Tag(step, site, number), piece, _LOSS.pack(one.loss))
        for site, one in mine.items()
        for rank in others
        for number, piece in enumerate(_pieces(one.flat[slices[rank]]))
    ]
    like = next(iter(mine.values())).flat
    targets = {site: torch.empty_like(like[slices[transport.rank]]) for theirs in others.values() for site in theirs}
    incoming = [
        _Piece(rank, Tag(step, site, number), piece)
        for rank, theirs in others.items()
        for site in theirs
        for number, piece in enumerate(_pieces(targets[site]))
    ]
    losses = {tag.stage: _LOSS.unpack(said)[0] for tag, said in _exchange(transport, outgoing, incoming).items()}
    return {site: Gradient(flat, losses[site]) for site, flat in targets.items()}


def _hand_out(transport: Transport, step: int, part: Gradient, slices: Sequence[slice]) -> Gradient:
    """Give all members this one's slice of the sum, and take theirs."""
    flat = torch.empty(slices[-1].stop, dtype=part.flat.dtype)
    flat[slices[transport.rank]] = part.flat
    others = [rank for rank in range(transport.world_size) if rank != transport.rank]
    outgoing = [
        _Piece(rank, Tag(step, 0, _SUMMED + number), piece)
        for rank in others
        for number, piece in enumerate(_pieces(part.flat))
    ]
    incoming = [
        _Piece(rank, Tag(step, 0, _SUMMED + number), piece)
        for rank in others
        for number, piece in enumerate(_pieces(flat[slices[rank]]))
    ]
    _exchange(transport, outgoing, incoming)
    return Gradient(flat, part.loss)


class _Piece(NamedTuple):
    """A piece of a tensor on its way to or from member number `rank`."""

    rank: int
    tag: Tag
    tensor: Tensor
    description: bytes = b""


def _pieces(flat: Tensor) -> tuple[Tensor, ...]:
    """Views of at most PIECE_BYTES, one at least."""
    return flat.tensor_split(max(1, -(-flat.nbytes // PIECE_BYTES)))


def _exchange(transport: Transport, outgoing: Sequence[_Piece], incoming: Sequence[_Piece]) -> dict[Tag, bytes]:
    """Send and fill all pieces; the descriptions of those that came."""
    num_sent, found = 0, {}
    for number, piece in enumerate(incoming):
        while num_sent < min(number + WINDOW, len(outgoing)):
            send_piece(transport, *outgoing[num_sent])
            num_sent += 1
        found[piece.tag] = fill_piece(transport, piece.rank, piece.tag, piece.tensor, "the other sites' gradient")
    for piece in outgoing[num_sent:]:
        send_piece(transport, *piece)
    return found


def send_piece(transport: Transport, rank: int, tag: Tag, tensor: Tensor, description: bytes = b"") -> None:
    """Send `tensor`, contiguous in CPU memory, which must not be written to afterwards."""
    transport.send(rank, "sync", tag, tensor_bytes(tensor), description)


def fill_piece(transport: Transport, rank: int, tag: Tag, tensor: Tensor, what: str) -> bytes:
    """Fill `tensor` with what `rank` has sent; the description that came with it."""
    message = transport.receive(rank, "sync", tag, waiting_for=f"{what} in step {tag.step}")
    if tensor.numel():
        tensor.copy_(torch.frombuffer(message.data, dtype=tensor.dtype).view_as(tensor))
    return bytes(message.description)
