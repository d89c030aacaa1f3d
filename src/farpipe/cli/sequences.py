"""``farpipe sequences plan JOB --lengths FILE``: one batch as chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from farpipe.cli.options import (
    AsJson,
    JobKeys,
    LengthColumn,
    job_with,
    refuse,
    settings,
    typed,
    with_groups,
)
from farpipe.cli.output import check_folder, console, log, print_json, status
from farpipe.core.errors import InputError
from farpipe.core.units import counted, format_about, format_bytes, format_percent, format_seconds
from farpipe.report.tables import TableView, to_rich

if TYPE_CHECKING:
    from farpipe.core.spec import Job
    from farpipe.planning.workload import BatchPlan, SequencePlan
    from farpipe.planning.workload.batch_options import BatchSettings
    from farpipe.planning.workload.chunk import Ints
    from farpipe.report.views import RunView

_MOST_GROUPS: Final = 4
"""Groups of devices with charts of their own on a page, those that end last."""
_OF_GROUPS: Final = "Chunks, timelines and memory further down are those of the groups that end last, four at most."

sequences = typer.Typer(
    name="sequences",
    help="Batches of sequences of all lengths: cut the long, pack the short, recompute just enough.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@sequences.callback()
def _group() -> None:
    """Batches of sequences of all lengths: cut the long, pack the short, recompute just enough."""


@dataclass(frozen=True)
class BatchPlanOptions:
    """A job, its batch and the options of the search."""

    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")]
    given: JobKeys = None
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="The batch: lengths, tokens or texts as for `farpipe lengths`. Default: one drawn from what the job "
            "trains on."
        ),
    ] = None
    column: LengthColumn = None
    sample: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of sequences drawn from the file as the batch, by training.seed; default: all."
        ),
    ] = None
    cut: Annotated[int | None, typer.Option(min=1, help="Cut sequences into pieces of at most this many tokens.")] = (
        None
    )
    html: Annotated[
        Path | None, typer.Option(help="Write the chunk map, with recomputed layers, and the timeline as an HTML page.")
    ] = None
    as_json: AsJson = False

    @property
    def batch_settings(self) -> "BatchSettings":
        """The settings of the batch that `--set` names."""
        from farpipe.planning.workload.batch_options import BatchSettings

        return settings(BatchSettings, [text for text in self.given or () if _is_of_batch(text)])

    def load_job(self) -> "Job":
        """The job with the other keys of `--set`."""
        return job_with(self.job, [text for text in self.given or () if not _is_of_batch(text)])


def _is_of_batch(text: str) -> bool:
    """True for a NAME=VALUE of `--set` whose name is a setting of the batch, not a key of the job."""
    from farpipe.planning.workload.batch_options import BatchSettings

    return text.partition("=")[0].strip() in BatchSettings.model_fields


@sequences.command("plan")
@with_groups
def plan(context: typer.Context, options: BatchPlanOptions) -> None:
    """Plan one batch: layout, chunks, pipelines, recomputed layers, orders, and the time of the step.

    The job's pins hold; what they leave open is searched. --set also takes settings of the batch: slices,
    checkpointing and devices_per_stage. The file is the batch unless --sample draws one; without a file, documents are
    drawn from what the job trains on. --json names pins that chunks can't keep in `unused`. Exit code 4: a sequence
    fits in no number of slices, or the batch in no layout.
    """
    from farpipe.cli.compiling import compilation_announced
    from farpipe.planning.planner.batches import plan_batch

    if options.lengths is None:
        refuse(typed(context, column="--column"), "needs --lengths")
    check_folder(options.html, keeping=(options.job, options.lengths))
    job, asked = options.load_job(), options.batch_settings
    batch = _batch(job, options)
    with compilation_announced(), status(f"planning {batch.size} sequences"):
        found = plan_batch(job, batch, asked.options, asked.devices_per_stage)
    obstacle, unused = _obstacle(job, found), {".".join(key): why for key, why in job.not_of_chunks().items()}
    if options.html is not None:
        _write_page(found, options.job.name, options.html, obstacle)
    if options.as_json:
        print_json(found.to_data() | {"is_trainable": not obstacle, "unused": list(unused)} | job.model.size_data)
        return
    _show(found, _uncompared(job, found, int(batch.max())), obstacle)
    for key, why in unused.items():
        console().print(f"{key} is not used: {why}", markup=False)


def _obstacle(job: "Job", plan: "BatchPlan") -> str:
    """The sentence on what keeps the engine from running a plan; empty where it can."""
    from farpipe.planning.planner.engine import batch_obstacle

    obstacle, change = batch_obstacle(job, plan)
    return (
        f"`farpipe train` can't run this plan: {obstacle}; pin {change} for the best that it can." if obstacle else ""
    )


def _write_page(plan: "BatchPlan", name: str, path: Path, obstacle: str) -> None:
    """The report of a batch: the other kinds of layouts, and the chunk map and timeline of every replica, or of the
    groups of devices that end last, under a picture of all."""
    from farpipe.report.page import write_report
    from farpipe.report.views import Picture, RunReport

    views = [_view(plan, index) for index in range(len(plan.replicas))]
    pictures, shown = tuple[Picture, ...](), views
    if plan.places:
        pictures = (Picture("Devices", _devices_svg(plan, views), "Pale boxes are forwards. " + _OF_GROUPS),)
        ends_s = [place.begin_s + view.predicted.makespan_s for place, view in zip(plan.places, views, strict=True)]
        shown = [views[index] for index in sorted(range(len(views)), key=lambda index: -ends_s[index])[:_MOST_GROUPS]]
    tables = (_kind_table(plan),) * bool(plan.others) + (_group_table(plan),) * bool(plan.places)
    what = f"A step takes {format_seconds(plan.step_s)}. {plan.why} {obstacle}".rstrip()
    step_s = plan.step_s if len(views) > 1 else None
    write_report(RunReport(name, tuple(shown), what, tables, pictures=pictures, step_s=step_s), path)


def _view(plan: "BatchPlan", index: int) -> "RunView":
    """One replica or group of devices."""
    from farpipe.core.simulate import simulate
    from farpipe.planning.workload import step_plan
    from farpipe.report.views import RunView

    replica, step = plan.replicas[index], step_plan(plan.replicas[index])
    problem = step.problem(plan.costs[index])
    return RunView(
        _run_name(plan, index, step.schedule.method),
        problem,
        simulate(problem, step.schedule),
        step_overhead_s=replica.overhead_s,
        chunks=step.chunks,
        recomputed=step.recomputed,
        keeps_attention=step.keeps_attention,
    )


def _devices_svg(plan: "BatchPlan", views: Sequence["RunView"]) -> str:
    from farpipe.report.group_chart import GroupRun, draw_groups

    each, tensor = zip(plan.places, views, strict=True), plan.layout.layout.tensor
    runs = [
        GroupRun(p.first_device * tensor, p.degree * tensor, p.begin_s, view.chunks, view.predicted) for p, view in each
    ]
    return draw_groups(runs, plan.layout.num_devices, plan.step_s).svg()


def _run_name(plan: "BatchPlan", index: int, method: str) -> str:
    if not plan.places:
        return f"replica {index}" if len(plan.replicas) > 1 else method
    place, tensor = plan.places[index], plan.layout.layout.tensor
    first, number = place.first_device * tensor, place.degree * tensor
    devices = f"device {first}" if number == 1 else f"devices {first} to {first + number - 1}"
    return f"{devices}, from {format_seconds(place.begin_s)} on"


def _uncompared(job: "Job", plan: "BatchPlan", longest: int) -> tuple[str, ...]:
    """Properties of the batch with which predictions were never compared."""
    from farpipe.planning.cost import JobCosts
    from farpipe.planning.cost.trust import uncompared

    sites = [job.cluster.site(name) for name in plan.layout.devices]
    return uncompared(JobCosts(job.model, job.training), sites, longest, plan.layout.devices_per_stage)


def _batch(job: "Job", options: BatchPlanOptions) -> "Ints":
    """The lengths to plan; InputError when one is longer than the model has positions."""
    from farpipe.cli.corpus import read_corpus, trained_corpus
    from farpipe.planning.workload import sample_lengths
    from farpipe.planning.workload.lengths import cut_lengths

    path, sample = options.lengths, options.sample
    found = (trained_corpus(job) if path is None else read_corpus(path, options.column, job.data)).lengths
    sample = min(job.training.global_batch, found.size) if path is None and sample is None else sample
    found = found if sample is None else sample_lengths(found, sample, job.training.seed)
    found = found if options.cut is None else cut_lengths(found, options.cut)
    longest, rows, limit = int(found.max()), job.model.max_sequence_length or 0, job.training.sequence_length
    if job.model.positions == "learned" and longest > rows:
        raise InputError(
            f"{path or job.data.source}: a sequence has {longest} tokens, and the model {rows} learned positions "
            f"(model.max_sequence_length); cut with --cut {rows}"
        )
    if options.cut is None and longest > limit:
        log(
            f"{(found > limit).sum():,} of {counted(found.size, 'sequence')}: more tokens than "
            f"training.sequence_length ({limit:,}), planned as they are; training cuts them (--cut {limit})"
        )
    return found


def _show(plan: "BatchPlan", uncompared: tuple[str, ...], obstacle: str) -> None:
    out, chunks, layout = console(), [one for each in plan.replicas for one in each.chunks], plan.layout
    out.print(
        f"{counted(plan.num_tokens, 'token')} in {counted(len(chunks), 'chunk')}, the longest sequence in "
        f"{counted(plan.num_slices, 'slice')}: {format_about(plan.step_s, is_rough=bool(uncompared))} a step, "
        f"{plan.num_tokens / plan.step_s:,.0f} tokens/s"
    )
    where = " > ".join(f"{site} ({number})" for site, number in layout.devices.items())
    replicas = f"{len(plan.replicas)} replicas of " if len(plan.replicas) > 1 else ""
    each = f"{replicas}{counted(len(layout.placements), 'stage')} of {counted(layout.devices_per_stage, 'device')} each"
    if plan.places:
        each = f"one stage, {plan.degrees}"
    out.print(f"{each}, {counted(layout.num_devices, 'device')} in all: {where}")
    kinds = [chunk.kind for chunk in chunks]
    out.print(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("split", "hybrid", "batched")))
    out.print(plan.why)
    if plan.others:
        out.print(to_rich(_kind_table(plan)))
    out.print(to_rich(_group_table(plan) if plan.places else _pipeline_table(plan)))
    if obstacle:
        out.print(obstacle, markup=False)
    peak = max(max(each.peak_memory_bytes) for each in plan.replicas)
    out.print(f"peak memory {format_bytes(peak)}; planned in {format_seconds(plan.planning_s)}")
    if uncompared:
        out.print(f"~ predictions for {', '.join(uncompared)} were never compared with measurements.")


def _kind_table(plan: "BatchPlan") -> "TableView":
    rows = tuple(
        (
            one.kind,
            one.degrees,
            str(one.num_slices),
            format_seconds(one.step_s),
            f"{one.step_s / plan.step_s:.2f}",
            format_seconds(one.exchange_s),
        )
        for one in (plan, *plan.others)
    )
    columns = ("layout", "replicas x stages x devices", "slices", "step", "ratio", "exposed sum of gradients")
    return TableView("The best of every kind", columns, rows, frozenset(range(2, 6)), chosen=0, expendable=(5, 2))


def _part_recomputed(plan: "SequencePlan") -> str:
    """Part of the recomputed layers that is computed again, where that is not all."""
    return " (all but attention)" if plan.keeps_attention else ""


def _group_table(plan: "BatchPlan") -> "TableView":
    rows, tensor = [], plan.layout.layout.tensor
    for context, count in reversed(plan.contexts.items()):
        placed = [place for place in plan.places if place.degree == context]
        mine, end_s = [place.plan for place in placed], max(place.end_s for place in placed)
        lengths = [int(n) for each in mine for n in each.batch.sequence_length]
        num_documents, num_chunks = len(lengths), sum(len(each.chunks) for each in mine)
        figures = (context * tensor, count, num_documents, f"{min(lengths):,} to {max(lengths):,}", num_chunks)
        layers = [int(pipeline.recomputed.sum()) for each in mine for pipeline in each.pipelines]
        again = f"{sum(layers) / num_chunks:.2f}{max(map(_part_recomputed, mine), key=len)}"
        rows.append((*map(str, figures), again, format_seconds(end_s)))
    columns = ("devices", "groups", "documents", "tokens of a document", "chunks", "layers recomputed", "done after")
    return TableView("Groups of devices, the largest first", columns, tuple(rows), frozenset(range(7)))


def _pipeline_table(plan: "BatchPlan") -> "TableView":
    several = len(plan.replicas) > 1
    rows = tuple(
        (
            f"{index} of replica {number}" if several else str(index),
            str(len(pipeline.chunks)),
            f"{sum(replica.chunks[i].num_tokens for i in pipeline.chunks):,}",
            format_seconds(pipeline.makespan_s),
            format_percent(pipeline.timeline.bubble_ratio),
            f"{pipeline.recomputed.sum() / max(1, pipeline.recomputed.size):.2f}{_part_recomputed(replica)}",
            format_bytes(max(pipeline.peak_memory_bytes)),
        )
        for number, replica in enumerate(plan.replicas)
        for index, pipeline in enumerate(replica.pipelines)
    )
    columns = ("pipeline", "chunks", "tokens", "time", "bubble", "layers recomputed", "peak memory")
    return TableView("Pipelines, one after the other", columns, rows, frozenset(range(1, 7)))
