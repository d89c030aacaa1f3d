"""Plans and steps of the files that a user names: a job is planned, a plan or a problem is read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farpipe.cli.options import expect_job, job_with
from farpipe.core.errors import InputError
from farpipe.core.spec import Job
from farpipe.core.step import Problem, Schedule
from farpipe.core.strict import parse_json, read_text
from farpipe.planning import Plan, PlanDocument, find
from farpipe.planning.cost import Profile
from farpipe.planning.cost.chunk_profile import ChunkProfile
from farpipe.planning.explain import explained
from farpipe.planning.planner.find import MeasuredDevices, Planned


def load_profiles(job: Job, paths: Sequence[Path]) -> MeasuredDevices:
    """The profiles in files: with `data.packing` those of chunks, else those of microbatches."""
    kind = Profile if job.data.packing is None else ChunkProfile
    return tuple(map(kind.load, paths))


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Within it InputErrors name the file that a job is from."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_named(path: Path) -> tuple[str, Any, str]:
    """A JSON file: its text, its data, and the name of the format that it says to be of; empty where it says none."""
    text = read_text(path)
    data = parse_json(text, str(path))
    return text, data, str(data.get("format", "")) if isinstance(data, dict) else ""


def load_step(path: Path, given: list[str] | None = None) -> tuple[Problem, Schedule | None, Plan | None]:
    """The Problem in a job, a plan or a problem file, with the schedule and the plan where there are any.

    `given` are the keys of a job that ``--set`` changes.
    """
    if path.suffix == ".toml":
        plan = _planned(path, given).plan
        return plan.problem, plan.schedule, plan
    problem, schedule, document = load_explained(path, given)
    return problem, schedule, document.plan if document else None


def load_explained(
    path: Path, given: list[str] | None = None, *, searches: bool = False
) -> tuple[Problem, Schedule | None, PlanDocument | None]:
    """The same, with the plan's explanation; `searches` as for `explained`."""
    if path.suffix == ".toml":
        document = explained(_planned(path, given), searches=searches)
    else:
        expect_job(path, given)
        text, _, name = read_named(path)
        if name.startswith("farpipe/problem/"):
            return Problem.from_json(text, str(path)), None, None
        if not name.startswith("farpipe/plan/"):
            raise InputError(f"{path}: expected a job (.toml), a plan or a problem, found format {name!r}")
        document = PlanDocument.from_json(text, str(path))
    return document.plan.problem, document.plan.schedule, document


def _planned(path: Path, given: list[str] | None) -> Planned:
    job = job_with(path, given)
    with errors_of(path):
        return find(job)[0]
