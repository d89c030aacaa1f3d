"""Measured steps and what is predicted of them, by source, and how well layouts of one training are ranked."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from benchmarks.cost_model.published_steps import SOURCES
from benchmarks.cost_model.strangers import READERS, async_tp, strangers
from farpipe.core.errors import FarpipeError
from farpipe.core.spec import rate_name
from farpipe.core.strict import validate
from farpipe.planning.cost import JobCosts
from farpipe.planning.cost.trust import kind_of, uncompared, unmeasured
from farpipe.planning.planner.reference_points import ReferenceJob, ReferencePoint, load_points
from farpipe.planning.planner.validation import predict

STRANGERS: Final = {name: partial(strangers, name) for name in READERS} | {"torchtitan-2025": async_tp}
"""Readers of the sources that no constant was fitted to, or only since the table of effects says so."""
LOGS: Final = "settings-and-logs"
REPEATED: Final = ("zero-bubble",)
"""Groups whose rows another group has too, with times of their own."""
SAME_JOB: Final = ("num_layers", "hidden", "vocab_size", "sequence_length", "global_batch", "device")
SAME_NUMBERS: Final = ("precision", "matmul", "lora", "mtp_num_layers")


@dataclass(frozen=True)
class Case:
    """One measured step of a source and its prediction; `refused` says why there is none."""

    source: str
    point: ReferencePoint
    predicted: ReferenceJob | None = None
    """The job that was predicted."""
    predicted_s: float = 0.0
    fits: bool = True
    refused: str = ""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_s / self.point.step_s - 1

    @property
    def ratio(self) -> float:
        """Logarithm of measured over predicted."""
        return math.log(self.point.step_s / self.predicted_s)

    @property
    def job(self) -> tuple[object, ...]:
        """Equal for rows that are layouts of one training."""
        point = self.point
        num_devices = point.tensor * point.data * point.pipeline * point.context
        words = point.model.split()[0]  # the rest tells layouts and devices apart
        shape = tuple(getattr(point, key) for key in SAME_JOB)
        return (words, num_devices, *shape, *(str(getattr(point, key)) for key in SAME_NUMBERS))

    @property
    def rate(self) -> tuple[str, str]:
        """Device and rate of products; 16-bit rates are one."""
        rate = rate_name(self.point.precision, self.point.matmul)
        return self.point.device, "16 bit" if rate in ("bf16", "fp16") else rate

    @cached_property
    def kind(self) -> str:
        """Kind of job."""
        assert self.predicted is not None
        model, layout = self.predicted.model, self.predicted.layout
        return kind_of(model, JobCosts(model, self.predicted.training).settled(layout), layout)

    @cached_property
    def is_marked(self) -> bool:
        """True if a plan would mark it as never compared."""
        assert self.predicted is not None
        job, sites = self.predicted, self.predicted.cluster.sites
        costs = JobCosts(job.model, job.training)
        return bool(
            unmeasured(costs, sites) or uncompared(costs, sites, job.training.sequence_length, job.layout.context)
        )

    def __str__(self) -> str:
        told = self.refused or f"{self.point.step_s:9.3f} {self.predicted_s:9.3f} {self.error:+7.1%}"
        return f"{self.source:20} {str(self.point)[:86]:86} {told}{'' if self.fits else ' full'}"


def case_of(source: str, point: ReferencePoint) -> Case:
    """The prediction of a point."""
    try:
        found = predict(point)
    except FarpipeError as error:
        return Case(source, point, refused=str(error).splitlines()[0])
    return Case(source, point, found.job, found.step_s, found.fits)


def cases(base: Path, word: str = "") -> list[Case]:
    """Every row of the published tables, then those of strangers, of sources whose name has `word`."""
    readers: dict[str, Callable[[Path], Iterable[dict[str, Any]]]] = {
        name: read for name, (*_, read) in SOURCES.items()
    }
    found = []
    for name, read in (readers | STRANGERS).items():
        if name not in REPEATED and word in name:
            found += [case_of(name, validate(ReferencePoint, row, name)) for row in read(base)]
    if word in LOGS:
        logs = next(group for group in load_points() if group.name == LOGS)
        found += [case_of(LOGS, point) for point in logs.points]
    return found


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of them lie, between two neighbours in proportion."""
    found = sorted(values)
    place = share * (len(found) - 1)
    low = int(place)
    return found[low] + (place - low) * (found[min(low + 1, len(found) - 1)] - found[low])


def rankings(found: Sequence[Case]) -> list[tuple[float, float]]:
    """Kendall's tau of each training that has several layouts, and by how much the layout predicted fastest was slower
    than the fastest (regret)."""
    jobs: dict[tuple[object, ...], list[Case]] = {}
    for case in found:
        jobs.setdefault((case.source, *case.job), []).append(case)
    ranked = []
    for same in jobs.values():
        agree = [
            1 if (a.predicted_s < b.predicted_s) == (a.point.step_s < b.point.step_s) else -1
            for a, b in combinations(same, 2)
            if a.predicted_s != b.predicted_s  # else they are runs of one layout
        ]
        if not agree:
            continue
        chosen, best = min(same, key=lambda case: case.predicted_s), min(case.point.step_s for case in same)
        ranked.append((fmean(agree), chosen.point.step_s / best - 1))
    return ranked


def ranking_table(groups: Mapping[str, Sequence[Case]]) -> Iterator[str]:
    """Errors of every group, and how well layouts of the same training are ranked, in Markdown."""
    yield from ("| source | rows | mean | median | 9 of 10 within | bias | full | trainings | tau | regret |",)
    yield "|---" * 10 + "|"
    for name, same in groups.items():
        known = [case for case in same if not case.refused]
        errors = [case.error for case in known]
        sizes = [abs(error) for error in errors]
        ranked = rankings(known)
        order = "0 | | |"
        if ranked:
            tau, regret = (fmean(one[i] for one in ranked) for i in (0, 1))
            order = f"{len(ranked)} | {tau:+.2f} | {regret:.1%} |"
        full = sum(not case.fits for case in known)
        spread = f"{fmean(sizes):.1%} | {median(sizes):.1%} | {quantile(sizes, 0.9):.1%} | {fmean(errors):+.1%}"
        yield f"| {name} | {len(same)} | {spread} | {full} | {order}"
