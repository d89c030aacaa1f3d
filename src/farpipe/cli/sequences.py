"""``farpipe sequences plan JOB --lengths FILE``: one batch as chunks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from farpipe.cli.options import refuse, typed
from farpipe.cli.output import console, print_json, status

if TYPE_CHECKING:
    from farpipe.report import TableView
    from farpipe.sequences import SequencePlan
    from farpipe.sequences.chunk import Ints
    from farpipe.spec import Job

sequences = typer.Typer(
    name="sequences",
    help="Batches of sequences of all lengths: cut the long, pack the short, recompute just enough.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@sequences.callback()
def _group() -> None:
    """Batches of sequences of all lengths: cut the long, pack the short, recompute just enough."""


@sequences.command("plan")
def plan(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")],
    lengths: Annotated[
        Path, typer.Option(help="The batch: lengths in tokens, one a line, CSV, JSON lines, .npy; or tokens.")
    ],
    column: Annotated[
        str | None, typer.Option(help="Column of a CSV, or key of JSON lines, that has the lengths.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Draw a batch of so many sequences from the file; else all are the batch.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="With --sample: of the draw.")] = 0,
    cut: Annotated[
        int | None, typer.Option(min=1, help="Cut longer sequences into several of at most so many tokens.")
    ] = None,
    slices: Annotated[int | None, typer.Option(min=1, help="Slices of the longest sequence; else searched.")] = None,
    packing: Annotated[
        Literal["best-fit", "literal"], typer.Option(help="Rule of packing; literal is InfiniPipe's.")
    ] = "best-fit",
    checkpointing: Annotated[
        Literal["chunk", "uniform", "full", "none"],
        typer.Option(help="Layers to recompute: chosen for each stage and chunk, the same for all, all, none."),
    ] = "chunk",
    devices_per_stage: Annotated[
        int, typer.Option(min=1, help="Devices that share a stage's chunks (context parallelism).")
    ] = 1,
    hide_links: Annotated[
        bool, typer.Option("--hide-links/--plain-order", help="Extra warm-up where links take time, or plain 1F1B.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan one batch: chunks, pipelines, recomputed layers, orders, and the time of the step."""
    from farpipe.sequences import BatchOptions, chunk_costs, plan_sequences
    from farpipe.spec import load_job

    if sample is None:
        refuse(typed(context, seed="--seed"), "is of the draw that --sample makes: give that too")
    spec = load_job(job)
    batch = _batch(spec, lengths, column, sample, seed, cut)
    options = BatchOptions(num_slices=slices, rule=packing, checkpointing=checkpointing, hide_links=hide_links)
    with status(f"planning {batch.size} sequences"):
        found = plan_sequences(chunk_costs(spec, int(batch.max()), devices_per_stage), batch, options)
    if as_json:
        from farpipe.sequences.document import plan_data

        print_json(plan_data(found))
        return
    _show(found)


def _batch(job: "Job", path: Path, column: str | None, sample: int | None, seed: int, cut: int | None) -> "Ints":
    """The lengths to plan; InputError when one is longer than the model has positions."""
    from farpipe.errors import InputError
    from farpipe.sequences import read_lengths, sample_lengths
    from farpipe.sequences.lengths import cut_lengths

    found = read_lengths(path, column)
    found = found if sample is None else sample_lengths(found, sample, seed)
    found = found if cut is None else cut_lengths(found, cut)
    longest, rows = int(found.max()), job.model.max_sequence_length or 0
    if job.model.positions == "learned" and longest > rows:
        raise InputError(
            f"{path}: a sequence has {longest} tokens, and the model {rows} learned positions "
            f"(model.max_sequence_length); cut with --cut {rows}"
        )
    return found


def _show(plan: "SequencePlan") -> None:
    from farpipe.report import to_rich
    from farpipe.units import counted, format_bytes, format_seconds

    out = console()
    out.print(
        f"{counted(plan.num_tokens, 'token')} in {counted(len(plan.chunks), 'chunk')}, the longest sequence in "
        f"{counted(plan.num_slices, 'slice')}: "
        f"{format_seconds(plan.step_s)} a step, {plan.num_tokens / plan.step_s:,.0f} tokens/s"
    )
    kinds = [chunk.kind for chunk in plan.chunks]
    out.print(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("split", "hybrid", "batched")))
    out.print(to_rich(_pipeline_table(plan)))
    peak = max(plan.peak_memory_bytes)
    out.print(f"peak memory {format_bytes(peak)}; planned in {format_seconds(plan.planning_s)}")


def _pipeline_table(plan: "SequencePlan") -> "TableView":
    from farpipe.report import TableView
    from farpipe.units import format_bytes, format_percent, format_seconds

    rows = tuple(
        (
            str(index),
            str(len(pipeline.chunks)),
            f"{sum(plan.chunks[i].num_tokens for i in pipeline.chunks):,}",
            format_seconds(pipeline.makespan_s),
            format_percent(pipeline.timeline.bubble_ratio),
            f"{pipeline.recomputed.sum() / max(1, pipeline.recomputed.size):.2f}",
            format_bytes(max(pipeline.peak_memory_bytes)),
        )
        for index, pipeline in enumerate(plan.pipelines)
    )
    columns = ("pipeline", "chunks", "tokens", "time", "bubble", "layers recomputed", "peak memory")
    return TableView("Pipelines, one after the other", columns, rows, frozenset(range(1, 7)))
