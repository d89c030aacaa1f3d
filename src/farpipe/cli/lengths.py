"""``farpipe lengths FILE``: the lengths of a corpus, and what they mean."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farpipe.cli.options import AsJson, JobKeys, LengthColumn, job_with, refuse, typed, with_groups
from farpipe.cli.output import console, print_json, status
from farpipe.core.errors import UsageError
from farpipe.core.units import counted, format_percent, format_seconds
from farpipe.report.tables import TableView, to_rich

if TYPE_CHECKING:
    from farpipe.cli.corpus import Corpus
    from farpipe.core.spec import Job
    from farpipe.planning.planner.batches import Gain
    from farpipe.planning.workload.chunk import Ints
    from farpipe.planning.workload.length_summary import LengthSummary


@dataclass(frozen=True)
class LengthsOptions:
    """A corpus, and the batch that is planned of it."""

    file: Annotated[
        Path | None,
        typer.Argument(
            help="Lengths in tokens: one a line, CSV, JSON lines, .npy; or tokens (.bin with .idx), Parquet, Arrow, a "
            "folder of datasets, JSON lines of texts, all also .gz or .zst. Default: what --job trains on."
        ),
    ] = None
    column: LengthColumn = None
    job: Annotated[Path | None, typer.Option(help="A job (.toml): report the gain of chunks on its cluster.")] = None
    given: JobKeys = None
    sample: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --job: sequences of the batch that is planned. Default: its training.global_batch."
        ),
    ] = None
    as_json: AsJson = False


@with_groups
def lengths(context: typer.Context, options: LengthsOptions) -> None:
    """Show the lengths of a corpus: tokens beyond each length, slices, and what chunks would gain.

    Reads one length per line, CSV, JSON lines, Parquet, Arrow, datasets folders, histograms, arrays, and whatever
    `train` reads as data.source. With --job a batch is planned twice, with long sequences cut and whole.
    """
    from farpipe.planning.workload import summarize

    if options.job is None:
        of_job = typed(context, given="--set", sample="--sample")
        refuse(of_job, "needs --job")
    job = job_with(options.job, options.given) if options.job else None
    corpus = _read(options, job)
    summary = summarize(corpus.lengths)
    gain, batch = _gain(job, corpus.lengths, options) if job else (None, 0)
    if options.as_json:
        counted = {} if corpus.num_counted is None else {"num_trained_tokens": corpus.num_counted}
        print_json(
            summary.to_data()
            | counted
            | ({"gain": vars(gain) | {"speedup": gain.speedup} | job.model.guess_data} if job and gain else {})
        )
        return
    _show(summary, corpus.num_counted)
    if gain is not None:
        typer.echo(_gain_text(gain, batch))


def _read(options: LengthsOptions, job: "Job | None") -> "Corpus":
    """The lengths in a file, or of the documents in it or in the job's own text, by the job's tokenizer."""
    from farpipe.cli.corpus import read_corpus, trained_corpus

    if options.file is not None:
        return read_corpus(options.file, options.column, job.data if job else None)
    if job is None:
        raise UsageError("give a file of lengths, or --job to read that job's text")
    return trained_corpus(job)


def _gain(job: "Job", found: "Ints", options: LengthsOptions) -> tuple["Gain", int]:
    """Gain of chunks for one batch of a corpus, and the number of its sequences."""
    from farpipe.cli.compiling import compilation_announced
    from farpipe.planning.planner.batches import gain_of_chunks
    from farpipe.planning.workload import sample_lengths

    batch = min(options.sample or job.training.global_batch, found.size)
    with compilation_announced(), status("planning a batch"):
        return gain_of_chunks(job, sample_lengths(found, batch, 0)), batch


def _show(summary: "LengthSummary", num_counted: int | None) -> None:
    out = console()
    out.print(
        f"{counted(summary.num_sequences, 'sequence')}, {counted(summary.num_tokens, 'token')}: "
        f"mean {summary.mean:,.0f}, median {summary.median:,.0f}, p90 {summary.p90:,.0f}, p99 {summary.p99:,.0f}, "
        f"longest {summary.longest:,}"
    )
    out.print(to_rich(_table(summary)))
    if num_counted is not None:
        share = format_percent(num_counted / summary.num_tokens)
        typer.echo(f"{num_counted:,} tokens ({share}) are trained on, the rest are only read")


def _table(summary: "LengthSummary") -> "TableView":
    rows = tuple(
        (
            f"{row.tokens:,}",
            f"{row.num_sequences:,}",
            format_percent(row.sequence_share, 2),
            format_percent(row.token_share),
            f"{row.mean_slices:.1f}" if row.num_sequences else "-",
            f"{row.most_slices:,}" if row.num_sequences else "-",
        )
        for row in summary.beyond
    )
    columns = ("longer than", "sequences", "of sequences", "of tokens", "slices each", "at most")
    return TableView("Beyond each length", columns, rows, frozenset(range(6)))


def _gain_text(gain: "Gain", batch: int) -> str:
    chunks = counted(gain.num_chunks, "chunk")
    head = f"a batch of {batch} on this cluster: {format_seconds(gain.step_s)} a step with {chunks}"
    cut = f"the longest sequence in {counted(gain.num_slices, 'slice')}"
    if gain.whole_step_s is None:
        return f"{head}, {cut}; with every sequence whole it does not fit: {gain.whole_obstacle}"
    whole = f"{format_seconds(gain.whole_step_s)}, {gain.speedup:.2f} times as long"
    return f"{head}, {cut}; with every sequence whole {whole}"
