"""Lossless coding of a version of weights beside an earlier one, block by block; numpy and zlib alone.

Between two steps few weights in bf16 change, and nearly all of those to a neighbouring number. So a block is coded as
the gaps between the places that have changed, a byte each, under a Huffman code, and the differences of the numbers'
bits there, which zlib makes short. XOR and zlib take 2 to 3 times as much, a bit for every weight and the new values 3
to 8 times (docs/reference/benchmarks/engine.md).
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
"""Bits of weights, [num_elements]: uint16 for bf16, uint32 for float32."""

BLOCK_ELEMENTS: Final = 1 << 20
_SAME, _RAW, _DELTA = 0, 1, 2
_HEAD: Final = struct.Struct("<B3xIIIII")
"""Kind, elements, changed ones, bytes of their gaps, coded bytes of gaps, coded bytes of differences or raw bytes."""
HEAD_BYTES: Final = _HEAD.size
_ESCAPE: Final = 255
"""A byte of the gaps that says: as many unchanged ones, and no changed one after them."""
_RAW_DEFLATE: Final = -15


class CodingError(Exception):
    """The bytes are no coded version of what they should be."""


def blocks(new: Numbers, old: Numbers | None) -> Iterator[bytes]:
    """Yield `new` coded beside `old`, or all of it without; each block can be decoded when it is there."""
    for start in range(0, len(new), BLOCK_ELEMENTS):
        part = new[start : start + BLOCK_ELEMENTS]
        yield _coded(part, None if old is None else old[start : start + BLOCK_ELEMENTS])


def _coded(new: Numbers, old: Numbers | None) -> bytes:
    raw = _HEAD.pack(_RAW, len(new), 0, 0, 0, new.nbytes)
    if old is None:
        return raw + new.tobytes()
    changed = np.flatnonzero(new != old)
    if not len(changed):
        return _HEAD.pack(_SAME, len(new), 0, 0, 0, 0)
    gaps = _gaps(changed)
    places = _deflated(gaps, zlib.Z_HUFFMAN_ONLY)
    differences = _deflated(_planes(new[changed] - old[changed]), zlib.Z_DEFAULT_STRATEGY)
    if len(places) + len(differences) >= new.nbytes:
        return raw + new.tobytes()
    return _HEAD.pack(_DELTA, len(new), len(changed), len(gaps), len(places), len(differences)) + places + differences


def _gaps(changed: NDArray[np.int64]) -> bytes:
    """Number of unchanged elements before every changed one, with escapes where a byte can't say it."""
    escapes, rest = np.divmod(np.diff(changed, prepend=-1) - 1, _ESCAPE)
    coded = np.full(len(changed) + int(escapes.sum()), _ESCAPE, np.uint8)
    coded[np.arange(len(changed)) + np.cumsum(escapes)] = rest
    return coded.tobytes()


def _places(gaps: NDArray[np.uint8], num_elements: int) -> NDArray[np.int64]:
    """The inverse of `_gaps`."""
    is_place = gaps != _ESCAPE
    found: NDArray[np.int64] = (np.cumsum(gaps.astype(np.int64) + is_place) - 1)[is_place]
    if len(found) and found[-1] >= num_elements:
        raise CodingError("a place beyond its block")
    return found


def _planes(differences: Numbers) -> bytes:
    """Differences by byte, the low ones first; small ones of both signs have the same zeros above."""
    signed = differences.view(f"i{differences.itemsize}")
    folded = (signed << 1) ^ (signed >> (8 * signed.itemsize - 1))
    return folded.view(np.uint8).reshape(-1, signed.itemsize).T.tobytes()


def _differences(planes: NDArray[np.uint8], itemsize: int) -> Numbers:
    """The inverse of `_planes`."""
    folded = np.ascontiguousarray(planes.reshape(itemsize, -1).T).view(f"u{itemsize}").reshape(-1)
    found: Numbers = (folded >> 1) ^ (0 - (folded & 1)).astype(folded.dtype)
    return found


def _deflated(data: bytes, strategy: int) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, 9, strategy)
    return coder.compress(data) + coder.flush()


def _inflated(data: memoryview, num_bytes: int) -> NDArray[np.uint8]:
    """`num_bytes`, and never more memory than that; CodingError for anything else."""
    coder = zlib.decompressobj(_RAW_DEFLATE)
    try:
        found = coder.decompress(data, num_bytes + 1)
    except zlib.error as error:
        raise CodingError(f"damaged: {error}") from None
    if len(found) != num_bytes or not coder.eof:
        raise CodingError(f"damaged: expected {num_bytes} bytes, found {len(found)} or more")
    return np.frombuffer(found, np.uint8)


class Decoder:
    """Takes the bytes of `blocks` in parts of any size, and fills `values` [num_elements] as they come.

    `old`: what the sender has coded them beside; None where all of it comes. Sizes are checked before memory is taken:
    what waits here is never more than a block as it is.
    """

    def __init__(self, values: Numbers, old: Numbers | None) -> None:
        self._values, self._old = values, old
        self._waiting = bytearray()
        self._filled = 0
        self.num_changed = 0
        """Elements that differ from those of `old`; all where there is none."""

    @property
    def is_done(self) -> bool:
        """True if all elements are there, and nothing beyond them has come."""
        return self._filled == len(self._values) and not self._waiting

    def take(self, data: bytes | memoryview) -> None:
        """Take the next bytes; CodingError for what can't be right."""
        self._waiting += data
        while len(self._waiting) >= HEAD_BYTES:
            kind, count, changed, num_gaps, places_bytes, rest_bytes = _HEAD.unpack_from(self._waiting)
            size = self._expect(kind, count, changed, num_gaps) * self._values.itemsize
            if places_bytes + rest_bytes > size:
                raise CodingError("a block that is longer than its weights")
            end = HEAD_BYTES + places_bytes + rest_bytes
            if len(self._waiting) < end:
                return
            body = memoryview(bytes(self._waiting[HEAD_BYTES:end]))
            del self._waiting[:end]
            self._fill(kind, count, (changed, num_gaps), (body[:places_bytes], body[places_bytes:]))

    def _expect(self, kind: int, count: int, changed: int, num_gaps: int) -> int:
        """Elements of the block that comes next."""
        expected = min(BLOCK_ELEMENTS, len(self._values) - self._filled)
        if not expected or count != expected or kind not in (_SAME, _RAW, _DELTA):
            raise CodingError(f"no block of {expected} weights")
        if changed > count or num_gaps > changed + count // _ESCAPE or (self._old is None and kind != _RAW):
            raise CodingError("a block that is coded beside other weights")
        return count

    def _fill(self, kind: int, count: int, sizes: tuple[int, int], parts: tuple[memoryview, memoryview]) -> None:
        target = self._values[self._filled : self._filled + count]
        if kind == _RAW:
            if len(parts[1]) != target.nbytes:
                raise CodingError(f"{len(parts[1])} bytes for {count} weights")
            target[:] = np.frombuffer(parts[1], target.dtype)
            self.num_changed += count
        else:
            assert self._old is not None
            target[:] = self._old[self._filled : self._filled + count]
        if kind == _DELTA:
            changed, num_gaps = sizes
            places = _places(_inflated(parts[0], num_gaps), count)
            if len(places) != changed:
                raise CodingError(f"{len(places)} places for {changed} changed weights")
            target[places] += _differences(_inflated(parts[1], changed * target.itemsize), target.itemsize)
            self.num_changed += changed
        self._filled += count
