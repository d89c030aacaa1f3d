"""``farpipe plan JOB.toml``: find the best plan, print it and why."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from farpipe.cli.output import check_folder, console, expect_replaceable, keep_earlier, progress_bar, search_status
from farpipe.errors import InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farpipe.cost import Profile
    from farpipe.plan import Plan
    from farpipe.spec import Job


Shares = Annotated[
    str | None,
    typer.Option(
        metavar="<shares>",
        help="Shares by which figures may be off, for example links=20%,compute=5%; the plan is chosen by what nine of "
        "ten steps keep. Default: the job's.",
    ),
]


def plan(
    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the plan.")] = Path("plan.json"),
    profile: Annotated[
        list[Path] | None,
        typer.Option(metavar="<path>", help="Measured times from `farpipe profile`; may be given several times."),
    ] = None,
    learned_from: Annotated[
        Path | None,
        typer.Option(metavar="<run>", help="Take times and links from what was measured in this run's directory."),
    ] = None,
    search_s: Annotated[
        float,
        typer.Option(min=0, help="Seconds to search further for a faster schedule of the plan found."),
    ] = 0.0,
    tokens: Annotated[
        float | None,
        typer.Option(min=1, max=1e21, help="Show time and device-hours for so many tokens; default: the job's steps."),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, max=20, help="Write the best so many plans, those after the first beside it.")
    ] = 1,
    objective: Annotated[
        Literal["time", "money", "energy", "carbon"],
        typer.Option(help="Objective of the plan: step time, or USD, kWh or grams of carbon per token."),
    ] = "time",
    local_steps: Annotated[
        int, typer.Option(min=2, help="Steps between two exchanges of the arm with local steps.")
    ] = 100,
    compare_arms: Annotated[
        bool, typer.Option("--arms/--no-arms", help="Compare the arms, and the changes that would help.")
    ] = True,
    uncertainty: Shares = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")] = False,
) -> None:
    """Find the best plan, print it and why the others lost, and write it to a file."""
    from farpipe.cli.compiling import compilation_told
    from farpipe.cli.shown import plans_of, show_plan
    from farpipe.plan import refine
    from farpipe.spec import load_job, parse_uncertainty

    check_folder(output)
    expect_replaceable(output, "plan")
    spec = load_job(job)
    if uncertainty is not None:
        spec = spec.model_copy(update={"uncertainty": parse_uncertainty(uncertainty)})
    if search_s:
        _expect_open_schedule(spec, job)
    spec, profiles, learned = _with_measured(spec, profile or [], learned_from)
    began_s = time.perf_counter()
    if objective != "time":
        from farpipe.plan.objective import choose, options, pinned_to
        from farpipe.plan.service import Planner

        spec = pinned_to(spec, choose(options(Planner(profiles), spec), objective))
    steps = local_steps if compare_arms else None
    with compilation_told(), progress_bar("planning", "layouts") as advance:
        found, *others = plans_of(spec, job, profiles, progress=advance, num_plans=top, local_steps=steps)
    found = found.model_copy(update={"advice": (*learned, *found.advice)})
    if search_s:
        with search_status("searching for a faster schedule") as tell:
            found = refine(found, search_s, tell)
    searched_s = time.perf_counter() - began_s
    told = _write(output, found, others)
    if as_json:
        _print_as_json(found, searched_s)
        return
    show_plan(found, console(), tokens)
    typer.echo(f"\nplan written to {output}{told}")


def _with_measured(
    job: "Job", paths: "Sequence[Path]", run_dir: Path | None
) -> "tuple[Job, list[Profile], tuple[str, ...]]":
    """The job with learned links, all profiles, and what is to be told of them; files go before what was learned."""
    from farpipe.cost import Profile

    profiles = [Profile.load(path) for path in paths]
    if run_dir is None:
        return job, profiles, ()
    from farpipe.run.learned import learned_from, with_links

    learned, told = learned_from(run_dir)
    taken = {profile.device for profile in profiles}
    devices = {site.device.name for site in job.cluster.sites} - taken
    if not devices & {profile.device for profile in learned.profiles}:
        raise InputError(
            f"--learned-from {run_dir}: it tells nothing of the job's devices: {', '.join(sorted(devices))}"
        )
    profiles += [profile for profile in learned.profiles if profile.device in devices]
    return with_links(job, learned), profiles, told


def _expect_open_schedule(job: "Job", path: Path) -> None:
    if job.schedule is not None:
        raise UsageError(
            f"--search-s: {path} names the schedule {job.schedule!r} (schedule.method), so there is none to search "
            'for; leave out --search-s, or write method = "auto" there'
        )


def _write(output: Path, best: "Plan", others: "Sequence[Plan]") -> str:
    """Write the plans, those after the best beside it; what is to be told of the files."""
    from farpipe.units import format_seconds

    told = keep_earlier(output, "plan")
    best.save(output)
    for number, other in enumerate(others, 2):
        place = output.with_name(f"{output.stem}.{number}{output.suffix}")
        told += f"\nnumber {number}, step {format_seconds(other.prediction.step_s)}: {place}"
        told += keep_earlier(place, "plan")
        other.save(place)
    return told


def _print_as_json(plan: "Plan", searched_s: float) -> None:
    """The plan with what others check it by: the search's seconds, money, and whether the engine can run it."""
    from farpipe.plan.engine import plan_obstacle
    from farpipe.plan.quote import money_data

    figures = {"step_s": plan.prediction.step_s, "tokens_per_s": plan.prediction.tokens_per_s}
    figures |= plan.prediction.spread.to_figures() if plan.prediction.spread else {}
    obstacle, change = plan_obstacle(plan)
    engine = {"runnable": not obstacle, "obstacle": obstacle, "change": change}
    extra = {"search_s": searched_s, **figures, "step_range_s": list(plan.step_range_s)}
    extra |= {"money": money_data(plan), "engine": engine}
    typer.echo(json.dumps(json.loads(plan.to_json()) | extra, indent=1))
