"""Plans and steps of the files that a user names: a job is planned, a plan or a problem is read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farpipe.core.errors import InputError
from farpipe.core.spec import Job, load_job
from farpipe.core.step import Problem, Schedule
from farpipe.core.strict import parse_json, read_text
from farpipe.planning.cost import Profile
from farpipe.planning.cost.chunk_profile import ChunkProfile
from farpipe.planning.planner import Plan
from farpipe.planning.planner.find_plans import FoundPlans, MeasuredDevices, find_plans


def plan_of(job: Job, path: Path, profiles: MeasuredDevices = ()) -> Plan:
    """The best plan of any job; InputErrors name the file that the job is from."""
    return find_plans_of(job, path, profiles).plans[0]


def load_profiles(job: Job, paths: Sequence[Path]) -> MeasuredDevices:
    """The profiles in files: with `data.packing` those of chunks, else those of microbatches."""
    kind = Profile if job.data.packing is None else ChunkProfile
    return tuple(map(kind.load, paths))


def find_plans_of(job: Job, path: Path, profiles: MeasuredDevices = (), **options: Any) -> FoundPlans:
    """The plans of any job; InputErrors name the file that the job is from. `options` are those of `find_plans`."""
    try:
        return find_plans(job, profiles, **options)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_named(path: Path) -> tuple[str, Any, str]:
    """A JSON file: its text, its data, and the name of the format that it says to be of; empty where it says none."""
    text = read_text(path)
    data = parse_json(text, str(path))
    return text, data, str(data.get("format", "")) if isinstance(data, dict) else ""


def load_step(path: Path) -> tuple[Problem, Schedule | None, Plan | None]:
    """The Problem in a job, a plan or a problem file, with the schedule and the plan where there are any."""
    if path.suffix == ".toml":
        plan = plan_of(load_job(path), path)
        return plan.problem, plan.schedule, plan
    text, _, name = read_named(path)
    if name.startswith("farpipe/plan/"):
        plan = Plan.from_json(text, str(path))
        return plan.problem, plan.schedule, plan
    if name.startswith("farpipe/problem/"):
        return Problem.from_json(text, str(path)), None, None
    raise InputError(f"{path}: expected a job (.toml), a plan or a problem, found format {name!r}")
