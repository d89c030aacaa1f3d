"""Lengths of the documents that a command is given: in a file or data set, or of the job's own text."""

from pathlib import Path
from typing import NamedTuple

import typer

from farpipe.cli.output import status
from farpipe.runtime.data.tokens import load_tokens
from farpipe.sequences import has_texts, read_lengths
from farpipe.sequences.chunk import Ints
from farpipe.sequences.lengths import cut_lengths
from farpipe.sequences.tables import is_table
from farpipe.spec import Data, Job


class Corpus(NamedTuple):
    """Lengths of documents."""

    lengths: Ints
    num_counted: int | None = None
    """Tokens that are trained on; None: all."""


def read_corpus(file: Path, column: str | None, data: Data | None) -> Corpus:
    """The lengths in a file, or of the documents in it by the tokenizer of `data`, a job's."""
    data = data or Data()
    is_corpus = has_texts(file, data.text_key) or (file.is_dir() and not is_table(file))
    if column is not None or not is_corpus:
        return Corpus(read_lengths(file, column))
    return _tokenized(data.model_copy(update={"source": str(file), "format": "auto"}))


def trained_corpus(job: Job) -> Corpus:
    """The documents that a job trains on; with `data.packing` cut as in training."""
    found = _tokenized(job.data)
    if job.data.packing is None:
        return found
    return found._replace(lengths=cut_lengths(found.lengths, job.training.sequence_length))


def _tokenized(data: Data) -> Corpus:
    with status("reading the text"):
        tokens = load_tokens(data)
    if data.tokenizer == "bytes" and tokens.vocab_size == 256:
        typer.echo("tokens are bytes; the tokenizer of --job (data.tokenizer) counts others", err=True)
    return Corpus(tokens.lengths, tokens.num_counted if tokens.is_masked else None)
