"""Grid of a job: its inputs varied along axes, at every point the strategies and the winner. Pure: starts nothing.

An axis is a dotted key of job.toml, as `farpipe.core.spec.load.put` reads it, and the values that it takes.
"""

import copy
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final

from pydantic import TypeAdapter

from farpipe import __version__
from farpipe.core.errors import InfeasibleError, InputError, UsageError
from farpipe.core.spec import Job, job_of
from farpipe.core.spec.load import put, value_of
from farpipe.planning.explain.strategies import LOCAL_STEPS, strategies_of, strategies_of_batch
from farpipe.planning.planner.candidates import largest_sites
from farpipe.planning.planner.plan import Strategy
from farpipe.planning.planner.search import search_job

FORMAT: Final = "farpipe/sweep/1"
MAX_POINTS: Final = 100_000

Values = tuple[Any, ...]


@dataclass(frozen=True)
class Axis:
    """A dotted key of job.toml and its values."""

    key: str
    values: Values


@dataclass(frozen=True)
class JobPoint:
    """One point of a grid: the job's table with the values in their places."""

    values: Values
    table: Mapping[str, Any]
    lengths: tuple[int, ...] = ()
    """Documents of a batch, which is planned in place of a step of sequences of one length."""

    @property
    def name(self) -> str:
        """The same for the same question to the same version of farpipe; what results are kept under."""
        asked: dict[str, Any] = {"job": self.table, "local_steps": LOCAL_STEPS.model_dump()}
        asked |= {"version": __version__, "format": FORMAT}
        asked |= {"lengths": self.lengths} if self.lengths else {}
        return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Result:
    """Result at a point: its strategies, the fastest first, or why there is none."""

    values: Values
    strategies: tuple[Strategy, ...] = ()
    obstacle: str = ""

    @property
    def winner(self) -> Strategy | None:
        """The fastest strategy that trains as the job says; None where there is none."""
        return next((one for one in self.strategies if one.same_training), None)

    @property
    def gain(self) -> float | None:
        """Speed of the winner over that of the best site alone; None without a winner or such a site."""
        best, alone = self.winner, next((one for one in self.strategies if one.kind == "one site"), None)
        return alone.step_s / best.step_s if best is not None and alone is not None else None

    def to_data(self) -> dict[str, Any]:
        """The point as JSON has it."""
        winner = self.winner
        return {
            "values": list(self.values),
            "winner": None if winner is None else f"{winner.kind}: {winner.where}",
            "strategies": [one.model_dump(mode="json") for one in self.strategies],
            "obstacle": self.obstacle,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any], values: Values) -> "Result":
        """The inverse of `to_data`, at a point of these `values`."""
        return cls(values, TypeAdapter(tuple[Strategy, ...]).validate_python(data["strategies"]), str(data["obstacle"]))


def parse_axis(text: str) -> Axis:
    """``cluster.links.latency=0 ms,10 ms`` as an axis; UsageError for what is none.

    Values are separated by commas, or a TOML list; what is no number and no flag is text.
    """
    key, equals, right = text.partition("=")
    values = _values(right.strip())
    if not key.strip() or not equals or not values:
        raise UsageError(f"--over {text!r}: expected KEY=VALUE,VALUE, such as 'cluster.links.latency=1 ms,30 ms'")
    if len({json.dumps(value, default=str) for value in values}) < len(values):
        raise UsageError(f"--over {text!r}: a value is given twice")
    return Axis(key.strip(), values)


def _values(text: str) -> Values:
    if text.startswith("["):
        try:
            return tuple(tomllib.loads(f"values = {text}")["values"])
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"--over: {text!r} is not a TOML list: {error}") from None
    return tuple(map(value_of, filter(None, (word.strip() for word in text.split(",")))))


def job_points(table: Mapping[str, Any], axes: Sequence[Axis], lengths: Sequence[int] = ()) -> list[JobPoint]:
    """Every combination of the axes' values, the last axis changing fastest; `lengths` of a batch are all points'.

    UsageError for an axis that is given twice or for too many points, InputError where a key leads nowhere.
    """
    keys = [axis.key for axis in axes]
    if len(set(keys)) < len(keys):
        raise UsageError(f"--over: an axis is given twice: {', '.join(keys)}")
    if (number := prod(len(axis.values) for axis in axes)) > MAX_POINTS:
        raise UsageError(f"--over: {number:,} points are more than {MAX_POINTS:,}; give fewer values")
    return [_point(table, keys, values, tuple(lengths)) for values in product(*(axis.values for axis in axes))]


def _point(table: Mapping[str, Any], keys: Sequence[str], values: Values, lengths: tuple[int, ...]) -> JobPoint:
    changed = copy.deepcopy(dict(table))
    for key, value in zip(keys, values, strict=True):
        put(changed, key, value, f"--over {key}")
    return JobPoint(values, changed, lengths)


def play_job(point: JobPoint) -> Result:
    """The strategies of a point; InputError, with the values, where its job is impossible."""
    try:
        job = job_of(dict(point.table), ", ".join(map(str, point.values)) or "job")
        if job.data.packing is not None and not point.lengths:
            raise InputError("data.packing: strategies of documents are compared for one batch: give it with --lengths")
        found = strategies_of_batch(job, point.lengths) if point.lengths else strategies_of_job(job)
        return Result(point.values, tuple(found))
    except InfeasibleError as error:
        return Result(point.values, (), str(error).splitlines()[0])


def row_of(point: JobPoint) -> dict[str, Any]:
    """The result of a point with the point's name, as it is kept."""
    return {"point": point.name} | play_job(point).to_data()


def name_of(row: Mapping[str, Any]) -> str | None:
    """Name of the point of a row that was kept; None for anything else."""
    return str(row["point"]) if {"point", "strategies", "obstacle"} <= set(row) else None


def strategies_of_job(job: Job) -> list[Strategy]:
    """The strategies of a job as the search for its plan finds them; InfeasibleError where no layout fits."""
    found = search_job(largest_sites(job), {})
    if not found.evaluated:
        raise InfeasibleError("no layout of this job fits")
    return strategies_of(found.job, found.costs, found.evaluated)[0]
