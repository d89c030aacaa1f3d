"""The gate: predicted against measured step times, within a tolerance per source.

A prediction here is what `farpipe plan` predicts: the cost model's Problem, its named order, the simulator's makespan,
and the overhead of a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farpipe.cost import JobCosts, step_cost
from farpipe.errors import FarpipeError, GateError
from farpipe.plan.reference_points import ReferenceGroup, ReferencePoint, load_points
from farpipe.schedule.library import order
from farpipe.simulate import simulate


@dataclass(frozen=True)
class PointResult:
    """One point: measured and predicted seconds of a step."""

    point: ReferencePoint
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative, positive where the prediction is too slow."""
        return self.predicted_s / self.point.step_s - 1


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
    def passed(self) -> bool:
        """Whether the mean is within the group's tolerance."""
        return self.mean_absolute_error <= self.group.tolerance


@dataclass(frozen=True, repr=False)
class ValidationReport:
    """How far the model is from every point."""

    groups: tuple[GroupResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every group is within its tolerance."""
        return all(group.passed for group in self.groups)

    def raise_if_failed(self) -> None:
        """GateError that names every group outside its tolerance, with its worst point."""
        failed = [group for group in self.groups if not group.passed]
        if failed:
            raise GateError("outside tolerance:\n" + "\n".join(map(_tell_failure, failed)))

    def table(self) -> str:
        """Every point and every group, for people."""
        return "\n".join(line for group in self.groups for line in _group_lines(group))

    __str__ = __repr__ = table

    def to_data(self) -> dict[str, Any]:
        """Every point and every group, for machines."""
        return {"passed": self.passed, "groups": [_group_data(group) for group in self.groups]}


def validate(points: Path | str | None = None) -> ValidationReport:
    """Predict every point of the file `points`, by default those that farpipe carries.

    Raises InputError for a bad file; being outside tolerance is for `ValidationReport.raise_if_failed` to tell.
    """
    return validate_groups(load_points(points))


def validate_groups(groups: Iterable[ReferenceGroup]) -> ValidationReport:
    """Predict every point of `groups`."""
    return ValidationReport(
        tuple(
            GroupResult(group, tuple(PointResult(point, predict_step_s(point)) for point in group.points))
            for group in groups
        )
    )


def predict_step_s(point: ReferencePoint) -> float:
    """Seconds of one step as planned: interleaved 1F1B where the point has virtual stages, else 1F1B."""
    job = point.job()
    try:
        step = step_cost(JobCosts(job.model, job.training), job.layout, job.placements, job.cluster)
        schedule = order("interleaved" if job.layout.virtual > 1 else "1f1b", step.problem)
    except FarpipeError as error:
        raise type(error)(f"{point}: {error}") from None
    return simulate(step.problem, schedule).makespan_s + step.overhead_s


def _tell_failure(group: GroupResult) -> str:
    worst = max(group.results, key=lambda result: abs(result.error))
    return (
        f"  {group.group.name}: mean error {group.mean_absolute_error:.1%} over {len(group.results)} points, "
        f"tolerance {group.group.tolerance:.1%}; worst: {worst.point}, measured {worst.point.step_s:.4g} s, "
        f"predicted {worst.predicted_s:.4g} s ({worst.error:+.1%})"
    )


def _group_lines(group: GroupResult) -> list[str]:
    head = ("measured", "predicted", "error")
    width = max(len(str(result.point)) for result in group.results)
    return [
        f"{group.group.name}: {group.group.source}",
        _row("", width, head),
        *(_row(str(result.point), width, _figures(result)) for result in group.results),
        f"  {'passed' if group.passed else 'FAILED'}: mean error {group.mean_absolute_error:.1%} "
        f"(bias {group.bias:+.1%}), tolerance {group.group.tolerance:.1%}, {len(group.results)} points",
        "",
    ]


def _figures(result: PointResult) -> tuple[str, str, str]:
    return f"{result.point.step_s:.3f} s", f"{result.predicted_s:.3f} s", f"{result.error:+.1%}"


def _row(name: str, width: int, cells: Sequence[str]) -> str:
    return f"  {name:<{width}}" + "".join(f"{cell:>12}" for cell in cells)


def _group_data(group: GroupResult) -> dict[str, Any]:
    return {
        "name": group.group.name,
        "source": group.group.source,
        "tolerance": group.group.tolerance,
        "mean_absolute_error": group.mean_absolute_error,
        "bias": group.bias,
        "passed": group.passed,
        "points": [
            {
                "point": str(result.point),
                "measured_s": result.point.step_s,
                "predicted_s": result.predicted_s,
                "error": result.error,
            }
            for result in group.results
        ],
    }
