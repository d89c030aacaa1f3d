"""Sweeps: one job over a grid of its inputs, at every point the arms and which of them wins. Pure: starts nothing.

An axis is a dotted key of job.toml and the values that it takes. What the key meets as a list (sites, links) is gone
through: a site's name, a link's ``a>b`` or a number chooses one entry, without it all of them are changed.
"""

import copy
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final

from pydantic import TypeAdapter

from farpipe import __version__
from farpipe.cost import JobCosts, profiles_of
from farpipe.errors import InfeasibleError, InputError, UsageError
from farpipe.plan.arms import LOCAL_STEPS, arms_of
from farpipe.plan.decided import ZERO_STAGES, decided, largest_sites
from farpipe.plan.explore import search
from farpipe.plan.plan import Arm
from farpipe.spec import Job, job_of
from farpipe.strict import key_path

FORMAT: Final = "farpipe/sweep/1"
MAX_POINTS: Final = 100_000

Values = tuple[Any, ...]


@dataclass(frozen=True)
class Axis:
    """A dotted key of job.toml and its values."""

    key: str
    values: Values


@dataclass(frozen=True)
class Point:
    """One point of a grid: the job's table with the values in their places."""

    values: Values
    table: Mapping[str, Any]
    local_steps: int

    @property
    def name(self) -> str:
        """The same for the same question to the same version of farpipe; what results are kept under."""
        asked = {"job": self.table, "local_steps": self.local_steps, "version": __version__, "format": FORMAT}
        return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Result:
    """Result at a point: its arms, the fastest first, or why there is none."""

    values: Values
    arms: tuple[Arm, ...] = ()
    obstacle: str = ""

    def winner(self, any_training: bool = False) -> Arm | None:
        """The fastest arm that trains as the job says, or of all; None where there is none."""
        return next((arm for arm in self.arms if any_training or arm.same_training), None)

    def gain(self, any_training: bool = False) -> float | None:
        """Speed of the winner over that of the best site alone; None without a winner or such a site."""
        best, alone = self.winner(any_training), next((arm for arm in self.arms if arm.kind == "one site"), None)
        return alone.step_s / best.step_s if best is not None and alone is not None else None

    def to_data(self) -> dict[str, Any]:
        """For machines."""
        winner = self.winner()
        return {
            "values": list(self.values),
            "winner": None if winner is None else f"{winner.kind}: {winner.where}",
            "arms": [arm.model_dump(mode="json") for arm in self.arms],
            "obstacle": self.obstacle,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any], values: Values) -> "Result":
        """The inverse of `to_data`, at a point of these `values`."""
        return cls(values, TypeAdapter(tuple[Arm, ...]).validate_python(data["arms"]), str(data["obstacle"]))


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
            raise UsageError(f"--over: {text!r} is no list of TOML: {error}") from None
    return tuple(map(_value, filter(None, (word.strip() for word in text.split(",")))))


def _value(word: str) -> Any:
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word


def grid(table: Mapping[str, Any], axes: Sequence[Axis], local_steps: int = LOCAL_STEPS) -> list[Point]:
    """Every combination of the axes' values, the last axis changing fastest.

    UsageError for an axis that is given twice or for too many points, InputError where a key leads nowhere.
    """
    keys = [axis.key for axis in axes]
    if len(set(keys)) < len(keys):
        raise UsageError(f"--over: an axis is given twice: {', '.join(keys)}")
    if (number := prod(len(axis.values) for axis in axes)) > MAX_POINTS:
        raise UsageError(f"--over: {number:,} points are more than {MAX_POINTS:,}; give fewer values")
    return [_point(table, keys, values, local_steps) for values in product(*(axis.values for axis in axes))]


def _point(table: Mapping[str, Any], keys: Sequence[str], values: Values, local_steps: int) -> Point:
    changed = copy.deepcopy(dict(table))
    for key, value in zip(keys, values, strict=True):
        _put(changed, key, value, ())
    return Point(values, changed, local_steps)


def _put(here: Any, key: str, value: Any, place: tuple[str | int, ...]) -> None:
    """Put `value` at the dotted `key` below `here`, which stands at `place`."""
    if isinstance(here, list):
        for index, rest in _entries(here, key, place):
            _put(here[index], rest, value, (*place, index))
        return
    if not isinstance(here, dict):
        raise InputError(f"--over: {key_path(place)} is no table, so it has no {key!r}")
    first, dot, rest = key.partition(".")
    if not dot:
        here[first] = copy.deepcopy(value)
        return
    if isinstance(here.get(first), str):  # a preset alone, to which something is added
        here[first] = {"preset": here[first]}
    _put(here.setdefault(first, {}), rest, value, (*place, first))


def _entries(entries: list[Any], key: str, place: tuple[str | int, ...]) -> Iterator[tuple[int, str]]:
    """Those that `key` chooses, each with what is left of it."""
    if not entries:
        raise InputError(f"--over: the job has no {key_path(place)}")
    for index, entry in enumerate(entries):
        for name in (str(index), *_names(entry)):
            if key.startswith(f"{name}."):
                yield index, key.removeprefix(f"{name}.")
                return
    yield from ((index, key) for index in range(len(entries)))


def _names(entry: Any) -> list[str]:
    """Names of an entry: a site's name, a link's ends."""
    if not isinstance(entry, dict):
        return []
    between = entry.get("between")
    ends = [between, between[::-1]] if isinstance(between, list) and len(between) == 2 else []
    ends += [[entry["from"], entry["to"]]] if {"from", "to"} <= set(entry) else []
    return [str(entry["name"])] if "name" in entry else [f"{a}>{b}" for a, b in ends]


def play(point: Point) -> Result:
    """The arms of a point; InputError, with the values, where its job is impossible."""
    try:
        job = job_of(dict(point.table), ", ".join(map(str, point.values)) or "job")
        return Result(point.values, tuple(arms_of_job(job, point.local_steps)))
    except InfeasibleError as error:
        return Result(point.values, (), str(error).splitlines()[0])


def arms_of_job(job: Job, local_steps: int = LOCAL_STEPS) -> list[Arm]:
    """The arms of a job as the search of `make_plan` finds them; InfeasibleError where no layout fits."""
    asked, profiles = largest_sites(job), {profile.device: profile for profile in profiles_of(job)}
    for zero in ZERO_STAGES if asked.training.zero == "auto" else ZERO_STAGES[:1]:
        settled = decided(asked, zero)
        costs = JobCosts(settled.model, settled.training, profiles)
        found, _ = search(settled, costs)
        if found:
            return arms_of(settled, costs, found, local_steps)
    raise InfeasibleError("no layout of this job fits")
