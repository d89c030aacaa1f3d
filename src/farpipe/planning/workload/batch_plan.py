"""Plan of a batch of documents: a layout, the chunks of every replica or group of devices, and why."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from farpipe.core.errors import InfeasibleError
from farpipe.core.spec.training import Zero
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.workload.batch_options import BatchOptions
from farpipe.planning.workload.chunk import Ints
from farpipe.planning.workload.layout import ChunkLayout
from farpipe.planning.workload.sequence_plan import SequencePlan, plan_sequences

_WHY_GROUPS: Final = (
    "Groups of devices by a document's length: short documents exchange little on few devices, long ones fit and end "
    "in time on many"
)


class PlacedPlan(NamedTuple):
    """Plan of the documents that neighbouring devices share (Ulysses), and its place in devices and time."""

    first_device: int
    begin_s: float
    """Moment at which all of its devices are done with larger groups' documents."""
    costs: ChunkCosts
    plan: SequencePlan

    @property
    def degree(self) -> int:
        """Number of the devices."""
        return self.costs.context

    @property
    def end_s(self) -> float:
        """Moment at which its step ends."""
        return self.begin_s + self.plan.step_s


@dataclass(frozen=True)
class BatchPlan:
    """One batch: a layout, the plan of every replica, and what other kinds of layouts would take."""

    zero: Zero
    layout: ChunkLayout
    replicas: tuple[SequencePlan, ...]
    """The hardest first: the longest sequence, then most work. Sequences have the numbers of the whole batch."""
    planning_s: float = 0.0
    others: "tuple[BatchPlan, ...]" = ()
    """The best plan of every other kind, the fastest first."""
    whole_step_s: float | None = None
    """Step of the hardest replica in this layout with every sequence whole, infinite where that does not fit; None: not
    asked."""
    places: tuple[PlacedPlan, ...] = ()
    """Place of every replica where each is a group of devices with a context degree of its own; `layout` is then the
    one of the highest degree that divides all devices."""
    parts: Sequence[Ints] = ()
    """Documents of every replica, the hardest first, of a layout whose replicas are planned one by one."""
    bound_s: float = 0.0
    """Lower bound of the step."""

    @property
    def step_s(self) -> float:
        """Seconds of a step: those of the replica that ends last."""
        ends_s = [place.end_s for place in self.places] or [plan.step_s for plan in self.replicas]
        return max(ends_s, default=0.0)

    @property
    def is_open(self) -> bool:
        """True if there are replicas without a plan."""
        return len(self.replicas) < len(self.parts)

    @property
    def costs(self) -> list[ChunkCosts]:
        """What chunks cost in every replica."""
        return [place.costs for place in self.places] or [self.layout.costs] * len(self.replicas)

    @property
    def contexts(self) -> dict[int, int]:
        """Number of groups of every context degree, ascending; none where all replicas have one layout."""
        return dict(sorted(Counter(place.degree for place in self.places).items()))

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return sum(plan.num_tokens for plan in self.replicas)

    @property
    def num_slices(self) -> int:
        """Slices of the longest sequence."""
        return max(self.replicas, key=lambda plan: int(plan.batch.sequence_length.max())).num_slices

    @property
    def use(self) -> str:
        """Use of the sites, as `ChunkLayout.use`."""
        return self.layout.use

    @property
    def kind(self) -> str:
        """The same with ``, no pipeline`` for one stage, or ``, groups of devices``."""
        return f"{self.use}, groups of devices" if self.places else self.layout.kind

    @cached_property
    def exchange_s(self) -> float:
        """Exposed seconds of the replicas' exchange before and after the first stage's actions."""
        return exchange_s(self.layout)

    @property
    def degrees(self) -> str:
        """``2 x 4 x 8 (tensor 2), ZeRO-3``: replicas, stages, devices of a stage; ``groups of 1, 2, 8`` devices."""
        at, costs = self.layout.layout, self.layout.costs
        if self.places:
            each = ", ".join(str(context * at.tensor) for context in self.contexts)
            return f"groups of {each}" + (f", ZeRO-{self.zero}" if self.zero else "")
        each = f"{costs.num_stages} x {self.layout.devices_per_stage}"
        tensor = f" (tensor {at.tensor})" if at.tensor > 1 else ""
        return (f"{at.data} x " if at.data > 1 else "") + each + tensor + (f", ZeRO-{self.zero}" if self.zero else "")

    @property
    def why(self) -> str:
        """One sentence: why the documents are cut, or why not, and why the sites are used so."""
        reason = _WHY_GROUPS if self.places else why_cut(self.replicas[0], self.whole_step_s)
        rivals = {other.use: other for other in reversed(self.others) if other.use != self.use}
        rivals = rivals or {other.kind: other for other in self.others[:1]}
        return f"{reason}{''.join(map(self._beside, rivals.values()))}."

    def _beside(self, other: "BatchPlan") -> str:
        exchange = f", {other.exchange_s:.3g} s of it to sum gradients" if other.exchange_s > other.step_s / 100 else ""
        return f"; {other.kind} ({other.degrees}) takes {other.step_s / self.step_s:.2f} times as long{exchange}"

    def to_data(self) -> dict[str, Any]:
        """Document that ``farpipe sequences plan --json`` prints: that of a replica, or those of all, joined.

        Chunks are counted over all replicas; `replicas` has the numbers of each one's pipelines.
        """
        plans = [plan.to_data() for plan in self.replicas]
        first = np.cumsum([0, *(len(plan["chunks"]) for plan in plans)]).tolist()
        joined = {
            name: [one for plan in plans for one in plan[name]]
            for name in ("chunks", "problems", "schedules", "recomputed_layers", "keeps_attention", "makespan_s")
        }
        pipelines = [
            [[i + begin for i in one] for one in p["pipelines"]] for begin, p in zip(first, plans, strict=False)
        ]
        counts = np.cumsum([0, *map(len, pipelines)]).tolist()
        peaks = zip(*(plan.peak_memory_bytes for plan in self.replicas), strict=True)
        return joined | {
            "pipelines": [one for mine in pipelines for one in mine],
            "replicas": [list(range(a, b)) for a, b in pairwise(counts)],
            "overhead_s": plans[0]["overhead_s"],
            "step_s": self.step_s,
            "tokens_per_s": self.num_tokens / self.step_s,
            "num_slices": self.num_slices,
            "peak_memory_bytes": [max(peak) for peak in peaks],
            "planning_s": self.planning_s,
            **self.to_figures(),
            "groups": [
                {"first_device": place.first_device, "context": place.degree, "begin_s": place.begin_s}
                for place in self.places
            ],
            "why": self.why,
            "others": [other.to_figures() | {"step_s": other.step_s} for other in self.others],
        }

    def to_figures(self) -> dict[str, Any]:
        """The layout's figures: `kind`, `zero`, `tensor`, `num_replicas`, those of `ChunkLayout.to_figures`."""
        at = self.layout.layout
        figures = {"kind": self.kind, "zero": self.zero, "tensor": at.tensor, "num_replicas": at.data}
        return figures | self.layout.to_figures()


def exchange_s(found: ChunkLayout) -> float:
    """Exposed seconds of the first stage's gather and reduce, which no action of a step runs beside."""
    traffic = found.costs.base.traffic
    reduces = traffic.collectives.arrives_after_s[slice(*traffic.collectives.begin[:2].tolist())]
    return float(traffic.opening.stage_s[0] + reduces.max(initial=0.0))


def plan_whole(costs: ChunkCosts, plan: SequencePlan, options: BatchOptions) -> float | None:
    """Step of the same sequences uncut, infinite where they do not fit so; None where `plan` cuts none of them."""
    if plan.num_slices == 1:
        return None
    sizes = np.zeros(int(plan.batch.sequence.max()) + 1, np.int64)
    sizes[plan.batch.sequence] = plan.batch.sequence_length
    try:
        return plan_sequences(costs, sizes[sizes > 0], replace(options, num_slices=1)).step_s
    except InfeasibleError:
        return math.inf


def why_cut(plan: SequencePlan, whole_step_s: float | None) -> str:
    """Reason for which documents are cut, or not: a clause without its full stop; `whole_step_s` of `plan_whole`."""
    if (number := plan.num_slices) == 1:
        return "No chunks: every sequence stays whole, and no number of slices was faster"
    if whole_step_s is None:
        return f"Chunks: the longest sequence in {number} slices"
    reason = f"Chunks, the longest sequence in {number} slices: with every sequence whole "
    if not math.isfinite(whole_step_s):
        return reason + "it does not fit"
    ratio = f"{whole_step_s / plan.step_s:.2f}"
    return reason + ("this layout is as fast" if ratio == "1.00" else f"this layout takes {ratio} times as long")
