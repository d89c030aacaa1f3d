"""The sequence processor: long sequences are cut into slices of equal time, short ones packed into chunks.

After InfiniPipe (arXiv 2509.21275, section 4.3). The longest sequence is cut into K slices that take equal time, so
they get shorter along the sequence, or into slices of the target's time and a last one of what is left; all sequences
that are longer than the first slice are cut at the same offsets. What is left of a cut sequence (its tail) and the
short sequences are packed into chunks that take no longer than one slice. The paper's literal rule opens a new chunk
only when tokens run out, those of the longest slice; ``best-fit`` opens one as soon as no chunk has time left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from farpipe.core.errors import InputError
from farpipe.planning.cost.chunk_laws import Law
from farpipe.planning.workload.chunk import Floats, Ints, SliceTable

PackRule = Literal["best-fit", "literal", "alone"]
Measure = Literal["time", "tokens"]
_ROUNDING: Final = 1e-9
_GAPS: Final = 1.02
"""Tokens of an evened chunk over those of the mean one, so that what is left fits whole sequences."""


@dataclass(frozen=True)
class Cut:
    """Limits by which a batch is cut: chunks take at most about `target_s` and have at most `token_limit` tokens."""

    target_s: float
    token_limit: int
    rule: PackRule = "best-fit"
    fill_limit: int | None = None
    """Tokens up to which short sequences are packed, where that is less than what a sequence alone may have."""
    equal: Measure = "time"
    """Measure that slices have in common; `target_s` is then the time of so many mean tokens."""


def fill_limits(lengths: Ints, most: int) -> list[int]:
    """Limits of a chunk's tokens to try: evened out over one chunk more than have to be, over as many, and `most`."""
    total, most = float(lengths.sum()), max(1, most)
    fewest = math.ceil(total / most)
    return [*(min(most, math.ceil(_GAPS * total / count)) for count in (fewest + 1, fewest)), most]


def slice_offsets(length: int, num_slices: int, law: Law, target_s: float = 0.0) -> Ints:
    """Ends of `num_slices` slices of equal time in a sequence of `length` tokens: ascending, the last is `length`.

    All but the last take `target_s` if that is longer than an equal part, and the last one what is left. The time up
    to x tokens is ``pair_s x^2/2 + token_s x``, `pair_s` that of slices: solved for x. Slices are at least one token
    long.
    """
    if not 1 <= num_slices <= length:
        raise InputError(f"{length} tokens can't be cut into {num_slices} slices")
    a, b = law.of_slices.pair_s / 2, law.token_s
    total = a * length**2 + b * length
    each = max(1 / num_slices, target_s / total) if total > 0 else 1 / num_slices
    shares: Floats = np.minimum(np.arange(1, num_slices + 1) * each, 1.0)
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
    count = _num_targets(length, cut, law)
    count = max(2, _num_targets(length, cut, law.of_slices)) if count > 1 else count
    count = min(length, max(count, -(-length // cut.token_limit)))
    while count < length and np.diff(slice_offsets(length, count, law), prepend=0).max() > cut.token_limit:
        count = min(length, count + max(1, count // 16))
    return count


def _num_targets(length: int, cut: Cut, law: Law) -> int:
    """Times that the target goes into a sequence's time, rounded up."""
    seconds = law.pair_s * length**2 / 2 + law.token_s * length
    return max(1, math.ceil(seconds / cut.target_s * (1 - _ROUNDING))) if cut.target_s > 0 else 1


def cut_batch(lengths: Sequence[int] | Ints, cut: Cut, law: Law) -> SliceTable:
    """All tokens of `lengths` exactly once in chunks; the same input gives the same chunks.

    `law` is a chunk's time. Chunks are in the order of their forwards: sequences with most slices first, the slices of
    a sequence in order; then chunks of short sequences, the longest first. InputError for a length below one.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.min() < 1:
        raise InputError(f"lengths[{int(sizes.argmin())}]: a sequence of {int(sizes.min())} tokens can't be planned")
    offsets = _offsets(int(sizes.max()), cut, law)
    longs = _by_slices(sizes, offsets)
    shorts = np.flatnonzero(sizes <= offsets[0])
    shorts = shorts[np.argsort(-sizes[shorts], kind="stable")]
    table = _slices(longs, sizes[longs], offsets)
    tails = np.cumsum(np.bincount(np.repeat(np.arange(longs.size), _counts(sizes[longs], offsets)))) - 1
    most = int(offsets[0]) if cut.rule == "literal" else cut.fill_limit or cut.token_limit
    fill = replace(cut, token_limit=min(cut.token_limit, most))
    bins = pack(sizes[shorts], np.stack([table.start[tails], table.length[tails]], 1), fill, law)
    chunk = np.where(bins < longs.size, np.append(tails, 0)[np.minimum(bins, longs.size)], 0)
    chunk = np.where(bins < longs.size, chunk, bins - longs.size + table.sequence.size)
    return _joined(table, shorts, sizes[shorts], chunk)


def _offsets(longest: int, cut: Cut, law: Law) -> Ints:
    """Ends of the longest sequence's slices; of equal time where the limit of tokens asks for more than time does."""
    count = num_slices_within(longest, cut, law)
    filled = slice_offsets(longest, count, law, cut.target_s)
    fits = count == 1 or int(np.diff(filled, prepend=0).max()) <= cut.token_limit
    return filled if fits else slice_offsets(longest, count, law)


def _counts(lengths: Ints, offsets: Ints) -> Ints:
    """Slices of every sequence."""
    return np.searchsorted(offsets, lengths) + 1


def _by_slices(sizes: Ints, offsets: Ints) -> Ints:
    """The long sequences, those with most slices first, of these the longest."""
    chosen = np.flatnonzero(sizes > offsets[0])
    return chosen[np.lexsort((chosen, -sizes[chosen], -_counts(sizes[chosen], offsets)))]


def _slices(sequences: Ints, lengths: Ints, offsets: Ints) -> SliceTable:
    """The slices of long sequences, each a chunk."""
    counts = _counts(lengths, offsets)
    which = np.repeat(np.arange(sequences.size), counts)
    place = np.arange(which.size) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.concatenate([[0], offsets])[place]
    length = np.minimum(offsets[place], lengths[which]) - start
    return SliceTable(sequences[which], start, length, lengths[which], np.arange(which.size))


def _joined(table: SliceTable, shorts: Ints, lengths: Ints, chunk: Ints) -> SliceTable:
    """The slices and the short sequences by chunk."""
    columns = [
        np.concatenate(pair)
        for pair in (
            (table.sequence, shorts),
            (table.start, np.zeros_like(shorts)),
            (table.length, lengths),
            (table.sequence_length, lengths),
            (table.chunk, chunk),
        )
    ]
    order = np.argsort(columns[-1], kind="stable")
    return SliceTable(*(column[order] for column in columns))


def pack(shorts: Ints, tails: Ints, cut: Cut, law: Law) -> Ints:
    """The bin of every short sequence (given the longest first): bins 0 to T - 1 begin with `tails` (start, length).

    Among bins with time and tokens left a sequence takes the one with the least time left (best fit decreasing).
    """
    from farpipe.planning.workload import pack_kernel  # here, for numba takes a third of a second to import

    if cut.rule == "alone":
        return np.arange(len(tails), len(tails) + shorts.size)
    starts, counts = tails[:, 0].astype(np.float64), tails[:, 1].astype(np.float64)
    ends = starts + counts
    tail_s = law.of_slices.pair_s * (ends**2 - starts**2) / 2 + law.token_s * counts
    short_s = law.pair_s * shorts.astype(np.float64) ** 2 / 2 + law.token_s * shorts
    short_s += law.call_s * (np.diff(shorts, prepend=0) != 0)  # one call for all of a length, if they come together
    kernel: Any = pack_kernel.pack
    limits = (cut.target_s * (1 + _ROUNDING), cut.token_limit, cut.rule == "literal")
    return np.asarray(kernel(short_s, shorts, tail_s, tails[:, 1].copy(), *limits))
