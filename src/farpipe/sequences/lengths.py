"""Lengths of sequences: read from a file, or drawn from a corpus by seed."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from farpipe.errors import InputError
from farpipe.sequences.chunk import Ints
from farpipe.strict import nearest, parse_json, read_text

MAX_LENGTH: Final = 1 << 40
MAX_SEQUENCES: Final = 1 << 26
"""Of a histogram, which could say any number in one line."""
_COLUMNS: Final = ("length", "lengths", "tokens", "num_tokens", "token_count")
_COUNTS: Final = ("count", "counts", "num_sequences")
"""Names of the second column of a histogram."""
_ENDS: Final = ".ends.npy"
"""End of the name of the array beside a file of tokens that says where its documents end."""


def read_lengths(path: Path | str, column: str | None = None) -> Ints:
    """The lengths in a file, in its order: text with one number per line, CSV with a header, JSON lines, .npy.

    A CSV of two columns, lengths and counts, has each length so many times. Files of tokens, .npy or .bin, have the
    lengths of the documents that ``NAME.ends.npy`` beside them tells. `column` names the column of a CSV or JSON lines;
    None: the only one that is called after lengths or tokens. InputError names the line of what is no whole number
    from 1 on.
    """
    path = Path(path)
    ends = path if path.name.endswith(_ENDS) else path.with_suffix(_ENDS)
    is_array = path.suffix in (".npy", ".bin")
    if is_array and column is not None:
        raise InputError(f"{path}: an array has no column {column!r}")
    if is_array and ends.exists():
        return _between(_load(ends), ends)
    if path.suffix == ".npy":
        return _checked(_load(path), path)
    if path.suffix == ".bin":
        raise InputError(f"{path}: a file of tokens is one document unless {ends.name} beside it tells their ends")
    text = read_text(path)
    first = text.lstrip().splitlines()[0].strip()
    if column is None and _is_number(first):
        return _numbers(((n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()), path)
    return _read_json_lines(text, path, column) if first.startswith("{") else _read_csv(text, path, column)


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
    is_histogram = len(header) == 2 and header[1 - place] in _COUNTS
    words, counts = [], []
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise InputError(f"{path}:{rows.line_num}: expected {len(header)} columns, found {len(row)}")
        words.append((rows.line_num, row[place].strip()))
        counts.append(_count(row[1 - place].strip(), f"{path}:{rows.line_num}") if is_histogram else 1)
    if not words:
        raise InputError(f"{path}: there are no rows below the header")
    if not 1 <= sum(counts) <= MAX_SEQUENCES:
        raise InputError(f"{path}: {sum(counts)} sequences; expected 1 to {MAX_SEQUENCES}")
    return np.repeat(_numbers(words, path), counts)


def _count(word: str, place: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < 20):
        raise InputError(f"{place}: expected a number of sequences of this length, found {word[:40]!r}")
    return int(word)


def _read_json_lines(text: str, path: Path, column: str | None) -> Ints:
    """One object a line, all with the key that the first one's keys, as a header, tell."""
    words: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        data = parse_json(line, f"{path}:{number}")
        if not words:
            names = list(data)
            name = names[_column_of(names, path, column)]
        if not isinstance(data, dict) or name not in data:
            raise InputError(f"{path}:{number}: expected an object with the key {name!r}, found {line.strip()[:40]!r}")
        words.append((number, str(data[name])))
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
        f"{path}:1: expected one number per line, or a CSV or JSON lines with one column of lengths "
        f"({', '.join(_COLUMNS[:3])}, ..._tokens), found {', '.join(header)[:80]!r}; name the column (--column)"
    )


def _load(path: Path) -> Ints:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: can't be read as an array of numpy: {error}") from None
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or not array.size:
        raise InputError(f"{path}: expected a list of integers, found {array.dtype} of shape {array.shape}")
    return np.asarray(array, np.int64)


def _checked(array: Ints, path: Path) -> Ints:
    wrong = np.flatnonzero((array < 1) | (array > MAX_LENGTH))
    if wrong.size:
        raise InputError(
            f"{path}: entry {wrong[0]}: {array[wrong[0]]} is no length of a sequence; tokens need an array "
            f"{path.with_suffix(_ENDS).name} of the ends of documents beside them"
        )
    return array


def _between(ends: Ints, path: Path) -> Ints:
    """Lengths of documents that end after so many tokens; empty documents are left out, as in training."""
    lengths = np.diff(ends, prepend=0)
    if lengths.min() < 0 or not lengths.any():
        raise InputError(f"{path}: expected ascending numbers of tokens at which documents end")
    return lengths[lengths > 0]


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
