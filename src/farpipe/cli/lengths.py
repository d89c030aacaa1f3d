"""``farpipe lengths FILE``: the lengths of a corpus, and what they mean."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.options import refuse, typed
from farpipe.cli.output import check_folder, check_picture, console, print_json, status

if TYPE_CHECKING:
    from farpipe.report import TableView
    from farpipe.sequences.chunk import Ints
    from farpipe.sequences.summary import Gain, LengthSummary


def lengths(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Lengths in tokens: one a line, CSV, JSON lines, .npy; or tokens.")],
    column: Annotated[
        str | None, typer.Option(help="Column of a CSV, or key of JSON lines, that has the lengths.")
    ] = None,
    job: Annotated[Path | None, typer.Option(help="A job (.toml): tell what chunks would gain on its cluster.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="With --job: sequences of the batch that is planned.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="With --job: of the draw of that batch.")] = 0,
    devices_per_stage: Annotated[
        int, typer.Option(min=1, help="With --job: devices that share a stage's chunks (context parallelism).")
    ] = 1,
    plot: Annotated[Path | None, typer.Option(help="Write the distribution as an SVG picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Show the lengths of a corpus: tokens beyond each length, slices, and what chunks would gain."""
    from farpipe.sequences import read_lengths, summarize

    if job is None:
        of_job = typed(context, batch="--batch", seed="--seed", devices_per_stage="--devices-per-stage")
        refuse(of_job, "is for the batch that --job plans: give that too")
    check_picture(plot, kinds=(".svg",))
    check_folder(plot, keeping=(file, job))
    found = read_lengths(file, column)
    summary = summarize(found)
    gain = _gain(found, job, batch, seed, devices_per_stage) if job else None
    if plot is not None:
        _draw(found, plot, file.name)
    if as_json:
        print_json(summary.to_data() | ({"gain": _gain_data(gain)} if gain else {}))
        return
    _show(summary)
    if gain is not None:
        typer.echo(_gain_text(gain, min(batch, found.size)))


def _gain(found: "Ints", job: Path, batch: int, seed: int, devices_per_stage: int) -> "Gain":
    from farpipe.sequences import chunk_costs, gain_of_chunks, sample_lengths
    from farpipe.spec import load_job

    drawn = sample_lengths(found, min(batch, found.size), seed)
    costs = chunk_costs(load_job(job), int(drawn.max()), devices_per_stage)
    with status("planning a batch"):
        return gain_of_chunks(costs, drawn)


def _gain_data(gain: "Gain") -> dict[str, Any]:
    return vars(gain) | {"speedup": gain.speedup}


def _draw(found: "Ints", path: Path, name: str) -> None:
    from farpipe.report.lengths import draw_lengths
    from farpipe.sequences.summary import histogram
    from farpipe.strict import write_text

    title = f"{name}: {found.size:,} sequences, {int(found.sum()):,} tokens"
    write_text(path, draw_lengths(*histogram(found), title).svg())


def _show(summary: "LengthSummary") -> None:
    from farpipe.report import to_rich
    from farpipe.units import counted

    out = console()
    out.print(
        f"{counted(summary.num_sequences, 'sequence')}, {counted(summary.num_tokens, 'token')}: "
        f"mean {summary.mean:,.0f}, median {summary.median:,.0f}, p90 {summary.p90:,.0f}, p99 {summary.p99:,.0f}, "
        f"longest {summary.longest:,}"
    )
    out.print(to_rich(_table(summary)))


def _table(summary: "LengthSummary") -> "TableView":
    from farpipe.report import TableView
    from farpipe.units import format_percent

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
    from farpipe.units import counted, format_seconds

    chunks = counted(gain.num_chunks, "chunk")
    head = f"a batch of {batch} on this cluster: {format_seconds(gain.step_s)} a step with {chunks}"
    cut = f"the longest sequence in {counted(gain.num_slices, 'slice')}"
    if gain.whole_step_s is None:
        return f"{head}, {cut}; with every sequence whole it does not fit: {gain.whole_obstacle}"
    whole = f"{format_seconds(gain.whole_step_s)}, {gain.speedup:.2f} times as long"
    return f"{head}, {cut}; with every sequence whole {whole}"
