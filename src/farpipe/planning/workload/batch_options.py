"""Options of planning a batch of sequences."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from farpipe.core.document import Table
from farpipe.planning.workload.checkpointing import CheckpointRule
from farpipe.planning.workload.cut import Measure, PackRule


@dataclass(frozen=True)
class BatchOptions:
    """Pins of a batch's plan by the user; the rest is searched."""

    num_slices: int | None = None
    """Slices of the longest sequence."""
    rule: PackRule = "best-fit"
    equal: Measure = "time"
    """Measure that a sequence's slices have in common and chunks are filled to. ``tokens``, Seq1F1B's, is tried beside
    ``time`` where slices are recomputed."""
    checkpointing: CheckpointRule = "chunk"
    may_keep_attention: bool = True
    """Recomputed layers may keep their attention's output and sums, by the rules that choose layers."""
    several_pipelines: bool = True
    shrinks: bool = True
    """Fewer chunks in flight where the longest sequences are over; Seq1F1B and InfiniPipe have as many to the end."""
    dynamic_context: bool = True
    """Documents in one stage packed up to the tokens that recompute nothing, on groups of devices whose context degrees
    follow the documents' lengths."""
    hide_links: bool = True
    """Extra warm-up upstream of hops that take time."""
    budget: int = 30_000
    """Chunks of the candidates (cuts, groups) whose recomputation is priced; a candidate has tens to hundreds."""
    limit_s: float = math.inf
    """Seconds of planning, half of them for pricing. No further cut is planned to the end when they are over; the first
    always is. A plan that it cuts short depends on the clock."""

    @property
    def tries_keeping_attention(self) -> bool:
        """True if recomputed layers that keep their attention's results are planned, too."""
        return self.may_keep_attention and self.checkpointing in ("chunk", "uniform")

    @property
    def packs_to_memory(self) -> bool:
        """True if whole documents may be packed up to the tokens that recompute nothing."""
        is_free = self.rule == "best-fit" and self.equal == "time" and self.num_slices in (None, 1)
        return self.dynamic_context and is_free


class BatchSettings(Table, use_attribute_docstrings=True):
    """Settings of one batch that are rarely changed, by the names that `--set` takes."""

    slices: Annotated[int, Field(ge=1)] | None = None
    """Slices of the longest sequence; None: searched."""
    checkpointing: CheckpointRule = "chunk"
    """Layers to recompute: chosen for each stage and chunk, the same for all, all, none."""
    devices_per_stage: Annotated[int, Field(ge=1)] | None = None
    """Devices of each stage of one pipeline (Ulysses); None: searched."""

    @property
    def options(self) -> BatchOptions:
        """The same for the planner."""
        return BatchOptions(num_slices=self.slices, checkpointing=self.checkpointing)
