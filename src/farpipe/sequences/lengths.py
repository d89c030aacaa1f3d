"""Lengths of sequences: read from a file, or drawn from a corpus by seed."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from farpipe.errors import InputError
from farpipe.sequences.chunk import Ints
from farpipe.strict import nearest, read_text

MAX_LENGTH: Final = 1 << 40
_COLUMNS: Final = ("length", "lengths", "tokens", "num_tokens", "token_count")


def read_lengths(path: Path | str, column: str | None = None) -> Ints:
    """The lengths in a file, in its order: text with one number per line, CSV with a header, .npy of integers.

    `column` names the column of a CSV; None: the only one that is called after lengths or tokens. InputError names the
    line of what is no whole number from 1 on.
    """
    path = Path(path)
    if path.suffix == ".npy":
        if column is not None:
            raise InputError(f"{path}: an array has no column {column!r}")
        return _read_array(path)
    text = read_text(path)
    first = text.lstrip().splitlines()[0]
    if column is None and _is_number(first.strip()):
        return _numbers(((n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()), path)
    return _read_csv(text, path, column)


def _is_number(word: str) -> bool:
    return word.lstrip("+-").replace(".", "", 1).isdecimal()


def _numbers(words: Iterable[tuple[int, str]], path: Path) -> Ints:
    return np.array([_length(word, f"{path}:{line}") for line, word in words], np.int64)


def _length(word: str, place: str) -> int:
    if not (word.isascii() and word.isdecimal()):
        raise InputError(f"{place}: expected the length of a sequence, a whole number of tokens, found {word[:40]!r}")
    length = int(word) if len(word) < 20 else MAX_LENGTH + 1
    if length < 1:
        raise InputError(f"{place}: a sequence of 0 tokens has nothing to train on; leave it out")
    if length > MAX_LENGTH:
        raise InputError(f"{place}: {word[:40]} tokens are more than {MAX_LENGTH}; this can't be a length")
    return length


def _read_csv(text: str, path: Path, column: str | None) -> Ints:
    rows = csv.reader(io.StringIO(text))
    header = [name.strip() for name in next(rows)]
    place = _column_of(header, path, column)
    words = []
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise InputError(f"{path}:{rows.line_num}: expected {len(header)} columns, found {len(row)}")
        words.append((rows.line_num, row[place].strip()))
    if not words:
        raise InputError(f"{path}: there are no rows below the header")
    return _numbers(words, path)


def _column_of(header: list[str], path: Path, column: str | None) -> int:
    if column is not None:
        if column not in header:
            raise InputError(
                f"{path}: there is no column {column!r} in {', '.join(header)[:80]!r}{nearest(column, header)}"
            )
        return header.index(column)
    if len(header) == 1 and header[0].isidentifier():
        return 0
    known = [i for i, name in enumerate(header) if name in _COLUMNS or name.endswith(("_tokens", "_length"))]
    if len(known) == 1:
        return known[0]
    raise InputError(
        f"{path}:1: expected one number per line, or a CSV with one column of lengths ({', '.join(_COLUMNS[:3])}, "
        f"..._tokens), found {', '.join(header)[:80]!r}; name the column (--column)"
    )


def _read_array(path: Path) -> Ints:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as an array of numpy: {error}") from None
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or not array.size:
        raise InputError(f"{path}: expected lengths, a list of integers, found {array.dtype} of shape {array.shape}")
    wrong = np.flatnonzero((array < 1) | (array > MAX_LENGTH))
    if wrong.size:
        raise InputError(f"{path}: entry {wrong[0]}: {array[wrong[0]]} is no length of a sequence")
    return np.asarray(array, np.int64)


def sample_lengths(corpus: Ints, num_sequences: int, seed: int, step: int = 0) -> Ints:
    """`num_sequences` lengths of a corpus, each at most once in a batch; the same for the same seed and step.

    InputError when the corpus has fewer.
    """
    if num_sequences > corpus.size:
        raise InputError(f"a batch of {num_sequences} sequences can't be drawn from {corpus.size}; take fewer")
    drawn = np.random.default_rng([seed, step]).choice(corpus.size, num_sequences, replace=False, shuffle=True)
    return np.asarray(corpus[drawn])


def cut_lengths(lengths: Ints, limit: int) -> Ints:
    """Every length cut into pieces of at most `limit` tokens, each a sequence of its own, in order."""
    counts = -(-lengths // limit)
    pieces = np.full(int(counts.sum()), limit, np.int64)
    pieces[np.cumsum(counts) - 1] = lengths - (counts - 1) * limit
    return pieces
