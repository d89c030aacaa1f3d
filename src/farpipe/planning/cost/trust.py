"""How far a predicted step can be trusted: marks of what was never compared, and the range that such steps had.

The ranges come from published steps, as if the constants of each source's devices had been fitted to the other sources
alone (benchmarks/cost_model/error_ranges.py, which writes the catalogue's error_ranges.toml).
"""

import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Final

from farpipe.core.spec import Model, Site, Training, rate_name
from farpipe.core.units import counted
from farpipe.planning.cost.layout import Layout
from farpipe.planning.cost.stage import JobCosts

THIN: Final = 512
"""Width of a tensor-parallel device's slice up to which it counts as thin."""
MANY_REPLICAS: Final = 128
FAR_S: Final = 0.02
"""One-way latency from which a link counts as far."""
EXPERTS: Final = "mixtures of experts"
ADAPTERS: Final = "adapters (LoRA)"
SHARDED: Final = "PyTorch without Megatron"
MANY: Final = f"more than {MANY_REPLICAS} replicas"
NARROW: Final = "thin tensor-parallel slices"
INTERLEAVED: Final = "several stages per rank"
PLAIN: Final = "one stage per rank"
KINDS: Final = (EXPERTS, ADAPTERS, SHARDED, MANY, NARROW, INTERLEAVED, PLAIN)
"""Kinds of jobs with a range of their own, the first that a job belongs to counts; the wide ones come first."""
UNCOMPARED: Final = "devices never compared"
"""Kind of predictions by the reference's law alone, scaled to another device's peak."""
NEAR_LINKS: Final = "links between sites"
FAR_LINKS: Final = "far links between sites"
ORDERS: Final = "equal degrees"
DEGREES: Final = "other degrees"
"""Kinds of pairs of layouts of one training."""


@dataclass(frozen=True)
class ErrorRange:
    """Measured over predicted: the first and the ninth decile of steps of one kind."""

    kind: str
    low: float
    high: float
    mean_error: float
    """Mean relative error, without sign."""
    num_rows: int
    num_sources: int

    @property
    def such_jobs(self) -> str:
        """The kind and what it rests on, in words."""
        return f"{self.kind}; {counted(self.num_rows, 'step')} of {counted(self.num_sources, 'source')}"

    def with_(self, other: "ErrorRange") -> "ErrorRange":
        """The range that holds both, named after this one."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return replace(self, low=low, high=high, mean_error=max(self.mean_error, other.mean_error))

    def never_compared(self) -> "ErrorRange":
        """The range of such jobs where no prediction was compared: as wide as that of devices without constants."""
        other = range_of(UNCOMPARED)
        found = self.with_(other)
        return replace(
            found, kind=f"{self.kind}, never compared", num_rows=other.num_rows, num_sources=other.num_sources
        )


def kind_of(model: Model, training: Training, layout: Layout) -> str:
    """The kind of KINDS that a job belongs to; `training` is the one settled for the layout."""
    holds = {
        EXPERTS: model.experts is not None,
        ADAPTERS: training.lora is not None,
        SHARDED: training.by_pytorch,
        MANY: layout.data > MANY_REPLICAS,
        NARROW: layout.tensor > 1 and model.hidden <= THIN * layout.tensor,
        INTERLEAVED: layout.virtual > 1,
    }
    return next((kind for kind in KINDS if holds.get(kind)), PLAIN)


def range_of(kind: str) -> ErrorRange:
    """The range of a kind of jobs, or of what links between sites cost."""
    return ErrorRange(kind, **_tables()["ranges"][kind])


def tie_within(kind: str) -> float:
    """Relative difference of two layouts' steps that comes out in the predicted order in 8 of 10 pairs."""
    return float(_tables()["differences"][kind]["tie_within"])


def families() -> tuple[Mapping[str, Any], ...]:
    """Errors by family of published steps, those that no constant was fitted to when they came first."""
    return tuple(_tables()["families"])


@cache
def _tables() -> Mapping[str, Any]:
    file = resources.files("farpipe.core.catalog").joinpath("error_ranges.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Trust:
    """How far the step of a job can be trusted."""

    errors: ErrorRange | None
    """None where all times are measured ones."""
    unmeasured: tuple[str, ...]
    """Devices whose times were never compared with a measurement; ``gh200 (bf16)``: not for these products."""
    uncompared: tuple[str, ...]
    """Properties of the job that no measured step with which predictions were compared had on one of the devices."""


def trust_of(costs: JobCosts, sites: Collection[Site], layout: Layout) -> Trust:
    """The trust in a job's step in `layout` at `sites`; devices with a profile are measured themselves."""
    marked, kinds = unmeasured(costs, sites), uncompared(costs, sites, costs.training.sequence_length, layout.context)
    if all(site.device.name in costs.profiles for site in sites):
        return Trust(None, marked, kinds)
    found = range_of(kind_of(costs.model, costs.settled(layout), layout))
    return Trust(found.never_compared() if marked or kinds else found, marked, kinds)


def unmeasured(costs: JobCosts, sites: Collection[Site]) -> tuple[str, ...]:
    """Devices whose times were never compared with a measurement, or not at the rate of the job's products."""
    modelled = {s.device.name: costs.calibration(s) for s in sites if s.device.name not in costs.profiles}
    rate = rate_name(costs.training.precision, costs.training.matmul)
    names = [name for name, calibration in modelled.items() if not calibration.measured]
    partly = [f"{name} ({rate})" for name, at in modelled.items() if at.measured and rate not in at.compared]
    return tuple(sorted(names + partly))


def uncompared(costs: JobCosts, sites: Collection[Site], longest: int, context: int) -> tuple[str, ...]:
    """Properties of the job that no measured step on one of the devices had with which predictions were compared.

    `longest`: tokens of the longest sequence; `context`: devices that share it. Devices that have a profile are left
    out.
    """
    modelled = [costs.calibration(site) for site in sites if site.device.name not in costs.profiles]
    guess = (f"a guessed model ({costs.model.size_text})",) if costs.model.guess else ()
    if not modelled:
        return guess
    model, known = costs.model, min(at.longest for at in modelled)
    kinds = {
        "mixtures of experts": model.experts is not None,
        "latent attention": model.latent_attention is not None,
        "sliding windows": model.has_windows(longest),
        "context parallelism": context > 1,
    }
    found = [kind for kind, is_it in kinds.items() if is_it and not all(kind in at.kinds for at in modelled)]
    long = f"sequences of {longest:,} tokens (the longest compared: {known:,})"
    return (*guess, *found, *([long] * (longest > known)))


def likely_ratios(found: ErrorRange | None, links_share: float, longest_latency_s: float) -> tuple[float, float]:
    """Measured over predicted step in 8 of 10 such jobs, where `links_share` of it is for links between sites.

    The errors of both parts are taken for independent. Measured times have no error but that of the links.
    """
    links = links_range(longest_latency_s)
    low, high = (1.0, 1.0) if found is None else (found.low, found.high)
    near = 1 - links_share
    return (
        1 - math.hypot((1 - low) * near, (1 - links.low) * links_share),
        1 + math.hypot((high - 1) * near, (links.high - 1) * links_share),
    )


def links_range(longest_latency_s: float) -> ErrorRange:
    """The range of what links between sites cost, by the latency of the longest."""
    return range_of(FAR_LINKS if longest_latency_s > FAR_S else NEAR_LINKS)
