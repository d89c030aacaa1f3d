"""``farpipe plan JOB.toml``: find the best plan, print it and why."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from farpipe.cli import quick_imports
from farpipe.cli.init import FewWords
from farpipe.cli.options import AsJson, Full, JobKeys, ProfileFiles, changes, job_with, with_groups
from farpipe.cli.output import check_folder, console, expect_replaceable, keep_earlier, progress_bar, search_status
from farpipe.core.errors import InputError, RunInterruptedError, UsageError
from farpipe.core.units import COUNTS, format_seconds, parse

if TYPE_CHECKING:
    from farpipe.core.spec import Job
    from farpipe.planning import PlanDocument, Planned
    from farpipe.planning.cost import JobCosts
    from farpipe.planning.planner.find import MeasuredDevices
    from farpipe.planning.planner.objective import Objective

MAX_TOKENS: Final = 1e21


@dataclass(frozen=True)
class PlanOptions:
    """A job, what its plan is to be best in, and what is to be shown and written of it."""

    job: Annotated[
        Path | None, typer.Argument(help="The job as a TOML file; or none, and --model, --sites and --link.")
    ] = None
    given: JobKeys = None
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the plan.")] = Path("plan.json")
    profile: ProfileFiles = None
    learned_from: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Use the times and links measured in this run directory."),
    ] = None
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds to search further for a faster schedule of the plan found.")
    ] = 0.0
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Show time, device-hours and money for this many tokens, such as 15T; default: the job's steps.",
        ),
    ] = None
    top: Annotated[int, typer.Option(min=1, max=20, help="Number of plans to write: plan.json, plan.2.json, ...")] = 1
    objective: Annotated[
        Literal["time", "money", "energy", "carbon"],
        typer.Option(help="Objective of the plan: step time, or USD, kWh or grams of carbon per token."),
    ] = "time"
    strategies: Annotated[
        bool | None,
        typer.Option(
            "--strategies/--no-strategies",
            help="Compare strategies (site sets, replicas, local steps) and changes that would help; default: yes.",
        ),
    ] = None
    full: Full = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the job and say what would be planned and written; write nothing.")
    ] = False
    html: Annotated[
        Path | None, typer.Option(help="Write the answer as one HTML page: strategies, changes, money, derivation.")
    ] = None
    as_json: AsJson = False

    @property
    def num_tokens(self) -> float | None:
        """Number of `tokens`; None: those of the job's steps."""
        return None if self.tokens is None else number_of_tokens(self.tokens)

    @property
    def name(self) -> Path:
        """What errors call the job."""
        return self.job or Path("the job")

    def load_job(self, words: FewWords) -> "Job":
        """The job, once it is sure that the other options mean something beside it and that results can be written."""
        expect_replaceable(self.output, "plan")
        check_folder(self.output, self.html, keeping=(self.job,))
        job = self._job_in(words)
        if job.data.packing is not None:
            self._refuse_for_packing()
        if self.time_limit:
            _expect_open_schedule(job, self.name)
        return job

    def _job_in(self, words: FewWords) -> "Job":
        """The job of the file or of the words; UsageError for both, and for neither."""
        from farpipe.core.spec import load_job, parse_job

        if self.job is not None:
            if not words.is_empty:
                raise UsageError(f"--model, --sites and --link are a job of their own: change {self.job} with --set")
            return job_with(self.job, self.given)
        if words.is_empty:
            raise UsageError("there is no job: name its file, or give --model, --sites and --link; `farpipe init` asks")
        return load_job(parse_job(words.job_text(), "the job"), changes(self.given), option="--set")

    def _refuse_for_packing(self) -> None:
        """UsageError for options that mean nothing for a job with `data.packing`."""
        reasons = {
            "--top": (
                self.top > 1,
                "only one layout is planned; pin [layout] for another",
            ),
            "--learned-from": (
                self.learned_from is not None,
                "a run measures whole microbatches, not chunks; measure them with `farpipe profile` and give --profile",
            ),
            "--strategies": (
                bool(self.strategies),
                "strategies are compared for sequences of one length; leave out `packing`",
            ),
            "--objective": (
                self.objective != "time",
                "layouts are compared by money, energy and carbon for sequences of one length; leave out `packing`",
            ),
        }
        for option, (is_given, reason) in reasons.items():
            if is_given:
                raise UsageError(f"{option} can't be used with data.packing: {reason}")


@with_groups
def plan(options: PlanOptions, words: FewWords) -> None:
    """Find the best plan, print it, and write it to a file.

    Prints a verdict (which sites, how much faster, what limits it), the plan in one table and what would help most;
    `farpipe explain` and --full have the rest. `a > b` is a pipeline over both sites, `a + b` are replicas at each. An
    older plan is kept as NAME.previous.json; --top 3 also writes NAME.2.json and NAME.3.json. A plan that the engine
    can't run says so and names what to change. Over links that lose packets or jitter, step_s is the mean, with p50 and
    p90 beside it. Exit code 4: nothing fits.
    """
    with quick_imports():
        from farpipe.cli.compiling import compilation_announced
        from farpipe.cli.planned import errors_of, load_profiles
        from farpipe.planning import find
        from farpipe.planning.explain import explained, with_fastest
        from farpipe.report.shown import verdict_lines

    job, num_tokens, began_s = options.load_job(words), options.num_tokens, time.perf_counter()
    job, profiles, learned = _with_learned(job, load_profiles(job, options.profile or []), options.learned_from)
    if options.dry_run:
        _say_what_would_be_done(job, profiles, options)
        return
    job = _pinned_by(options.objective, job, profiles)
    with compilation_announced(), progress_bar("planning", "layout") as advance, errors_of(options.name):
        best, *others = find(job, profiles, advance, options.top)
    found = explained(best, searches=False)
    if not options.as_json and not options.time_limit:
        console().print(*verdict_lines(found, num_tokens, ties=options.full), sep="\n")
    found = with_fastest(found, best)
    if options.strategies is not False:
        found = _with_alternatives(found, best, others, options)
    found = _refined(_advised(found, learned), options.time_limit)
    searched_s = time.perf_counter() - began_s
    files = _write(options.output, found, *map(explained, others))
    if options.html is not None:
        _write_page(found, best, options.html)
    if options.as_json:
        _print_as_json(found, searched_s)
        return
    _show(found, best.costs, options)
    rest = "" if options.full else f"; more: farpipe explain {options.output}"
    typer.echo(f"{options.full * chr(10)}plan written to {options.output}{files}{rest}")


def _show(found: "PlanDocument", costs: "JobCosts", options: PlanOptions) -> None:
    """Print the plan, and with a search of its schedule the verdict, which was not known before."""
    from farpipe.report.shown import gain_lines, show_brief, show_derivation, show_plan, verdict_lines

    out = console()
    first = verdict_lines(found, options.num_tokens, ties=options.full) if options.time_limit else ()
    if not options.full:
        searched = found.explanation.advice[-1:] if options.time_limit else ()
        out.print(*first, *searched, "", sep="\n")
        show_brief(found, out)
        return
    out.print(*first, *(gain_lines(found, 2) if found.explanation.strategies else ()), "", sep="\n")
    show_plan(found, out)
    if found.plan.job.data.packing is None:
        out.print()
        show_derivation(found.plan, costs, out)


def _say_what_would_be_done(job: "Job", profiles: "MeasuredDevices", options: PlanOptions) -> None:
    """The job as it was read, and what `plan` would do with it."""
    training, cluster = job.training, job.cluster
    sites = ", ".join(f"{site.name} ({site.num_devices} {site.device.name})" for site in cluster.sites)
    pins = [name for name, value in job.layout if value is not None]
    data: dict[str, Any] = {
        "job": str(options.name),
        "model": f"{job.model.name}, {job.model.size_text}",
        "sites": sites,
        "links": ", ".join(link.name for link in cluster.links) or "none",
        "step": f"{training.global_batch} sequences of {training.sequence_length} tokens, {training.precision}",
        "pinned": ", ".join(pins + ["schedule"] * (job.schedule is not None)) or "nothing",
        "measured": ", ".join(profile.device for profile in profiles) or "nothing: times are modelled",
        "writes": ", ".join(str(file) for file in (options.output, options.html) if file),
    }
    if options.as_json:
        typer.echo(json.dumps(data, indent=1))
        return
    typer.echo("\n".join(f"{name:10}{text}" for name, text in data.items()))
    typer.echo("\nThe job is sound. Nothing was planned or written; leave out --dry-run to plan it.")


def _advised(found: "PlanDocument", first: "tuple[str, ...]") -> "PlanDocument":
    """The same with further advice before the rest."""
    advice = (*first, *found.explanation.advice)
    return found.model_copy(update={"explanation": found.explanation.model_copy(update={"advice": advice})})


def _refined(found: "PlanDocument", search_s: float) -> "PlanDocument":
    from farpipe.planning import PlanDocument, refine
    from farpipe.planning.explain import after_search

    if not search_s:
        return found
    with search_status("searching for a faster schedule") as report:
        plan, order = refine(found.plan, search_s, report)
    return PlanDocument(plan=plan, explanation=after_search(found.explanation, found.plan, plan, order))


def _write_page(found: "PlanDocument", best: "Planned", page: Path) -> None:
    """The page of a plan, with the answers at other latencies and bandwidths."""
    from farpipe.planning.explain.what_if import dials_of, grid_of
    from farpipe.report.page import write_report
    from farpipe.report.shown import plan_report, planned_view
    from farpipe.report.what_if import what_if_data

    dials = () if best.batch is not None else dials_of(best.found.job)
    grid = None
    if dials:
        with progress_bar("varying latency and bandwidth", "point") as advance:
            grid = what_if_data(dials, grid_of(best, dials, progress=advance))
    write_report(plan_report(found, [planned_view(found.plan)], costs=best.costs, what_if=grid), page)


def _pinned_by(objective: "Objective", job: "Job", profiles: "MeasuredDevices") -> "Job":
    """The job pinned to the layout that is best for `objective` by estimates; the job itself for step time."""
    from farpipe.planning.planner.objective import choose, options, pinned_to
    from farpipe.planning.planner.quotes import Planner

    return job if objective == "time" else pinned_to(job, choose(options(Planner(profiles), job), objective))


def number_of_tokens(text: str) -> float:
    """A number of tokens such as ``15T``, ``1.5e12`` or ``300_000``."""
    try:
        number = float(text) if text[-1:].isdecimal() else parse(text, COUNTS, "15T")
    except ValueError as error:
        raise UsageError(f"--tokens: {error}") from None
    if not 1 <= number <= MAX_TOKENS:
        raise UsageError(f"--tokens {text}: expected 1 to {MAX_TOKENS:g}")
    return number


def _with_alternatives(
    found: "PlanDocument", best: "Planned", others: "list[Planned]", options: PlanOptions
) -> "PlanDocument":
    """The best plan with its strategies and changes; Ctrl-C leaves it without them in the file."""
    from farpipe.cli.export import runs_on
    from farpipe.planning.explain import explained, with_alternatives

    try:
        with progress_bar("comparing strategies and changes", "change") as advance:
            why = with_alternatives(found.explanation, best, advance, runs_on=runs_on)
    except KeyboardInterrupt:
        files = _write(options.output, found, *map(explained, others))
        raise RunInterruptedError(
            f"interrupted; the plan without strategies and changes is in {options.output}{files}"
        ) from None
    return found.model_copy(update={"explanation": why})


def _with_learned(
    job: "Job", profiles: "MeasuredDevices", run_dir: Path | None
) -> "tuple[Job, MeasuredDevices, tuple[str, ...]]":
    """The job with learned links, all profiles, and sentences about them; files go before what was learned."""
    if run_dir is None:
        return job, profiles, ()
    from farpipe.engine.launch.learned import learn

    learned = learn(run_dir)
    taken = {profile.device for profile in profiles}
    devices = {site.device.name for site in job.cluster.sites} - taken
    if not devices & {profile.device for profile in learned.profiles}:
        raise InputError(
            f"--learned-from {run_dir}: it has no times of the job's devices: {', '.join(sorted(devices))}"
        )
    more = (profile for profile in learned.profiles if profile.device in devices)
    return learned.corrected(job), (*profiles, *more), learned.told


def _expect_open_schedule(job: "Job", path: Path) -> None:
    if job.schedule is not None:
        raise UsageError(
            f"--time-limit: {path} names the schedule {job.schedule!r} (schedule.method), so there is none to search "
            'for; leave out --time-limit, or write method = "auto" there'
        )


def _write(output: Path, best: "PlanDocument", *others: "PlanDocument") -> str:
    """Write the plans, those after the best beside it; what is to be said of the files."""
    files = keep_earlier(output, "plan")
    best.save(output)
    for number, other in enumerate(others, 2):
        place = output.with_name(f"{output.stem}.{number}{output.suffix}")
        files += f"\nnumber {number}, step {format_seconds(other.plan.prediction.step_s)}: {place}"
        files += keep_earlier(place, "plan")
        other.save(place)
    return files


def _print_as_json(found: "PlanDocument", searched_s: float) -> None:
    """The plan with what others check it by: the search's seconds, money, and whether the engine can run it."""
    from farpipe.planning.planner.engine import plan_obstacle
    from farpipe.planning.planner.quote import money_data

    plan = found.plan
    figures = {"step_s": plan.prediction.step_s, "tokens_per_s": plan.prediction.tokens_per_s}
    figures |= plan.prediction.spread.to_figures() if plan.prediction.spread else {}
    obstacle, change = plan_obstacle(plan)
    engine = {"runnable": not obstacle, "obstacle": obstacle, "change": change}
    if (instead := found.explanation.by_train) is not None and instead.step_s is not None:
        engine |= {"fastest": instead.fastest, "fastest_step_s": instead.step_s}
    extra = {
        "search_s": searched_s,
        **figures,
        "step_range_s": list(found.step_range_s),
    }
    extra |= {"money": money_data(plan), "engine": engine} | plan.job.model.size_data
    typer.echo(json.dumps(json.loads(found.to_json()) | extra, indent=1))
