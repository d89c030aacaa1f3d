"""A shuffled order of any length without a list of it: each place is computed from its number and a key.

A Feistel network turns numbers of an even number of bits into each other one to one; a result that is too large goes
through it again until it is not ("cycle walking", Black and Rogaway 2002), which keeps the order a permutation.
"""

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS: Final = 6
_MIX: Final = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
"""Multipliers of MurmurHash3's finalizer, which spreads every bit over all others."""
_SHIFT: Final = np.uint64(33)


class Permutation:
    """Of ``0 .. size - 1``; the same for the same `key`."""

    def __init__(self, size: int, *key: int | str) -> None:
        assert 1 <= size < 1 << 62
        self.size = size
        half_bits = max(1, -(-(size - 1).bit_length() // 2))
        self._half, self._mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
        digest = hashlib.shake_256(repr((size, key)).encode()).digest(8 * NUM_ROUNDS)
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elements at `places`, which must be at least 0 and less than `size`: [...] -> [...]."""
        found = self._turn(places.astype(np.uint64))
        while (outside := found >= np.uint64(self.size)).any():
            found[outside] = self._turn(found[outside])
        return found.astype(np.int64)

    def _turn(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return (left << self._half) | right


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for factor in _MIX:
        numbers = (numbers ^ (numbers >> _SHIFT)) * factor
    return numbers ^ (numbers >> _SHIFT)
