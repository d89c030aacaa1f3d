"""``farpipe import``: settings of other frameworks as a job, and schedules from elsewhere."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from farpipe.cli.options import AsJson, Output, pairs, refuse, typed, with_groups
from farpipe.cli.output import check_folder, console, expect_new, keep_earlier, log, print_json
from farpipe.core.errors import InputError, UsageError
from farpipe.core.strict import read_text, write_text
from farpipe.core.units import BYTES_PER_S, SECONDS, parse
from farpipe.report.tables import FittedTable

if TYPE_CHECKING:
    from farpipe.core.simulate import Timeline
    from farpipe.core.spec import Model
    from farpipe.interop.measured_links import MeasuredLink
    from farpipe.interop.settings import Draft, DraftSite
    from farpipe.interop.trace_files import Trace
    from farpipe.planning.cost import Profile

_SITE = re.compile(r"([1-9]\d*)x(?=.)")
"""A number of devices before their name."""
_DEVICE: Final = "h100"
"""Taken where neither the files nor `--site` name one."""
FORMATS = "auto, megatron, torchtitan, nemo, deepspeed, hugging-face, torch-csv"
FILES = (
    "Settings of a training: a log of Megatron-LM that prints its arguments (-o JOB.toml), a script or options of "
    "Megatron-LM, a script that starts torchrun, Accelerate or DeepSpeed, YAML of Megatron-LM, NeMo or Accelerate, "
    "TOML of torchtitan, JSON of DeepSpeed or Hugging Face; several files are joined. A job.toml gets a second site "
    "(--second-site), or measurements of its link. Outputs of iperf3, "
    "ping, mtr, nccl-tests, perftest and qperf become the link, Slurm's nodes (scontrol, sinfo) and tasks of "
    "SkyPilot the sites; a trace of torch.profiler becomes a profile, those of a pipeline's "
    "ranks its timeline; a training's log its steps. Lists of jobs (sacct -P, Kueue, Volcano, SkyPilot) "
    "become JOBS.csv. "
    "Or a CSV schedule of torch.distributed.pipelining (compute_only)."
)


@dataclass(frozen=True)
class ImportOptions:
    """Files of others, and what they leave open."""

    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help=FILES,
        ),
    ]
    form: Annotated[str, typer.Option("--format", help=f"One of {FORMATS}.")] = "auto"
    site: Annotated[
        str | None,
        typer.Option(help="Devices of the training; 128xh100 if the files don't say how many. Default: h100."),
    ] = None
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A variable or an argument (1=...) that a script takes; zone= for lists of jobs.",
        ),
    ] = None
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION",
            help="Import without this unknown option, though it may change the model's shape; repeatable.",
        ),
    ] = None
    second_site: Annotated[
        int | None,
        typer.Option(min=1, help="Devices of a second site: the job then leaves the degrees to the planner."),
    ] = None
    link_text: Annotated[
        str | None,
        typer.Option(
            "--link",
            metavar="TIME,RATE",
            help="Link to the second site: one-way latency, bandwidth or both. Default: as measured, or 20ms,100G.",
        ),
    ] = None
    job: Annotated[Path | None, typer.Option(help="Job of the trace or log.")] = None
    output: Output = None
    as_json: AsJson = False

    @property
    def device(self) -> str:
        """The device's name, of `--site`."""
        return _SITE.sub("", self.site or _DEVICE)

    @property
    def num_devices(self) -> int | None:
        """Number of devices, of `--site`."""
        found = _SITE.match(self.site or _DEVICE)
        return int(found[1]) if found else None

    @property
    def link(self) -> dict[str, str]:
        """Figures of the link to the second site, as given: "latency" and "bandwidth", or one of them."""
        from farpipe.core.spec.first import rate_text

        found: dict[str, str] = {}
        for word in [word.strip() for word in (self.link_text or "").split(",") if self.link_text]:
            is_time = word.lstrip("0123456789_.eE+- ") in SECONDS
            word = word if is_time else rate_text(word)
            units, example = (SECONDS, "20ms") if is_time else (BYTES_PER_S, "100G")
            try:
                parse(word, units, example)
            except ValueError as error:
                raise UsageError(f"--link: {error}") from None
            if found.setdefault("latency" if is_time else "bandwidth", word) is not word:
                raise UsageError(f"--link: expected a latency and a bandwidth, found {self.link_text!r}")
        return found


@with_groups
def import_(context: typer.Context, options: ImportOptions) -> None:
    """Import settings, logs, link tests and traces of other frameworks.

    Settings become a job.toml that names the source of every value. An unknown option that gives a shape or a degree
    ends the import; --accept NAME ignores it. Options that change time or memory and are not planned are listed at the
    top of the job and in not_planned of --json. Of a log it shows the step (median of steady steps), tokens/s, memory
    and sizes. No file is overwritten.
    """
    from farpipe.cli.import_lists import import_lists, import_log
    from farpipe.interop.second_site import is_job

    form, files, output, as_json = options.form, options.files, options.output, options.as_json
    if form not in FORMATS.split(", "):
        raise typer.BadParameter(f"expected one of {FORMATS}, found {form!r}", param_hint="--format")
    asks_for_job = len(files) > 1 or options.second_site is not None or (output and output.suffix == ".toml")
    if form == "auto" and (
        (not asks_for_job and import_log(files[0], options.job, output, as_json))
        or import_lists(files, pairs(options.given), output, as_json)
    ):
        return
    if jobs := [file for file in files if is_job(file)]:
        others = {"form": "--format", "site": "--site", "given": "--set"}
        refuse(
            typed(context, **others),
            f"is for other frameworks' settings, and {jobs[0]} is a farpipe job: change it there",
        )
        _import_job(jobs[0], [file for file in files if file != jobs[0]], options)
        return
    is_table = form == "auto" and files[0].suffix == ".csv"
    if is_table:
        _expect_schedule(files[0])
    if form == "torch-csv" or is_table:
        _import_schedule(files, output, as_json)
        return
    if not _is_traced(files, options.job, output, as_json):
        _import_settings(options)


def _import_settings(options: ImportOptions) -> None:
    """Write or print the job of files of settings, or the tables of a cluster where there are none."""
    from farpipe.interop.measured_links import MeasuredLink

    is_auto = options.form == "auto"
    settings, sites, notes, link = (
        _sorted(options.files, options.device) if is_auto else (options.files, [], [], MeasuredLink())
    )
    link.give(options.link)
    if not settings:
        _print_cluster(sites, link, notes, options.as_json)
        return
    draft = _draft(settings, notes, options)
    draft.notes += link.notes
    if options.site is None and not sites:
        draft.notes.append(f"the devices are {_DEVICE}; --site names others")
    text, model = _job_text(draft, sites, link, options)
    _write_draft(draft, text, model, options)
    _report(draft, options.output)


def _import_job(path: Path, files: list[Path], options: ImportOptions) -> None:
    """Write or print a job with a second site, or with measurements in place of the figures of its link."""
    from farpipe.core.spec import load_job
    from farpipe.core.strict import parse_toml
    from farpipe.interop.measured_links import with_measured_links
    from farpipe.interop.second_site import with_second_site

    job = load_job(path)
    if options.second_site is not None:
        settings, sites, mixed, link = _sorted(files, options.device)
        if settings or sites:
            raise UsageError(f"{files[0]}: with a job, only measurements of its link are read")
        link.give(options.link)
        text, notes = with_second_site(path, job, options.second_site, link)
        notes += mixed
    elif files:
        refuse(["--link"] if options.link else [], "is for --second-site")
        job, units = with_measured_links(job, files)
        text, notes = job.to_toml(), list(units)
    else:
        raise UsageError(f"{path}: is a farpipe job already; add --second-site N, or measurements of its link")
    if options.output is not None:
        expect_new(options.output)
        write_text(options.output, text)
    if options.as_json:
        found = {"framework": "farpipe", "job": parse_toml(text, "the job"), "assumed": notes}
        print_json({"format": "farpipe/import/1", **found, "not_understood": [], "without_effect": []})
    elif options.output is None:
        typer.echo(text, nl=False)
    for note in notes:
        log(note)


def _draft(settings: list[Path], notes: list[str], options: ImportOptions) -> "Draft":
    """Draft of the job that the files of settings describe; InputError where they lack something."""
    from farpipe.interop.files import draft_of_devices, read_draft

    read = read_draft(settings, options.form, pairs(options.given))  # type: ignore[arg-type]
    read.accept(options.accept or ())
    read.not_understood += notes
    _expect_whole(read, options.files)
    read.expect_understood()
    return draft_of_devices(read, options.num_devices, options.device)


def _job_text(
    draft: "Draft", sites: "list[DraftSite]", link: "MeasuredLink", options: ImportOptions
) -> "tuple[str, Model]":
    """The job.toml, which can be read, and its model; with a second site where one is asked for."""
    from farpipe.core.spec import parse_job
    from farpipe.interop.settings import Setting

    if options.second_site is not None:
        sites = sites or [draft.site(options.device)]
        sites.append(draft.site(options.device, Setting(options.second_site, "--second-site"), "second"))
    text = draft.to_toml(options.device, sites, link.there, link.back)
    model = parse_job(text, "the job read from " + ", ".join(map(str, options.files))).model
    first, _, rest = text.partition("\n")
    return f"{first}\n# {model.name}: {model.size_text}.\n{rest}", model


def _write_draft(draft: "Draft", text: str, model: "Model", options: ImportOptions) -> None:
    if options.output is not None:
        expect_new(options.output)
        write_text(options.output, text)
    if options.as_json:
        print_json(draft.to_data() | model.size_data)
    elif options.output is None:
        typer.echo(text, nl=False)


def _expect_whole(draft: "Draft", files: list[Path]) -> None:
    """InputError where the files lack what a job needs."""
    if missing := draft.missing():
        asked = f": {', '.join(sorted(draft.unset))}" if draft.unset else ""
        raise InputError(
            f"{', '.join(map(str, files))}: {', '.join(missing)} missing"
            + "".join(f"\n  {text}" for text in [*draft.notes, *draft.shapes.values(), *draft.not_understood])
            + f"\ngive another file that has it, or --set NAME=VALUE for a variable of the script{asked}"
        )


def _is_traced(files: list[Path], job: Path | None, output: Path | None, as_json: bool) -> bool:
    """True if the files are traces, which then were written or shown: those of one rank as a profile, of several as
    the step's timeline."""
    from farpipe.interop.trace_files import is_trace, of_one_rank, read_trace

    if not all(file.is_file() and is_trace(file) for file in files):
        return False
    if job is None:
        raise UsageError(f"{files[0]}: a trace has times but no model: name its job with --job")
    traces = [*map(read_trace, files)]
    found, notes = _profile(traces, job) if of_one_rank(traces) else _traced_step(traces, job)
    for note in notes:
        log(note)
    if output is not None:
        expect_new(output)
        found.save(output)
    if as_json:
        print_json(found.to_data())
    else:
        console().print(_shown(found))
    return True


def _profile(traces: "list[Trace]", job: Path) -> "tuple[Profile, tuple[str, ...]]":
    from farpipe.core.spec import load_job
    from farpipe.interop.traces import profile_of

    return profile_of(traces, load_job(job))


def _traced_step(traces: "list[Trace]", job: Path) -> "tuple[Timeline, tuple[str, ...]]":
    from farpipe import planning
    from farpipe.cli.planned import errors_of
    from farpipe.core.spec import load_job
    from farpipe.interop.traced_steps import timeline_of

    asked = load_job(job)
    with errors_of(job):
        plan = planning.plan(asked)
    return timeline_of(traces, plan.problem, plan.schedule)


def _shown(found: "Profile | Timeline") -> "FittedTable | Timeline":
    from farpipe.planning.cost import Profile
    from farpipe.report.shown import profile_table

    return profile_table(found) if isinstance(found, Profile) else found


def _sorted(files: list[Path], device: str) -> "tuple[list[Path], list[DraftSite], list[str], MeasuredLink]":
    """Files of settings; and of the others the sites, notes on what of them could not be used, and the link."""
    from farpipe.interop.measured_links import link_of, read_link_tests
    from farpipe.interop.sites import read_sites

    tests = read_link_tests(files)
    rest = [file for file in files if file not in tests]
    found = {file: of_file for file in rest if (of_file := read_sites(file, device)) is not None}
    sites = [site for of_file in found.values() for site in of_file.sites]
    notes = [note for of_file in found.values() for note in of_file.notes]
    return [file for file in rest if file not in found], sites, notes, link_of(tests.values())


def _print_cluster(sites: "list[DraftSite]", link: "MeasuredLink", notes: list[str], as_json: bool) -> None:
    """Sites and the link of files without settings, as tables of a job."""
    from farpipe.interop.settings import cluster_lines, link_lines

    for note in (*notes, *link.notes):
        log(note)
    if as_json:
        tables = [{"name": one.name, "device": one.device.value, "num_devices": one.num_devices.value} for one in sites]
        print_json({"format": "farpipe/import/1", "sites": tables, **_link_data(link), "notes": [*notes, *link.notes]})
        return
    ends = ["site", "second"]
    lines = cluster_lines(sites, link.there, link.back) if sites else link_lines(ends, link.there, link.back)
    typer.echo("\n".join(lines[1:]))


_MANY: Final = 20
"""Options without effect up to which they are named on the screen."""


def _link_data(link: "MeasuredLink") -> dict[str, Any]:
    """The link's figures and where they come from, as JSON; ``back`` has those that differ in the other direction."""
    directions = {"link": link.there} | ({"back": link.back} if link.back else {})
    figures: dict[str, Any] = {
        name: {key: value for key, (value, _) in one.items()} for name, one in directions.items()
    }
    origins = {f"{name}.{key}": origin for name, one in directions.items() for key, (_, origin) in one.items()}
    return figures | {"origins": origins}


def _report(draft: "Draft", output: Path | None) -> None:
    """Counts on stderr after the lines to be read first, and what was not understood where the file goes elsewhere."""
    for text in draft.warnings():
        log(text)
    for text in (*draft.notes, *draft.not_understood) if output is not None else ():
        log(text)
    passed_over = draft.without_effect
    named = (
        f": {', '.join(passed_over)}" if 0 < len(passed_over) <= _MANY else " (--json names them)" * bool(passed_over)
    )
    log(
        f"{sum(map(len, draft.tables.values()))} values read, {len(draft.not_understood)} not understood, "
        f"{len(passed_over)} without effect on a step{named}"
    )


def _expect_schedule(file: Path) -> None:
    """InputError for a table that has a name of a column, but nothing like an action, in its first line."""
    from farpipe.interop.cells import KINDS_TRIED

    first = next((line for line in read_text(file).splitlines() if re.search(r"\w", line)), "")
    if not first or any(re.match(r"\(?\d+[A-Z]", cell.strip()) for cell in first.split(",")):
        return
    raise InputError(
        f"{file}: line 1: no list of jobs, no log and no schedule that is known, found {first[:80]!r}; "
        f"tried: {KINDS_TRIED}"
        "\na fleet reads a table of jobs whose columns are job, submit_s, duration_s, devices and tenant (JOBS.csv), "
        "and one of prices or carbon whose columns are utc and a name for each zone, in USD/MWh or g/kWh"
    )


def _import_schedule(files: list[Path], output: Path | None, as_json: bool) -> None:
    from farpipe.core.schedule.torch_csv import from_torch_csv

    if len(files) > 1:
        raise typer.BadParameter("a schedule is one file", param_hint="FILE")
    schedule = from_torch_csv(read_text(files[0]), str(files[0]))
    if output is not None:
        keep_earlier(output, "schedule")
        check_folder(output)
        schedule.save(output)
    if as_json:
        print_json(schedule.to_data())
        return
    console().print(schedule)
