"""Summary of a corpus' lengths: tokens beyond each length, slices, what chunks would gain on a job's cluster."""

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from farpipe.cost.chunks import ChunkCosts
from farpipe.errors import InfeasibleError
from farpipe.sequences.chunk import Floats, Ints
from farpipe.sequences.planner import BatchOptions, plan_sequences

_QUANTILES: Final = (0.5, 0.9, 0.99)
_PER_DOUBLING: Final = 2
"""Bars of the histogram between a length and twice that length."""
_FIRST_POWER: Final = 9
"""Of two: the shortest length that is told about, 512, unless all are shorter."""


@dataclass(frozen=True)
class Beyond:
    """Sequences that are longer than `tokens`."""

    tokens: int
    num_sequences: int
    sequence_share: float
    token_share: float
    """Of all tokens, those in sequences longer than this."""
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
        """As JSON data."""
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


@dataclass(frozen=True)
class Gain:
    """One batch on a job's cluster, with long sequences cut and with all sequences whole."""

    step_s: float
    num_slices: int
    num_chunks: int
    whole_step_s: float | None
    """With every sequence whole in one chunk; None: it does not fit."""
    whole_obstacle: str = ""

    @property
    def speedup(self) -> float | None:
        """Time of a step whose sequences stay whole over that of this one."""
        return None if self.whole_step_s is None else self.whole_step_s / self.step_s


def gain_of_chunks(costs: ChunkCosts, batch: Ints) -> Gain:
    """Gain of cutting long sequences for one batch; errors as for `plan_sequences`."""
    best = plan_sequences(costs, batch)
    try:
        whole_s, obstacle = plan_sequences(costs, batch, BatchOptions(num_slices=1)).step_s, ""
    except InfeasibleError as error:
        whole_s, obstacle = None, str(error)
    if whole_s is not None and best.num_slices == 1:
        whole_s = best.step_s
    return Gain(best.step_s, best.num_slices, len(best.chunks), whole_s, obstacle)


def histogram(lengths: Ints) -> tuple[Floats, Floats, Floats]:
    """(edges [n + 1], share of sequences [n], share of tokens [n]) by length, two bars to a doubling."""
    last = int(np.ceil(np.log2(float(lengths.max()) + 1) * _PER_DOUBLING))
    edges = 2.0 ** (np.arange(max(1, last) + 1) / _PER_DOUBLING)
    places = np.clip(np.searchsorted(edges, lengths, side="right") - 1, 0, edges.size - 2)
    count = np.bincount(places, minlength=edges.size - 1)
    tokens = np.bincount(places, lengths.astype(np.float64), edges.size - 1)
    return edges, count / lengths.size, np.asarray(tokens / lengths.sum(), np.float64)
