"""Validation: predicted against measured step times, within a tolerance per source.

A prediction here is what `farpipe plan` predicts: the cost model's Problem, its named order, the simulator's makespan,
and the overhead of a step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import FarpipeError, ToleranceError
from farpipe.core.schedule import peak_memory_bytes
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Problem
from farpipe.core.units import counted, format_change, format_percent
from farpipe.planning.cost import JobCosts, calibration_of, step_cost
from farpipe.planning.cost.stage import changes_stages
from farpipe.planning.cost.trust import ErrorRange, families, trust_of
from farpipe.planning.planner.reference_points import ReferenceGroup, ReferenceJob, ReferencePoint, load_points


@dataclass(frozen=True)
class PointPrediction:
    """Prediction for a point: of all that the source leaves open, the fastest that fits in memory."""

    job: ReferenceJob
    step_s: float
    memory_bytes: float
    """The fullest device's, or the logged one's, with what no model accounts for."""
    fits: bool
    errors: ErrorRange
    """Measured over predicted step in 8 of 10 such jobs."""


@dataclass(frozen=True)
class PointResult:
    """One point: what was measured of a step, and what is predicted."""

    point: ReferencePoint
    predicted: PointPrediction

    @property
    def predicted_s(self) -> float:
        """Seconds of a step."""
        return self.predicted.step_s

    @property
    def error(self) -> float:
        """(predicted - measured) / measured: positive where the prediction is too slow."""
        return self.predicted_s / self.point.step_s - 1

    @property
    def range_s(self) -> tuple[float, float]:
        """Seconds that a step took in 8 of 10 such jobs."""
        found = self.predicted.errors
        return self.predicted_s * found.low, self.predicted_s * found.high

    @property
    def is_inside(self) -> bool:
        """True if the measured step is in that range."""
        low, high = self.range_s
        return low <= self.point.step_s <= high

    @property
    def memory_error(self) -> float | None:
        """The same for memory; None where none was measured."""
        return self.predicted.memory_bytes / self.point.memory_bytes - 1 if self.point.memory_bytes else None


@dataclass(frozen=True)
class GroupResult:
    """All points of one source."""

    group: ReferenceGroup
    results: tuple[PointResult, ...]

    @property
    def mean_absolute_error(self) -> float:
        """Mean of the relative errors without sign."""
        return sum(abs(result.error) for result in self.results) / len(self.results)

    @property
    def bias(self) -> float:
        """Mean of the relative errors with sign."""
        return sum(result.error for result in self.results) / len(self.results)

    @property
    def inside(self) -> float:
        """Share of the points whose measured step is in the range of such jobs."""
        return sum(result.is_inside for result in self.results) / len(self.results)

    @property
    def memory_error(self) -> float | None:
        """Mean of the relative errors of memory without sign; None where no point has any."""
        errors = [abs(result.memory_error) for result in self.results if result.memory_error is not None]
        return sum(errors) / len(errors) if errors else None

    @property
    def passed(self) -> bool:
        """True if the means are within the group's tolerances."""
        return self.mean_absolute_error <= self.group.tolerance and self._passed_memory()

    def _passed_memory(self) -> bool:
        found, limit = self.memory_error, self.group.memory_tolerance
        if found is None or limit is None:
            return True
        return found <= limit


@dataclass(frozen=True, repr=False)
class ValidationReport:
    """Error of the model at every point."""

    groups: tuple[GroupResult, ...]

    @property
    def passed(self) -> bool:
        """True if every group is within its tolerance."""
        return all(group.passed for group in self.groups)

    def raise_if_failed(self) -> None:
        """ToleranceError that names every group outside its tolerance, with its worst point."""
        failed = [group for group in self.groups if not group.passed]
        if failed:
            raise ToleranceError("outside tolerance:\n" + "\n".join(map(_tell_failure, failed)))

    def table(self) -> str:
        """Every point and every group, for people."""
        return "\n".join(line for group in self.groups for line in _group_lines(group))

    __str__ = __repr__ = table

    def to_data(self) -> dict[str, Any]:
        """Every point and every group, for machines."""
        return {"passed": self.passed, "groups": [_group_data(group) for group in self.groups]}


COLUMNS: Final = {
    "median": "median_error",
    "9 of 10 within": "ninth_decile",
    "bias": "bias",
    "in range": "inside",
}
"""Columns of the table of errors that are shares, and their keys in the catalogue."""


def errors_table(found: Iterable[Mapping[str, Any]] | None = None) -> str:
    """Errors by family of published steps in Markdown, those of strangers first; by default the catalogue's."""
    names = ("family", "rows", *COLUMNS, "marked", "refused")
    lines = [names]
    for one in families() if found is None else found:
        shares = [format_change(one[key]) if key == "bias" else format_percent(one[key]) for key in COLUMNS.values()]
        shares[-1] = format_percent(one["inside"], 0)
        counts = (str(one["num_marked"]), str(one["num_refused"]))
        lines.append((one["name"], str(one["num_rows"]), *shares, *counts))
    first, *rest = (f"| {' | '.join(line)} |\n" for line in lines)
    return "".join((first, f"|{'---|' * len(names)}\n", *rest))


def validate(points: Path | str | None = None) -> ValidationReport:
    """Predict every point of the file `points`, by default those that farpipe carries.

    Raises InputError for a bad file; being outside tolerance is for `ValidationReport.raise_if_failed` to tell.
    """
    return validate_groups(load_points(points))


def validate_groups(groups: Iterable[ReferenceGroup]) -> ValidationReport:
    """Predict every point of `groups`."""
    return ValidationReport(
        tuple(
            GroupResult(group, tuple(PointResult(point, predict(point)) for point in group.points)) for group in groups
        )
    )


def predict(point: ReferencePoint) -> PointPrediction:
    """Step and memory of `point`; where nothing fits in memory, of what comes out fastest all the same."""
    found = [_predict(point, job) for job in point.jobs()]
    return min(found, key=lambda one: (not one.fits, one.step_s))


def _predict(point: ReferencePoint, job: ReferenceJob) -> PointPrediction:
    try:
        step = step_cost(JobCosts(job.model, job.training), job.layout, job.placements, job.cluster)
        problem = measured_problem(point, step.problem, job)
        schedule = order(point.schedule or ("interleaved" if job.layout.virtual > 1 else "1f1b"), problem)
    except FarpipeError as error:
        raise type(error)(f"{point}: {error}") from None
    peaks = peak_memory_bytes(problem, schedule)
    memory = max(peaks)
    limit = problem.ranks[0].memory_bytes
    fits = limit is None or memory <= limit
    step_s = simulate(problem, schedule).makespan_s + step.overhead_s
    logged = memory if point.memory_rank is None else peaks[point.memory_rank]
    found = trust_of(JobCosts(job.model, job.training), job.cluster.sites, job.layout).errors
    assert found is not None  # no point has a profile
    return PointPrediction(job, step_s, logged + point.context_bytes, fits, found)


def measured_problem(point: ReferencePoint, problem: Problem, job: ReferenceJob) -> Problem:
    """`problem` with the published times of a rank, shared evenly by its stages, and the fixed time of an action."""
    if point.rank_s is None:
        return problem
    virtual, law = job.layout.virtual, calibration_of(job.cluster.sites[0].device)
    overhead_s = law.action_overhead_s + law.stage_change_s * changes_stages(job.training, job.layout)
    forward_s, input_grad_s, weight_grad_s = (seconds / virtual for seconds in point.rank_s)
    times = {
        "forward_s": forward_s + overhead_s,
        "input_grad_s": input_grad_s + overhead_s,
        "weight_grad_s": weight_grad_s,
    }
    return problem.model_copy(update={"stages": tuple(stage.model_copy(update=times) for stage in problem.stages)})


def _tell_failure(group: GroupResult) -> str:
    worst = max(group.results, key=lambda result: abs(result.error))
    memory = ", memory {} of {}".format(*_memory_figures(group)) if _has_memory(group) else ""
    return (
        f"  {group.group.name}: mean error {format_percent(group.mean_absolute_error)} over "
        f"{counted(len(group.results), 'point')}, tolerance {format_percent(group.group.tolerance)}{memory}; worst: "
        f"{worst.point}, measured {worst.point.step_s:.4g} s, predicted {worst.predicted_s:.4g} s "
        f"({format_change(worst.error)})"
    )


def _has_memory(group: GroupResult) -> bool:
    return group.memory_error is not None and group.group.memory_tolerance is not None


def _memory_figures(group: GroupResult) -> tuple[str, str]:
    """Its mean error of memory and the tolerance of that."""
    return format_percent(group.memory_error or 0.0), format_percent(group.group.memory_tolerance or 0.0)


def _group_lines(group: GroupResult) -> list[str]:
    head = ["measured", "predicted", "error"] + ["GiB", "predicted", "error"] * _has_memory(group)
    width = max(len(str(result.point)) for result in group.results)
    return [
        f"{group.group.name}: {group.group.source}",
        _row("", width, head),
        *(_row(str(result.point), width, _figures(result)) for result in group.results),
        f"  {'passed' if group.passed else 'FAILED'}: {_summary(group)}",
        "",
    ]


def _summary(group: GroupResult) -> str:
    parts = [
        f"mean error {format_percent(group.mean_absolute_error)} (bias {format_change(group.bias)})",
        f"tolerance {format_percent(group.group.tolerance)}",
        counted(len(group.results), "point"),
        f"{format_percent(group.inside, 0)} in their range",
    ]
    if _has_memory(group):
        parts.append("memory {}, tolerance {}".format(*_memory_figures(group)))
    if group.group.left_out is not None:
        parts.append(f"with constants fitted to other sources alone {format_percent(group.group.left_out)}")
    return ", ".join(parts)


def _figures(result: PointResult) -> list[str]:
    figures = [f"{result.point.step_s:.3f} s", f"{result.predicted_s:.3f} s", format_change(result.error)]
    if result.point.memory_bytes and result.memory_error is not None:
        sizes = (result.point.memory_bytes, result.predicted.memory_bytes)
        figures += [*(f"{size / 2**30:.2f}" for size in sizes), format_change(result.memory_error)]
    return figures


def _row(name: str, width: int, cells: Sequence[str]) -> str:
    return f"  {name:<{width}}" + "".join(f"{cell:>12}" for cell in cells)


def _group_data(group: GroupResult) -> dict[str, Any]:
    return {
        "name": group.group.name,
        "source": group.group.source,
        "tolerance": group.group.tolerance,
        "memory_tolerance": group.group.memory_tolerance,
        "mean_absolute_error": group.mean_absolute_error,
        "bias": group.bias,
        "inside": group.inside,
        "memory_error": group.memory_error,
        "left_out_error": group.group.left_out,
        "passed": group.passed,
        "points": [_point_data(result) for result in group.results],
    }


def _point_data(result: PointResult) -> dict[str, Any]:
    return {
        "point": str(result.point),
        "measured_s": result.point.step_s,
        "predicted_s": result.predicted_s,
        "error": result.error,
        "range_s": list(result.range_s),
        "measured_memory_bytes": result.point.memory_bytes,
        "predicted_memory_bytes": result.predicted.memory_bytes,
        "memory_error": result.memory_error,
    }
