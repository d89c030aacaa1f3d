"""Summary of a corpus' lengths: tokens beyond each length, and slices."""

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from farpipe.planning.workload.chunk import Ints

_QUANTILES: Final = (0.5, 0.9, 0.99)
_FIRST_POWER: Final = 9
"""Power of two of the shortest length that is reported, 512, unless all are shorter."""


@dataclass(frozen=True)
class Beyond:
    """Sequences that are longer than `tokens`."""

    tokens: int
    num_sequences: int
    sequence_share: float
    token_share: float
    """Share of all tokens that is in sequences longer than this."""
    mean_slices: float
    """Slices of `tokens` that such a sequence would be, on average; 0 where there is none."""
    most_slices: int


@dataclass(frozen=True)
class LengthSummary:
    """The distribution of a corpus' lengths."""

    num_sequences: int
    num_tokens: int
    mean: float
    median: float
    p90: float
    p99: float
    longest: int
    beyond: tuple[Beyond, ...]

    def to_data(self) -> dict[str, Any]:
        """The summary as JSON data."""
        return asdict(self)


def summarize(lengths: Ints) -> LengthSummary:
    """The summary of a corpus, with every power of two up to its longest sequence."""
    middle, ninth, last = np.quantile(lengths, _QUANTILES)
    longest = int(lengths.max())
    powers = range(min(_FIRST_POWER, max(0, longest.bit_length() - 1)), longest.bit_length())
    return LengthSummary(
        num_sequences=int(lengths.size),
        num_tokens=int(lengths.sum()),
        mean=float(lengths.mean()),
        median=float(middle),
        p90=float(ninth),
        p99=float(last),
        longest=longest,
        beyond=tuple(_beyond(lengths, 1 << power) for power in powers),
    )


def _beyond(lengths: Ints, tokens: int) -> Beyond:
    longer = lengths[lengths > tokens]
    slices = -(-longer // tokens)
    return Beyond(
        tokens,
        int(longer.size),
        longer.size / lengths.size,
        float(longer.sum() / lengths.sum()),
        float(slices.mean()) if longer.size else 0.0,
        int(slices.max(initial=0)),
    )
