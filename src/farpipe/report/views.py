"""Content of a report, as plain data: whoever planned, simulated or ran something fills it in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farpipe.core.simulate.timeline import Timeline
from farpipe.core.step import Problem
from farpipe.planning.workload.chunk import Chunk
from farpipe.report.tables import TableView


@dataclass(frozen=True)
class RunView:
    """One schedule, predicted and, if it ran, measured.

    `metrics` are the lines of metrics.jsonl; of each line ``step``, ``loss``, ``step_s``, ``tokens_per_s``,
    ``bubble``, ``exposed_inter_site_s`` and ``exposed_intra_site_s`` (means over the ranks) are read where present.
    `step_overhead_s` is what a step takes besides the pipeline, such as the optimizer; `sites` names every rank's
    site. `device_flops` are the model's FLOPs in one step per device, and `device_peak` is what a device could do in a
    second, mean over the devices; `num_devices` are those that compute. 0: nothing is computed or known.
    """

    name: str
    problem: Problem
    predicted: Timeline
    measured: Timeline | None = None
    metrics: Sequence[Mapping[str, Any]] = ()
    step_overhead_s: float = 0.0
    sites: tuple[str, ...] = ()
    device_flops: float = 0.0
    causal_share: float = 1.0
    """Share of `device_flops` that is left where attention counts only what its causal mask keeps."""
    device_peak: float = 0.0
    chunks: Sequence[Chunk] = ()
    """Chunks of the step that is drawn, in a training on chunks."""
    drawn_step: int | None = None
    """Number of that step; None: it is the plan's, of the first batch."""
    recomputed: NDArray[np.int64] | None = None
    """Layers that every stage recomputes of every chunk: [num_stages, num_chunks]; None: not known."""
    keeps_attention: bool = False
    """True if these layers keep their attention's output and sums."""
    predicted_held_bytes: Sequence[float] = ()
    """Peak bytes that every rank holds for backwards in that step, in a training on chunks."""
    measured_held_bytes: Sequence[float] = ()
    num_devices: int = 0
    trust: str = ""
    """Sentences on how far the prediction can be trusted."""
    measured_s: float | None = None
    """Seconds of a measured step where they are not the median of those in `metrics`."""


@dataclass(frozen=True)
class Picture:
    """A picture that others drew, as SVG text; `note` says what is to be seen."""

    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class RunReport:
    """Everything on the page: what it is about, the plan as tables and text, and the runs, the chosen first."""

    title: str
    runs: tuple[RunView, ...]
    summary: str = ""
    plan_tables: tuple[TableView, ...] = ()
    plan_text: str = ""
    """One paragraph per line."""
    notices: tuple[str, ...] = ()
    """Notices that a reader has to know before all else, such as that a run did not end well."""
    pictures: tuple[Picture, ...] = ()
    verdict: tuple[str, ...] = ()
    """Lines that answer what the page is about, before all figures."""
    folded: tuple[TableView, ...] = ()
    """Tables that are opened by who wants them, such as a derivation."""
    what_if: Mapping[str, Any] | None = None
    """Dials and answers, as `farpipe.report.what_if` writes them."""
    step_s: float | None = None
    """Predicted seconds of the step of which the runs are parts; None: each is a step of its own."""
