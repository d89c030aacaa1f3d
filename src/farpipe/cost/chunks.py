"""Chunks of sequences: seconds and bytes of a stage for slices of any length with any context.

A layer's time for one chunk is ``pair_s x pairs + token_s x tokens + fixed_s`` (InfiniPipe, arXiv 2509.21275, section
4.2; FlexSP and WLB-LLM fit the same): pairs of a query and a key for attention, tokens for everything else. F, I and W
have coefficients of their own, for I has 5/2 of the forward's attention and W none of it. They are fitted to the cost
model of `compute`, which is affine itself where products are bound by arithmetic. Bytes are linear in tokens.

The head belongs to the backward of the last stage: its logits would otherwise be kept for all chunks that are under way
there, and nothing is computed twice by doing them when they are needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.cost import compute, memory
from farpipe.cost.calibration import Calibration
from farpipe.cost.compute import Times
from farpipe.cost.layout import Layout, Placement
from farpipe.cost.stage import JobCosts
from farpipe.cost.step import StepCost, step_cost
from farpipe.cost.transfer import ring_bytes, ring_way
from farpipe.errors import InputError
from farpipe.spec import Cluster, Model, Site, Training
from farpipe.step import Hop, Problem, Rank, Stage, Sync, Transfer, is_inter_site

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ALL_TO_ALLS: Final = 4
"""In a layer's forward, and as many in its backward: queries, keys, values, context (Ulysses, arXiv 2309.14509)."""
_SHORTEST_SHARE: Final = 1 / 256
"""Of the longest sequence: where the lengths begin that a law is fitted on."""
_NUM_POINTS: Final = 17


class Load(NamedTuple):
    """What every chunk makes a device do, as arrays [num_chunks]."""

    tokens: Floats
    pairs: Floats
    """Pairs of a query and a key, as areas: (C + s)^2/2 - C^2/2 for a slice of s tokens behind C."""
    is_split: NDArray[np.bool_]
    """Whether it has a slice of a split sequence, so that keys and values are used by other chunks."""
    split_tokens: Floats
    """Tokens of that slice."""
    is_last: NDArray[np.bool_]
    """Whether that slice is its sequence's last, whose keys and values get no gradient from other chunks."""

    def part(self, begin: int, end: int) -> "Load":
        """That of chunks `begin` up to, not including, `end`."""
        mine = slice(begin, end)
        return Load(
            self.tokens[mine], self.pairs[mine], self.is_split[mine], self.split_tokens[mine], self.is_last[mine]
        )


@dataclass(frozen=True)
class Law:
    """Seconds of one action as a function of a chunk's pairs and tokens."""

    pair_s: float = 0.0
    token_s: float = 0.0
    fixed_s: float = 0.0

    def __add__(self, other: "Law") -> "Law":
        return Law(self.pair_s + other.pair_s, self.token_s + other.token_s, self.fixed_s + other.fixed_s)

    def times(self, factor: float) -> "Law":
        """All three multiplied by `factor`."""
        return Law(self.pair_s * factor, self.token_s * factor, self.fixed_s * factor)

    def spread(self, num_devices: int) -> "Law":
        """The work divided over devices; what is fixed is each one's."""
        return Law(self.pair_s / num_devices, self.token_s / num_devices, self.fixed_s)

    def seconds(self, tokens: Floats, pairs: Floats) -> Floats:
        """Seconds of chunks: [num_chunks]."""
        return np.asarray(self.pair_s * pairs + self.token_s * tokens + self.fixed_s)


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

    @property
    def total(self) -> Law:
        """Forward and backward."""
        return self.forward + self.input_grad + self.weight_grad


def fit_law(tokens: Floats, pairs: Floats, seconds: Floats) -> Law:
    """The law with the least sum of squared relative errors, none of its coefficients below zero."""
    seconds = np.maximum(seconds, 1e-30)
    columns = np.stack([pairs, tokens, np.ones_like(tokens)], 1) / seconds[:, None]
    best, least = np.zeros(3), np.inf
    for size in (3, 2, 1):
        for chosen in map(list, combinations(range(3), size)):
            found = np.linalg.lstsq(columns[:, chosen], np.ones_like(seconds), rcond=None)[0]
            error = float(((columns[:, chosen] @ found - 1) ** 2).sum())
            if found.min() >= 0 and error < least:
                best, least = np.zeros(3), error
                best[chosen] = found
    return Law(*map(float, best))


@dataclass(frozen=True)
class StageChunks:
    """What one stage costs for a chunk; bytes are those of one device, per token of the chunk."""

    laws: Laws
    """With nothing recomputed; embedding, head and the fixed time of an action included."""
    layer_forward: Law
    """What each recomputed layer adds to the backward."""
    num_layers: int
    activation_bytes: float
    stash_bytes: float
    saved_bytes: float
    """What each recomputed layer keeps less."""
    key_bytes: float
    """Keys and values of one layer, which a split sequence's slice keeps though it recomputes."""
    chain_bytes: float
    """Gradients of keys and values, of all layers."""
    working_bytes: float
    """One layer's activations while it is computed again."""
    logit_bytes: float
    """Logits and their gradients, in 32 bit, while the backward of the last stage begins."""

    def held_bytes(self, load: Load, recomputed: Ints | int) -> Floats:
        """From F to the end of the backward, when `recomputed` layers are: [num_chunks]."""
        return np.asarray(self.activation_bytes * load.tokens - recomputed * self.saved_of(load))

    def saved_of(self, load: Load) -> Floats:
        """Bytes that one recomputed layer saves: [num_chunks]."""
        return np.asarray(self.saved_bytes * load.tokens - self.key_bytes * load.split_tokens)

    def chain_of(self, load: Load) -> Floats:
        """Gradients of keys and values that wait for a chunk's own backward: [num_chunks]."""
        return np.asarray(self.chain_bytes * load.split_tokens * ~load.is_last)


class ChunkCosts:
    """What chunks of sequences cost on the stages of one job.

    `context` devices share every chunk of a stage (Ulysses): activations, work, and with ZeRO-1 the optimizer's state.
    `longest` is the longest sequence that laws have to hold for. InputError without flash attention, whose absence
    would make memory grow with the square of a length; errors of `step_cost` for the rest.
    """

    def __init__(
        self,
        costs: JobCosts,
        layout: Layout,
        placements: Sequence[Placement],
        cluster: Cluster,
        longest: int,
        context: int = 1,
    ) -> None:
        model, training = costs.model, costs.training
        if not training.flash_attention:
            raise InputError("training.flash_attention: chunks of sequences need it; leave it out or set it to true")
        self.model, self.layout, self.placements, self.context = model, layout, tuple(placements), context
        self.longest = longest
        probe = training.model_copy(
            update={"sequence_length": _PROBE_TOKENS, "global_batch": layout.data, "microbatch_size": 1}
        )
        self._probe = probe.model_copy(update={"recompute": "none"})
        self._layout = replace(layout, microbatch_size=1, num_microbatches=1)
        plain = [replace(placement, recompute="none") for placement in placements]
        self._costs = JobCosts(model, self._probe, None, {s.device.name: costs.calibration(s) for s in cluster.sites})
        self.step: StepCost = step_cost(self._costs, self._layout, plain, cluster)
        self._sites = [cluster.site(p.site) for p in placements]
        self._laws: dict[str, tuple[Laws, Laws, Laws]] = {}
        self.stages = tuple(self._stage(index) for index in range(len(placements)))
        self.overhead_s = self.step.overhead_s + self._context_sync_s()

    def _stage(self, index: int) -> StageChunks:
        num_layers, last = self.placements[index].num_layers, len(self.placements) - 1
        layer, embedding, head = self._laws_at(self._sites[index])
        overhead = Law(fixed_s=self._costs.calibration(self._sites[index]).action_overhead_s)
        laws = layer.times(num_layers).plus(Laws(overhead, overhead, Law()))
        late_head = Laws(Law(), head.forward + head.input_grad, head.weight_grad)
        for part in [embedding] * (index == 0) + [late_head] * (index == last):
            laws = laws.plus(part)
        return StageChunks(laws, layer.forward, num_layers, **self._bytes(num_layers, index == 0, index == last))

    def _laws_at(self, site: Site) -> tuple[Laws, Laws, Laws]:
        if site.name not in self._laws:
            job = (self.model, self._probe, self._layout, site, self._costs.calibration(site))
            self._laws[site.name] = model_laws(*job, longest=self.longest, context=self.context)
        return self._laws[site.name]

    def _bytes(self, num_layers: int, is_first: bool, is_last: bool) -> dict[str, float]:
        job = (self.model, self._probe, self._layout)
        share = self._probe.sequence_length * self.context
        layer = memory.layer_activation_bytes(*job)
        least = memory.layer_activation_bytes(self.model, self._probe.model_copy(update={"recompute": "full"}), job[2])
        ends = is_first * memory.embedding_activation_bytes(*job) + is_last * memory.boundary_bytes(*job)
        logits = 2 * 4 * self._probe.sequence_length * self.model.vocab_size / self.layout.tensor
        ends_stash = is_first * memory.embedding_stash_bytes(*job) + is_last * memory.head_stash_bytes(*job)
        keys = 2 * self.model.kv_hidden / (self.layout.tensor * self.context)
        return {
            "activation_bytes": (num_layers * layer + ends) / share,
            "stash_bytes": (num_layers * memory.layer_stash_bytes(*job) + ends_stash) / share,
            "saved_bytes": (layer - least) / share,
            "key_bytes": keys * memory.element_bytes(self._probe.precision),
            "chain_bytes": num_layers * keys * memory.gradient_bytes(self._probe.precision),
            "working_bytes": layer / share,
            "logit_bytes": is_last * logits / share,
        }

    @property
    def layer_laws(self) -> tuple[Laws, ...]:
        """One layer's on every stage."""
        return tuple(self._laws_at(site)[0] for site in self._sites)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.stages)

    def room_bytes(self, load: Load, recomputed: Ints) -> Floats:
        """What every rank has for activations; infinite where memory is unlimited: [num_ranks]."""
        ranks = self._ranks(self.working_bytes(load, recomputed))
        return np.array([np.inf if r.memory_bytes is None else r.memory_bytes - r.static_bytes for r in ranks])

    def seconds(self, load: Load, recomputed: Ints | None = None) -> tuple[Floats, Floats, Floats]:
        """F, I and W of every stage and chunk, [num_stages, num_chunks] each; `recomputed` layers count to I."""
        rows = [[law.seconds(load.tokens, load.pairs) for law in stage.laws] for stage in self.stages]
        forward, input_grad, weight_grad = (np.stack(kind) for kind in zip(*rows, strict=True))
        if recomputed is not None:
            input_grad = input_grad + recomputed * self.again_s(load)
        return forward, input_grad, weight_grad

    def again_s(self, load: Load) -> Floats:
        """The forward of one layer: [num_stages, num_chunks]."""
        return np.stack([stage.layer_forward.seconds(load.tokens, load.pairs) for stage in self.stages])

    def trips(self, tokens: float) -> tuple[Floats, Floats]:
        """Seconds from a producer's end to the arrival, there and back over every hop, for a chunk of `tokens`."""
        problem = self.step.problem
        hops = [_hop(hop, np.array([tokens / _PROBE_TOKENS]), self.context) for hop in problem.hops]
        found = [
            (_seconds(problem, hop.forward), _seconds(problem, hop.backward)) if hop else (0.0, 0.0) for hop in hops
        ]
        there, back = zip(*found, strict=True) if found else ((), ())
        return np.array(there, np.float64), np.array(back, np.float64)

    def working_bytes(self, load: Load, recomputed: Ints) -> Floats:
        """What a backward takes for a while on every rank, at most: logits, or a layer computed again: [num_ranks]."""
        found = np.zeros(len(self.step.problem.ranks))
        for placement, stage, layers in zip(self.placements, self.stages, recomputed, strict=True):
            needed = np.maximum(stage.working_bytes * (layers > 0), stage.logit_bytes) * load.tokens
            found[placement.rank] = max(found[placement.rank], float(needed.max(initial=0.0)))
        return found

    def problem(
        self,
        load: Load,
        follows: Sequence[int | None],
        recomputed: Ints,
        *,
        gather: bool = True,
        reduce: bool = True,
    ) -> Problem:
        """One pipeline of chunks as a Problem; `recomputed`: layers of every stage and chunk, [S, M].

        Where a step is several pipelines, only the first has the gathers of the replicas and only the last the reduces.
        """
        base, count = self.step.problem, load.tokens.size
        times = self.seconds(load, recomputed)
        return Problem(
            num_microbatches=count,
            ranks=self._ranks(self.working_bytes(load, recomputed)),
            stages=tuple(
                self._problem_stage(i, load, [t[i] for t in times], recomputed[i]) for i in range(len(times[0]))
            ),
            links=base.links,
            hops=tuple(_hop(hop, load.tokens / _PROBE_TOKENS, self.context) for hop in base.hops),
            sync=_kept_sync(base.sync, gather, reduce),
            **_chains(follows),
        )

    def _problem_stage(self, index: int, load: Load, times: Sequence[Floats], recomputed: Ints) -> Stage:
        stage = self.stages[index]
        held = stage.held_bytes(load, recomputed)
        return Stage(
            rank=self.placements[index].rank,
            forward_s=_row(times[0]),
            input_grad_s=_row(times[1]),
            weight_grad_s=_row(times[2]),
            activation_bytes=_row(held),
            weight_stash_bytes=_row(stage.stash_bytes * load.tokens),
            **({"chain_bytes": _row(stage.chain_of(load))} if "chain_bytes" in Stage.model_fields else {}),
        )

    def _ranks(self, working_bytes: Floats) -> tuple[Rank, ...]:
        shared = self._state_shared_bytes()
        return tuple(
            Rank(memory_bytes=rank.memory_bytes, static_bytes=rank.static_bytes - less + float(more))
            for rank, less, more in zip(self.step.problem.ranks, shared, working_bytes, strict=True)
        )

    def _state_shared_bytes(self) -> list[float]:
        """What ZeRO-1 over the context-parallel devices takes off every rank."""
        shared = [0.0] * len(self.step.problem.ranks)
        if self.context == 1 or not self._probe.zero1:
            return shared
        for index, placement in enumerate(self.placements):
            shared[placement.rank] += (1 - 1 / self.context) * self._optimizer_bytes(index)
        return shared

    def _optimizer_bytes(self, index: int) -> float:
        per_param = memory.optimizer_bytes(self._probe.precision) / self.layout.data
        return self._num_params(index) / self.layout.tensor * per_param

    def _num_params(self, index: int) -> int:
        site, num_layers = self._sites[index], self.placements[index].num_layers
        ends = {"embedding": index == 0, "head": index == len(self.placements) - 1}
        return self._costs.stage(self._layout, site, num_layers, "none", **ends).num_params

    def _context_sync_s(self) -> float:
        """The devices that share chunks sum their gradients after the step, as replicas do."""
        if self.context == 1:
            return 0.0
        seconds = []
        for index, site in enumerate(self._sites):
            way = ring_way(site, self._costs.calibration(site), self.context, self.layout.tensor)
            gradients = self._num_params(index) / self.layout.tensor * memory.gradient_bytes(self._probe.precision)
            seconds.append(way.seconds(ring_bytes("all-reduce", gradients, self.context)))
        return max(seconds)


_PROBE_TOKENS: Final = 4096
"""Length of the one sequence whose step tells static bytes, links, collectives and what is outside the pipeline."""


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
    """The laws of one layer, of the embedding and of the head, fitted to the cost model up to `longest` tokens.

    A sequence of s tokens has s^2/2 pairs; a slice's pairs are taken to cost the same.
    """
    lengths = np.unique(np.geomspace(max(1, longest * _SHORTEST_SHARE), longest, _NUM_POINTS).astype(np.int64))
    parts = (compute.layer_times, compute.embedding_times, compute.head_times)
    rows: list[list[Times]] = [[], [], []]
    for length in lengths.tolist():
        training = training.model_copy(update={"sequence_length": length})
        for row, times in zip(rows, parts, strict=True):
            row.append(times(model, training, layout, site, calibration))
    tokens = lengths.astype(np.float64)
    pairs = [tokens**2 / 2, np.zeros_like(tokens), np.zeros_like(tokens)]
    layer, embedding, head = (_laws(tokens, p, row) for p, row in zip(pairs, rows, strict=True))
    exchange = _all_to_all(model, training, layout, site, calibration, context)
    layer = _spread(layer, context).plus(Laws(exchange, exchange, Law()))
    return layer, _spread(embedding, context), _spread(head, context)


def _spread(laws: Laws, num_devices: int) -> Laws:
    return Laws(*(law.spread(num_devices) for law in laws))


def _laws(tokens: Floats, pairs: Floats, times: Sequence[Times]) -> Laws:
    kinds = ("forward_s", "input_grad_s", "weight_grad_s")
    return Laws(*(fit_law(tokens, pairs, np.array([getattr(t, kind) for t in times])) for kind in kinds))


def _all_to_all(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration, context: int
) -> Law:
    """The exchange of heads for tokens before and after attention, per token of the whole chunk."""
    if context == 1:
        return Law()
    way = ring_way(site, calibration, context, layout.tensor)
    width = 2 * (model.attention_hidden + model.kv_hidden) / layout.tensor * memory.element_bytes(training.precision)
    share = width / context * (context - 1) / context
    start = calibration.collective_start_s + way.latency_s
    return Law(token_s=share / way.bandwidth_bytes_per_s, fixed_s=ALL_TO_ALLS * start)


def _hop(hop: Hop | None, scale: Floats, context: int) -> Hop | None:
    if hop is None:
        return None
    return Hop(forward=_scaled(hop.forward, scale, context), backward=_scaled(hop.backward, scale, context))


def _scaled(transfer: Transfer | None, scale: Floats, context: int) -> Transfer | None:
    """The message of every chunk; inside a site the devices that share it send side by side."""
    if transfer is None:
        return None
    assert isinstance(transfer.bytes, float)
    assert isinstance(transfer.link, str)
    side_by_side = 1 if is_inter_site(transfer.link) else context
    return Transfer(link=transfer.link, bytes=_row(transfer.bytes * scale / side_by_side))


def _seconds(problem: Problem, transfer: Transfer | None) -> float:
    """One message on its empty link."""
    if transfer is None:
        return 0.0
    assert isinstance(transfer.link, str)
    link, num_bytes = problem.links[transfer.link], transfer.bytes
    return link.latency_s + float(np.max(num_bytes)) / link.bandwidth_bytes_per_s


def _chains(follows: Sequence[int | None]) -> dict[str, Any]:
    if "follows" not in Problem.model_fields or all(before is None for before in follows):
        return {}
    return {"follows": tuple(follows)}


def _kept_sync(sync: tuple[Sync | None, ...] | None, gather: bool, reduce: bool) -> tuple[Sync | None, ...] | None:
    if sync is None or not (gather or reduce):
        return None
    return tuple(
        one and Sync(gather=one.gather if gather else None, reduce=one.reduce if reduce else None) for one in sync
    )


def _row(values: Floats) -> tuple[float, ...]:
    return tuple(np.maximum(values, 0.0).tolist())
