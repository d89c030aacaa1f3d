"""The sequence processor: long sequences are cut into slices of equal time, short ones packed into chunks.

After InfiniPipe (arXiv 2509.21275, section 4.3). The longest sequence is cut into K slices that take equal time, so they
get shorter along the sequence; all sequences that are longer than the first slice are cut at the same offsets. What is
left of a cut sequence (its tail) and the short sequences are packed into chunks that take no longer than one slice. The
paper's literal rule opens a new chunk only when tokens run out; ``best-fit`` opens one as soon as no chunk has time left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from farpipe.cost.chunks import Law
from farpipe.errors import InputError
from farpipe.sequences.chunk import Chunk, Floats, Ints, Slice

PackRule = Literal["best-fit", "literal"]
_ROUNDING: Final = 1e-9


@dataclass(frozen=True)
class Cut:
    """How a batch is cut: chunks take at most about `target_s` and have at most `token_limit` tokens."""

    target_s: float
    token_limit: int
    rule: PackRule = "best-fit"


def slice_offsets(length: int, num_slices: int, law: Law) -> Ints:
    """Where `num_slices` slices of equal time end in a sequence of `length` tokens: ascending, the last is `length`.

    The time up to x tokens is ``pair_s x^2/2 + token_s x``: solved for x. Slices are at least one token long.
    """
    if not 1 <= num_slices <= length:
        raise InputError(f"{length} tokens can't be cut into {num_slices} slices")
    shares = np.arange(1, num_slices + 1) / num_slices
    a, b = law.pair_s / 2, law.token_s
    total = a * length**2 + b * length
    if total <= 0:
        ends = shares * length
    elif a <= 0:
        ends = shares * total / b
    else:  # the root in the form that does not cancel where a is small
        ends = 2 * shares * total / (b + np.sqrt(b * b + 4 * a * shares * total))
    rounded = np.rint(ends).astype(np.int64)
    return np.clip(rounded, np.arange(1, num_slices + 1), length - np.arange(num_slices)[::-1])


def num_slices_within(length: int, cut: Cut, law: Law) -> int:
    """The fewest slices of equal time of which none takes longer than the target or has more tokens than the limit."""
    seconds = law.pair_s * length**2 / 2 + law.token_s * length
    count = max(1, math.ceil(seconds / cut.target_s * (1 - _ROUNDING))) if cut.target_s > 0 else 1
    count = min(length, max(count, -(-length // cut.token_limit)))
    while count < length and slice_offsets(length, count, law)[0] > cut.token_limit:
        count += max(1, count // 16)
    return count


def make_chunks(lengths: Sequence[int] | Ints, cut: Cut, law: Law) -> list[Chunk]:
    """All tokens of `lengths` exactly once in chunks; the same input gives the same chunks.

    `law` is a chunk's time. Chunks are in the order of their forwards: sequences with most slices first, the slices of
    a sequence in order; then chunks of short sequences, the longest first.
    """
    sizes = np.asarray(lengths, np.int64)
    if not sizes.size:
        return []
    if sizes.min() < 1:
        raise InputError(f"lengths[{int(sizes.argmin())}]: a sequence of {int(sizes.min())} tokens can't be planned")
    longest = int(sizes.max())
    offsets = slice_offsets(longest, num_slices_within(longest, cut, law), law)
    is_long = sizes > offsets[0]
    chains = [_slices(int(i), int(sizes[i]), offsets) for i in _by_slices(sizes, offsets, is_long)]
    shorts = np.flatnonzero(~is_long)
    shorts = shorts[np.argsort(-sizes[shorts], kind="stable")]
    tails = np.array([chain[-1][1:3] for chain in chains], np.int64).reshape(-1, 2)
    bins = pack(sizes[shorts], tails, cut, law)
    return _assemble(chains, shorts, sizes, bins)


def _by_slices(sizes: Ints, offsets: Ints, is_long: Any) -> Ints:
    """The long sequences, those with most slices first, of these the longest."""
    chosen = np.flatnonzero(is_long)
    counts = np.searchsorted(offsets, sizes[chosen]) + 1
    return chosen[np.lexsort((chosen, -sizes[chosen], -counts))]


def _slices(sequence: int, length: int, offsets: Ints) -> list[Slice]:
    ends = [*offsets[offsets < length].tolist(), length]
    starts = [0, *ends[:-1]]
    return [Slice(sequence, start, end - start, length) for start, end in zip(starts, ends, strict=True)]


def pack(shorts: Ints, tails: Ints, cut: Cut, law: Law) -> Ints:
    """The bin of every short sequence (given the longest first): bins 0 to T - 1 begin with `tails` (start, length).

    Among bins with time and tokens left a sequence takes the one with the least time left (best fit decreasing).
    """
    from farpipe.sequences import pack_kernel  # here, for numba takes a third of a second to import

    starts, counts = tails[:, 0].astype(np.float64), tails[:, 1].astype(np.float64)
    ends = starts + counts
    tail_s = law.pair_s * (ends**2 - starts**2) / 2 + law.token_s * counts
    short_s = law.pair_s * shorts.astype(np.float64) ** 2 / 2 + law.token_s * shorts
    kernel: Any = pack_kernel.pack
    limits = (cut.target_s * (1 + _ROUNDING), cut.token_limit, cut.rule == "literal")
    return np.asarray(kernel(short_s, shorts, tail_s, tails[:, 1].copy(), *limits))


def _assemble(chains: list[list[Slice]], shorts: Ints, sizes: Ints, bins: Ints) -> list[Chunk]:
    extra: dict[int, list[Slice]] = {}
    for sequence, where in zip(shorts.tolist(), bins.tolist(), strict=True):
        extra.setdefault(where, []).append(Slice(sequence, 0, int(sizes[sequence]), int(sizes[sequence])))
    chunks: list[Chunk] = []
    for index, chain in enumerate(chains):
        chunks += [Chunk((part,)) for part in chain[:-1]]
        chunks.append(Chunk((chain[-1], *extra.pop(index, ()))))
    return chunks + [Chunk(tuple(extra[where])) for where in sorted(extra)]


def chunk_seconds(chunks: Sequence[Chunk], law: Law) -> Floats:
    """What every chunk takes under one law."""
    tokens = np.array([chunk.num_tokens for chunk in chunks], np.float64)
    return law.seconds(tokens, np.array([chunk.num_pairs for chunk in chunks], np.float64))
