"""Message to all ranks about one step on chunks: its chunks, what each recomputes, and the order of actions.

Lengths and slices travel, not tensors: a rank finds the tokens by the numbers of the sequences, and makes the step's
Problem from the costs that it has.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, Self

import numpy as np

from farpipe.core.document import Document
from farpipe.core.errors import InputError
from farpipe.core.step import Action, Problem, Schedule
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.workload.batch_options import BatchOptions
from farpipe.planning.workload.chunk import Chunk, Ints, followed, load_of
from farpipe.planning.workload.sequence_plan import SequencePlan

Packing = Literal["elastic", "fixed", "none"]
_CHUNKS_PER_S: Final = 4_000
"""Priced within a limit of time, of which pricing has half: about half of what one quiet core does, so that the clock
hardly ever decides."""


def options_of(packing: Packing, limit_s: float = math.inf) -> BatchOptions:
    """Options of planning batches: ``elastic``; ``fixed``, slices and chunks of equal tokens with equal recomputation
    (Seq1F1B, arXiv 2406.03488); ``none``, every sequence whole in a chunk of its own.

    `limit_s`: for who can't wait longer; the budget is so small then that the clock decides on slow machines only.
    """
    limits: Any = {"limit_s": limit_s}
    if limit_s < math.inf:
        limits["budget"] = min(BatchOptions.budget, int(limit_s * _CHUNKS_PER_S))
    if packing == "fixed":
        return BatchOptions(equal="tokens", checkpointing="uniform", several_pipelines=False, shrinks=False, **limits)
    if packing == "none":
        return BatchOptions(num_slices=1, rule="alone", **limits)
    return BatchOptions(**limits)


@dataclass(frozen=True, eq=False)
class StepPlan(Document):
    """One step of one replica: ``farpipe/step-plan/1``. A chunk's number is its microbatch."""

    FORMAT: ClassVar[str] = "farpipe/step-plan/1"

    chunks: tuple[Chunk, ...]
    """Sequences are counted over the whole batch, also where other replicas have some of them."""
    recomputed: Ints
    """Layers that every stage computes again of every chunk: [num_stages, num_chunks]."""
    schedule: Schedule
    keeps_attention: bool = False
    """True if layers that are computed again keep their attention's output and sums."""
    groups: tuple[tuple[int, int], ...] = ()
    """(first process, number of processes) of the neighbours that share each chunk of one stage; (): all share all."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    def problem(self, costs: ChunkCosts) -> Problem:
        """The step as a Problem."""
        of_kind = costs.keeping_attention if self.keeps_attention else costs
        return of_kind.problem(load_of(self.chunks), followed(self.chunks), self.recomputed)

    def to_body(self) -> dict[str, Any]:
        return {
            "chunks": [[list(part) for part in chunk.slices] for chunk in self.chunks],
            "recomputed": self.recomputed.tolist(),
            "keeps_attention": self.keeps_attention,
            "schedule": self.schedule.to_data(),
            **({"groups": [list(group) for group in self.groups]} if self.groups else {}),
        }

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        try:
            names = ("sequence", "start", "length", "sequence_length")
            chunks = tuple(
                Chunk.from_data([dict(zip(names, part, strict=True)) for part in slices], f"{source}: chunks[{index}]")
                for index, slices in enumerate(body["chunks"])
            )
            schedule = Schedule.from_data(body["schedule"], f"{source}: schedule")
            recomputed = np.array(body["recomputed"], np.int64)
            keeps_attention = body.get("keeps_attention", False)
            groups = tuple((int(first), int(degree)) for first, degree in body.get("groups", ()))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{source}: not the plan of a step: {error}") from None
        if recomputed.ndim != 2 or recomputed.shape[1] != len(chunks) or schedule.num_microbatches != len(chunks):
            raise InputError(f"{source}: {len(chunks)} chunks, but recomputed is {list(recomputed.shape)}")
        if not isinstance(keeps_attention, bool):
            raise InputError(f"{source}: keeps_attention is {keeps_attention!r}, not true or false")
        if groups and (len(groups) != len(chunks) or any(first < 0 or degree < 1 for first, degree in groups)):
            raise InputError(f"{source}: {len(chunks)} chunks, but groups are {[*map(list, groups)]}")
        followed(chunks)
        return cls(chunks, recomputed, schedule, keeps_attention, groups)


def step_plan(plan: SequencePlan, sequences: Sequence[int] | Ints | None = None) -> StepPlan:
    """A batch's plan as one step: its pipelines one after the other on every rank, without a barrier between them.

    `sequences`: what the batch's are called in the whole batch; None: 0, 1, ...
    """
    batch = (
        plan.batch if sequences is None else replace(plan.batch, sequence=np.asarray(sequences)[plan.batch.sequence])
    )
    recomputed = np.concatenate([pipeline.recomputed for pipeline in plan.pipelines], axis=1)
    schedule = joined([pipeline.schedule for pipeline in plan.pipelines])
    return StepPlan(tuple(batch.chunks()), recomputed, schedule, plan.keeps_attention)


def joined(schedules: Sequence[Schedule]) -> Schedule:
    """Schedules one after the other; microbatches are counted on."""
    firsts = np.cumsum([0, *(schedule.num_microbatches for schedule in schedules)]).tolist()
    ranks = zip(*(schedule.ranks for schedule in schedules), strict=True)
    orders = tuple(
        tuple(
            Action(action.stage, action.kind, action.microbatch + first)
            for first, order in zip(firsts, of_rank, strict=False)
            for action in order
        )
        for of_rank in ranks
    )
    return Schedule(firsts[-1], orders, schedules[0].method)
