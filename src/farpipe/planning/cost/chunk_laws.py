"""Laws of chunks: seconds of F, I and W as functions of a chunk's tokens and pairs, fitted to the cost model.

A layer's time for one chunk is ``pair_s x pairs + token_s x tokens + fixed_s`` (InfiniPipe, arXiv 2509.21275, section
4.2; FlexSP and WLB-LLM fit the same): pairs of a query and a key for attention, tokens for everything else. Where that
was measured, a pair in a slice of a split sequence takes ``split_pair_s`` more, for the attention of such slices is
computed once more in the backward. F, I and W have coefficients of their own, for I has 5/2 of the forward's attention
and W none of it. They are fitted to the cost model of `compute`, which is affine itself where products are bound by
arithmetic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.spec import Model, Site, Training
from farpipe.core.step import occupied_s
from farpipe.planning.cost import compute
from farpipe.planning.cost.calibration import Calibration
from farpipe.planning.cost.exchange import Times
from farpipe.planning.cost.layout import Layout
from farpipe.planning.cost.transfer import head_exchange_bytes, head_exchange_link

Floats = NDArray[np.float64]

_SHORTEST_SHARE: Final = 1 / 256
"""Share of the longest sequence at which the lengths begin that a law is fitted on."""
_LEAST_LONGEST: Final = 262144
"""Tokens up to which a law is fitted at least: below, pairs hardly count, and the fit gives them time of tokens."""
_NUM_POINTS: Final = 17


class Load(NamedTuple):
    """Work of every chunk on a device, as arrays [num_chunks]."""

    tokens: Floats
    pairs: Floats
    """Pairs of a query and a key, as areas: (C + s)^2/2 - C^2/2 for a slice of s tokens behind C."""
    is_split: NDArray[np.bool_]
    """True if it has a slice of a split sequence, so that keys and values are used by other chunks."""
    split_tokens: Floats
    """Tokens of that slice."""
    is_last: NDArray[np.bool_]
    """True if that slice is its sequence's last, whose keys and values get no gradient from other chunks."""
    split_pairs: Floats
    """Pairs of that slice, which are among `pairs`."""
    further_calls: Floats
    """Calls of attention after the first: one for the split slice, one for all whole sequences of one length."""

    def part(self, begin: int, end: int) -> "Load":
        """That of chunks `begin` up to, not including, `end`."""
        mine = slice(begin, end)
        return Load(
            self.tokens[mine],
            self.pairs[mine],
            self.is_split[mine],
            self.split_tokens[mine],
            self.is_last[mine],
            self.split_pairs[mine],
            self.further_calls[mine],
        )


@dataclass(frozen=True)
class Law:
    """Seconds of one action as a function of a chunk's pairs and tokens."""

    pair_s: float = 0.0
    token_s: float = 0.0
    fixed_s: float = 0.0
    split_pair_s: float = 0.0
    """Further seconds of a pair in a slice of a split sequence."""
    least_s: float = 0.0
    """Seconds of what runs beside it: no action is shorter, however few its tokens."""
    call_s: float = 0.0
    """Seconds of every call of attention after a chunk's first; kernels for packed sequences need no such calls."""

    def __add__(self, other: "Law") -> "Law":
        return Law(
            self.pair_s + other.pair_s,
            self.token_s + other.token_s,
            self.fixed_s + other.fixed_s,
            self.split_pair_s + other.split_pair_s,
            self.least_s + other.least_s,
            self.call_s + other.call_s,
        )

    def times(self, factor: float) -> "Law":
        """All six multiplied by `factor`."""
        return Law(*(getattr(self, part.name) * factor for part in fields(self)))

    def spread(self, num_devices: int) -> "Law":
        """The work divided over devices; what is fixed is each one's."""
        shared = (self.pair_s / num_devices, self.token_s / num_devices)
        return Law(*shared, self.fixed_s, self.split_pair_s / num_devices, self.least_s, self.call_s)

    @property
    def of_slices(self) -> "Law":
        """The law of chunks of which all pairs are those of slices of split sequences."""
        return Law(self.pair_s + self.split_pair_s, self.token_s, self.fixed_s)

    def seconds(
        self, tokens: Floats, pairs: Floats, split_pairs: Floats | float = 0.0, further_calls: Floats | float = 0.0
    ) -> Floats:
        """Seconds of chunks: [num_chunks]."""
        attention_s = self.pair_s * pairs + self.split_pair_s * split_pairs + self.call_s * further_calls
        return np.maximum(attention_s + self.token_s * tokens + self.fixed_s, self.least_s)

    def of_load(self, load: Load) -> Floats:
        """Seconds of the chunks of a load: [num_chunks]."""
        return self.seconds(load.tokens, load.pairs, load.split_pairs, load.further_calls)


class Laws(NamedTuple):
    """The law of each kind of action."""

    forward: Law
    input_grad: Law
    weight_grad: Law

    def plus(self, other: "Laws") -> "Laws":
        """Both, one after the other."""
        return Laws(*(mine + its for mine, its in zip(self, other, strict=True)))

    def times(self, factor: float) -> "Laws":
        """Each multiplied by `factor`."""
        return Laws(*(law.times(factor) for law in self))

    def spread(self, num_devices: int) -> "Laws":
        """Each with its work divided over devices."""
        return Laws(*(law.spread(num_devices) for law in self))

    @property
    def total(self) -> Law:
        """Forward and backward."""
        return self.forward + self.input_grad + self.weight_grad


def fit_law(
    tokens: Floats,
    pairs: Floats,
    seconds: Floats,
    split_pairs: Floats | None = None,
    further_calls: Floats | None = None,
) -> Law:
    """The law with the least sum of squared relative errors, none of its coefficients below zero.

    Without `split_pairs` all pairs are alike, without `further_calls` calls take no time.
    """
    seconds = np.maximum(seconds, 1e-30)
    of_parts = {"pair_s": pairs, "token_s": tokens, "fixed_s": np.ones_like(tokens)}
    measured = {"split_pair_s": split_pairs, "call_s": further_calls}
    of_parts |= {name: row for name, row in measured.items() if row is not None}
    rows = list(of_parts.values())
    columns = np.stack(rows, 1) / seconds[:, None]
    best, least = np.zeros(len(rows)), np.inf
    for size in range(len(rows), 0, -1):
        for chosen in map(list, combinations(range(len(rows)), size)):
            found = np.linalg.lstsq(columns[:, chosen], np.ones_like(seconds), rcond=None)[0]
            error = float(((columns[:, chosen] @ found - 1) ** 2).sum())
            if found.min() >= 0 and error < least:
                best, least = np.zeros(len(rows)), error
                best[chosen] = found
    return Law(**dict(zip(of_parts, best.tolist(), strict=True)))


def model_laws(
    model: Model,
    training: Training,
    layout: Layout,
    site: Site,
    calibration: Calibration,
    *,
    longest: int,
    context: int = 1,
) -> tuple[Laws, Laws, Laws]:
    """The laws of one layer, of the embedding and of the head, fitted to the cost model up to `longest` tokens or more.

    A sequence of s tokens has s^2/2 pairs; a slice's pairs are taken to cost the same.
    """
    shared, alone = replace(layout, context=context), replace(layout, pipeline=1, data=1, virtual=1, replica_sites=())
    unsharded = training.model_copy(update={"zero": 0, "global_batch": 1})
    bare = site.model_copy(update={"name": "", "num_devices": 0, "prices": None})
    layer, embedding, head = _of_one_device(model, unsharded, alone, bare, calibration, max(longest, _LEAST_LONGEST))
    traffic = compute.zero_times(model, training, shared, site, calibration, Times(0.0, 0.0, 0.0))
    is_beside = training.overlap and calibration.overlap_fraction > 0
    layer = layer_on_several(layer, model, training, layout, site, calibration, context)
    layer = layer.plus(_sharded(layer, traffic, is_beside=is_beside))
    return layer, embedding.spread(context), head.spread(context)


@lru_cache(maxsize=256)
def _of_one_device(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration, longest: int
) -> tuple[Laws, Laws, Laws]:
    """Laws of one layer, of the embedding and of the head on a device that shares no chunks; planners ask for the same
    ones under hundreds of layouts."""
    lengths = np.unique(np.geomspace(longest * _SHORTEST_SHARE, longest, _NUM_POINTS).astype(np.int64))
    parts = (compute.layer_times, compute.embedding_times, compute.head_times)
    rows: list[list[Times]] = [[], [], []]
    for length in lengths.tolist():
        training = training.model_copy(update={"sequence_length": length})
        for row, times in zip(rows, parts, strict=True):
            row.append(times(model, training, layout, site, calibration))
    tokens = lengths.astype(np.float64)
    pairs = [tokens**2 / 2, np.zeros_like(tokens), np.zeros_like(tokens)]
    layer, embedding, head = (_laws(tokens, p, row) for p, row in zip(pairs, rows, strict=True))
    return layer, embedding, head


def layer_on_several(
    layer: Laws, model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration, context: int
) -> Laws:
    """Laws of a layer whose chunks `context` devices of a site share by Ulysses, from those of one device: their
    tokens, or heads of attention, and the exchange of both. The devices with most heads set the pace of attention."""
    heads = model.num_heads / layout.tensor
    uneven = math.ceil(heads / context) * context / heads
    laws = Laws(
        *(
            replace(law, pair_s=law.pair_s * uneven, split_pair_s=law.split_pair_s * uneven)
            for law in layer.spread(context)
        )
    )
    exchange = _all_to_all(model, training, layout, site, calibration, context)
    return laws.plus(Laws(exchange, exchange, Law()))


def _sharded(layer: Laws, traffic: Times, *, is_beside: bool) -> Laws:
    """Laws of ZeRO-2's and 3's collectives for a layer: beside each chunk's compute, or before it (exposed)."""

    def law(seconds: float) -> Law:
        return Law(least_s=seconds) if is_beside else Law(fixed_s=seconds)

    backward_s = layer.input_grad.token_s + layer.weight_grad.token_s
    of_input = layer.input_grad.token_s / backward_s if backward_s else 1.0
    backward = law(traffic.input_grad_s)
    return Laws(law(traffic.forward_s), backward.times(of_input), backward.times(1 - of_input))


def _laws(tokens: Floats, pairs: Floats, times: Sequence[Times]) -> Laws:
    kinds = ("forward_s", "input_grad_s", "weight_grad_s")
    return Laws(*(fit_law(tokens, pairs, np.array([getattr(t, kind) for t in times])) for kind in kinds))


def _all_to_all(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration, context: int
) -> Law:
    """The exchange of heads for tokens before and after attention, per token of the whole chunk."""
    if context == 1:
        return Law()
    effective = head_exchange_link(site, calibration, context, layout.tensor)
    each = head_exchange_bytes(model, training, layout.tensor, 1 / context)
    return Law(token_s=occupied_s(effective, each), fixed_s=effective.latency_s)
