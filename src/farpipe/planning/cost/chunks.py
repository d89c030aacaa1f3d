"""Chunks of sequences: seconds and bytes of every stage for slices of any length with any context, and their Problem.

Seconds follow the laws of `chunk_laws`; bytes are linear in tokens. The head belongs to the backward of the last stage:
its logits would otherwise be kept for all chunks that are under way there, and nothing is computed twice by doing them
when they are needed. `job_chunks` makes these costs from a job.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from farpipe.core.document import Document
from farpipe.core.errors import InputError
from farpipe.core.step import BACKWARD, FORWARD, Hop, Problem, Rank, Stage, Sync, Transfer
from farpipe.core.strict import finite
from farpipe.planning.cost.chunk_laws import Floats, Law, Laws, Load

Ints = NDArray[np.int64]

PROBE_TOKENS: Final = 4096
"""Tokens of the one microbatch of `ChunkCosts.base`, that its messages have the size of."""


@dataclass(frozen=True)
class StageChunks:
    """Costs of a chunk on one stage; bytes are those of one device, per token of the chunk."""

    laws: Laws
    """Seconds with nothing recomputed; embedding, head and the fixed time of an action included."""
    layer: Laws
    """One layer's; each recomputed layer adds its forward to the backward."""
    num_layers: int
    activation_bytes: float
    stash_bytes: float
    saved_bytes: float
    """Bytes that each recomputed layer keeps less."""
    key_bytes: float
    """Keys and values of one layer, which a split sequence's slice keeps though it recomputes."""
    attention_bytes: float
    """One layer's attention output and the logarithms of its sums: a recomputed layer that keeps them computes no pairs
    again."""
    chain_bytes: float
    """Gradients of keys and values, of all layers."""
    working_bytes: float
    """One layer's activations while it is computed again."""
    logit_bytes: float
    """Logits and their gradients, in 32 bit, while the backward of the last stage begins."""
    whole_bytes: float = 0.0
    """Bytes one layer keeps besides for tokens of whole sequences: attention's output unless it is the next input."""

    @property
    def layer_forward(self) -> Law:
        """Seconds that each recomputed layer adds to the backward, which has gathered its parameters anyway."""
        return replace(self.layer.forward, least_s=0.0)

    @property
    def keeping_attention(self) -> "StageChunks":
        """The same if recomputed layers keep their attention's results, so that no backward computes pairs again."""
        forward = replace(self.layer.forward, pair_s=0.0, split_pair_s=-self.layer.input_grad.split_pair_s)
        saved_bytes = self.saved_bytes - self.attention_bytes
        return replace(self, layer=self.layer._replace(forward=forward), saved_bytes=saved_bytes)

    def kinds(self, keeps_attention: bool) -> "tuple[StageChunks, ...]":
        """Kinds of recomputation: keeping nothing, and attention's results where that is open and saves memory."""
        kept = self.keeping_attention
        return (self, kept) if keeps_attention and kept.saved_bytes > 0 else (self,)

    def held_bytes(self, load: Load, recomputed: Ints | int) -> Floats:
        """Bytes held from F to the end of the backward, when `recomputed` layers are: [num_chunks]."""
        whole = self.num_layers * self.whole_bytes * (load.tokens - load.split_tokens)
        return np.asarray(self.activation_bytes * load.tokens + whole - recomputed * self.saved_of(load))

    def saved_of(self, load: Load) -> Floats:
        """Bytes that one recomputed layer saves: [num_chunks]."""
        whole = self.whole_bytes * (load.tokens - load.split_tokens)
        return np.asarray(self.saved_bytes * load.tokens + whole - self.key_bytes * load.split_tokens)

    def chain_of(self, load: Load) -> Floats:
        """Gradients of keys and values that wait for a chunk's own backward: [num_chunks]."""
        return np.asarray(self.chain_bytes * load.split_tokens * ~load.is_last)


@dataclass(frozen=True)
class ChunkCosts(Document):
    """Costs of chunks of sequences on the stages of one job, as numbers only: ``farpipe/chunk-costs/1``."""

    FORMAT: ClassVar[str] = "farpipe/chunk-costs/1"

    stages: tuple[StageChunks, ...]
    base: Problem
    """The step of one microbatch of PROBE_TOKENS: static bytes, links, messages, collectives, ranks of the stages."""
    context: int
    """Devices that share every chunk of a stage (Ulysses)."""
    overhead_s: float
    """Seconds of the step outside the pipeline."""

    def to_body(self) -> dict[str, Any]:
        return asdict(self) | {"base": self.base.to_data()}

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        try:
            stages = tuple(_stage_of(stage) for stage in body["stages"])
            base = Problem.from_data(body["base"], f"{source}: base")
            found = cls(stages, base, int(body["context"]), finite(body["overhead_s"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{source}: not the costs of chunks: {error}") from None
        if len(stages) != base.num_stages or found.context < 1:
            raise InputError(f"{source}: {len(stages)} stages, but its problem has {base.num_stages}")
        return found

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.stages)

    @cached_property
    def folded(self) -> "ChunkCosts":
        """The same with all stages of a rank as one, round robin, and no collectives; itself where they are one.

        Cuts, packing and recomputation are chosen for ranks. Hops are those of the first pass over the ranks.
        """
        num_ranks = len(self.base.ranks)
        if num_ranks == self.num_stages:
            return self
        stages = tuple(_as_one(self.stages[rank::num_ranks]) for rank in range(num_ranks))
        first_pass = {"stages": self.base.stages[:num_ranks], "hops": self.base.hops[: num_ranks - 1]}
        base = self.base.changed(**first_pass, sync=None, exchanges=())
        return ChunkCosts(stages, base, self.context, self.overhead_s)

    @cached_property
    def keeping_attention(self) -> "ChunkCosts":
        """The same if recomputed layers keep their attention's output and sums: all but attention is recomputed."""
        return replace(self, stages=tuple(stage.keeping_attention for stage in self.stages))

    def headroom_bytes(self, load: Load, recomputed: Ints) -> Floats:
        """Memory of every rank for activations; infinite where memory is unlimited: [num_ranks]."""
        ranks = self._ranks(self.working_bytes(load, recomputed))
        return np.array([np.inf if r.memory_bytes is None else r.memory_bytes - r.static_bytes for r in ranks])

    def seconds(self, load: Load, recomputed: Ints | None = None) -> tuple[Floats, Floats, Floats]:
        """F, I and W of every stage and chunk, [num_stages, num_chunks] each; `recomputed` layers count to I."""
        rows = [[law.of_load(load) for law in stage.laws] for stage in self.stages]
        forward, input_grad, weight_grad = (np.stack(kind) for kind in zip(*rows, strict=True))
        if recomputed is not None:
            input_grad = input_grad + recomputed * self.again_s(load)
        return forward, input_grad, weight_grad

    def again_s(self, load: Load) -> Floats:
        """The forward of one layer: [num_stages, num_chunks]."""
        return np.stack([stage.layer_forward.of_load(load) for stage in self.stages])

    def trips(self, tokens: float) -> tuple[Floats, Floats]:
        """Seconds from a producer's end to the arrival, there and back over every hop, for a chunk of `tokens`."""
        (there_s, more_there_s), (back_s, more_back_s) = self._trip_lines
        scale = tokens / PROBE_TOKENS
        return there_s + scale * more_there_s, back_s + scale * more_back_s

    @cached_property
    def _trip_lines(self) -> tuple[tuple[Floats, Floats], ...]:
        """There and back over every hop: (seconds of no token, further seconds of PROBE_TOKENS)."""
        two = {"num_microbatches": 2, "hops": self._hops(np.array([0.0, 1.0])), "sync": None, "exchanges": ()}
        arrives_s = self.base.changed(**two).traffic.messages.arrives_after_s
        rows = arrives_s[FORWARD, :-1], arrives_s[BACKWARD, 1:]
        return tuple((row[:, 0], row[:, 1] - row[:, 0]) for row in rows)

    def working_bytes(self, load: Load, recomputed: Ints) -> Floats:
        """Working memory of a backward on every rank, at most: logits, or a layer computed again: [num_ranks]."""
        found = np.zeros(len(self.base.ranks))
        for spec, stage, layers in zip(self.base.stages, self.stages, recomputed, strict=True):
            needed = np.maximum(stage.working_bytes * (layers > 0), stage.logit_bytes) * load.tokens
            found[spec.rank] = max(found[spec.rank], float(needed.max(initial=0.0)))
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

        Where a step is several pipelines, only the first has what comes before it and only the last what comes after.
        """
        base, count = self.base, load.tokens.size
        times = self.seconds(load, recomputed)
        return Problem(
            num_microbatches=count,
            ranks=self._ranks(self.working_bytes(load, recomputed)),
            stages=tuple(
                self._problem_stage(i, load, [t[i] for t in times], recomputed[i]) for i in range(len(times[0]))
            ),
            links=base.links,
            hops=self._hops(load.tokens / PROBE_TOKENS),
            sync=_kept_sync(base.sync, gather, reduce),
            exchanges=base.exchanges if reduce else (),
            **_chains(follows),
        )

    def _problem_stage(self, index: int, load: Load, times: Sequence[Floats], recomputed: Ints) -> Stage:
        stage = self.stages[index]
        held = stage.held_bytes(load, recomputed)
        return Stage(
            rank=self.base.stages[index].rank,
            forward_s=_row(times[0]),
            input_grad_s=_row(times[1]),
            weight_grad_s=_row(times[2]),
            activation_bytes=_row(held),
            weight_stash_bytes=_row(stage.stash_bytes * load.tokens),
            **({"chain_bytes": _row(stage.chain_of(load))} if "chain_bytes" in Stage.model_fields else {}),
        )

    def _hops(self, scale: Floats) -> tuple[Hop | None, ...]:
        """The messages of chunks that are so many times as long as the one of `base`."""
        part = partial(self._scaled, scale)
        return tuple(hop and Hop(forward=part(hop.forward), backward=part(hop.backward)) for hop in self.base.hops)

    def _scaled(self, scale: Floats, transfer: Transfer | None) -> Transfer | None:
        """The message of every chunk; inside a site the devices that share it send side by side."""
        if transfer is None:
            return None
        assert isinstance(transfer.bytes, float)
        assert isinstance(transfer.link, str)
        side_by_side = 1 if self.base.between_sites[transfer.link] else self.context
        return Transfer(link=transfer.link, bytes=_row(transfer.bytes * scale / side_by_side))

    def _ranks(self, working_bytes: Floats) -> tuple[Rank, ...]:
        return tuple(
            Rank(memory_bytes=rank.memory_bytes, static_bytes=rank.static_bytes + float(more))
            for rank, more in zip(self.base.ranks, working_bytes, strict=True)
        )


def _as_one(stages: Sequence[StageChunks]) -> StageChunks:
    """Stages of one rank, whose chunk goes through all of them."""
    laws = stages[0].laws
    for stage in stages[1:]:
        laws = laws.plus(stage.laws)
    summed = ("num_layers", "activation_bytes", "stash_bytes", "chain_bytes", "logit_bytes")
    return replace(stages[0], laws=laws, **{name: sum(getattr(stage, name) for stage in stages) for name in summed})


def _stage_of(data: dict[str, Any]) -> StageChunks:
    """One stage as JSON data; KeyError, TypeError or ValueError where it is none."""
    fields: dict[str, Any] = {name: _laws_of(data[name]) for name in ("laws", "layer")}
    fields |= {name: finite(value) for name, value in data.items() if name not in fields}
    fields.setdefault("attention_bytes", fields["saved_bytes"])  # costs of before: not worth keeping
    return StageChunks(**fields | {"num_layers": int(data["num_layers"])})


def _laws_of(data: Any) -> Laws:
    return Laws(*(Law(**{name: finite(value) for name, value in law.items()}) for law in data))


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
