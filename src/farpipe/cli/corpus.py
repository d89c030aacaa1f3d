"""Lengths of the documents that a command is given: in a file or data set, or of the job's own text."""

from pathlib import Path
from typing import NamedTuple

import typer

from farpipe.cli.output import status
from farpipe.core.errors import InputError
from farpipe.core.spec import Data, Job
from farpipe.planning.documents.documents import is_text
from farpipe.planning.documents.tokens import Tokens, load_tokens
from farpipe.planning.workload import has_documents, read_lengths
from farpipe.planning.workload.chunk import Ints
from farpipe.planning.workload.lengths import ENDS, cut_lengths


class Corpus(NamedTuple):
    """Lengths of documents."""

    lengths: Ints
    num_counted: int | None = None
    """Tokens that are trained on; None: all."""


def read_corpus(file: Path, column: str | None, data: Data | None) -> Corpus:
    """The lengths in a file, or of the documents in it as a job with `data` would train on them."""
    settings = data or Data()
    file = _of_ends(file)
    if column is not None or not has_documents(file, settings.text_key):
        return Corpus(read_lengths(file, column))
    settings = settings.model_copy(update={"source": str(file), "format": "auto"})
    found = _tokenized(settings)
    if data is None and is_text(settings):
        typer.echo("bytes are counted as tokens; give --job to count with its tokenizer (data.tokenizer)", err=True)
    return found


def trained_corpus(job: Job) -> Corpus:
    """The documents that a job trains on; with `data.packing` cut as in training."""
    found = _tokenized(job.data)
    if job.data.packing is None:
        return found
    return found._replace(lengths=cut_lengths(found.lengths, job.training.sequence_length))


def _of_ends(file: Path) -> Path:
    """The file of tokens whose ends of documents `file` has, where it is beside it; else `file`."""
    if not file.name.endswith(ENDS):
        return file
    name = file.name.removesuffix(ENDS)
    beside = (file.with_name(name + suffix) for suffix in (".npy", ".bin"))
    return next((tokens for tokens in beside if tokens.exists()), file)


def _tokenized(data: Data) -> Corpus:
    with status("reading the documents"):
        tokens = load_tokens(data)
    lengths = tokens.lengths
    if not lengths.size:
        raise InputError(f"data.source: {data.source}: no document has tokens; name another source")
    return Corpus(lengths, _num_counted(tokens) if tokens.is_masked else None)


def _num_counted(tokens: Tokens) -> int:
    """Tokens that are trained on; a corpus without them is warned of, for training on it learns nothing."""
    found = tokens.num_counted
    if not found:
        typer.echo("warning: nothing is trained on: labels, masks or prompts exclude every token", err=True)
    return found
