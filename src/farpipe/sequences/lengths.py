"""Lengths of sequences: read from a file or a data set, or drawn from a corpus by seed."""

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from farpipe.errors import InputError
from farpipe.sequences.chunk import Ints
from farpipe.sequences.tables import TOKEN_IDS, column_names, is_table, rows, table_files, token_counts
from farpipe.sequences.token_files import COMPRESSED, INDEX, expect_whole, opened, plain_suffix, read_index
from farpipe.strict import expect_format, nearest, parse_json, read_text

MAX_LENGTH: Final = 1 << 40
MAX_SEQUENCES: Final = 1 << 26
"""Largest number of sequences in a histogram, whose counts could be of any size."""
_COLUMNS: Final = ("length", "lengths", "tokens", "num_tokens", "token_count")
_COUNTS: Final = ("count", "counts", "num_sequences")
"""Names of the second column of a histogram."""
_ENDS: Final = ".ends.npy"
"""End of the name of the array with the ends of the documents of a file of tokens."""
_TOKENS: Final = "farpipe/tokens/1"
"""Format of the header file of a .bin of tokens."""
_BINARY: Final = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\xff\xff\xff\xff": "Arrow",
    b"\x1f\x8b": "gzip",
    b"PK\3\4": "zip",
}
"""First bytes of tables and archives."""


def read_lengths(path: Path | str, column: str | None = None) -> Ints:
    """The lengths in a file, in its order: text with one number per line, CSV with a header, JSON lines, .npy, tables.

    A CSV of two columns, lengths and counts, has each length so many times. Files of tokens, .npy or .bin, have the
    lengths of the documents whose ends are in ``NAME.ends.npy`` or in the .idx of Megatron-LM. Tables are Parquet,
    Arrow and folders of `datasets`, with a column of lengths or of lists of tokens (``input_ids``). Text may be
    compressed.
    `column` names the column of a CSV, JSON lines or a table; None: the only one that is called after lengths or
    tokens. InputError names the line of what is no whole number from 1 on.
    """
    path = Path(path)
    if path.suffix in (".npy", ".bin", INDEX):
        return _read_array(path, column)
    if is_table(path):
        return _read_table(path, column)
    text = _text_of(path)
    first = text.lstrip().splitlines()[0].strip()
    if column is None and _is_number(first):
        return _numbers(((n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()), path)
    return _read_json_lines(text, path, column) if first.startswith("{") else _read_csv(text, path, column)


def has_texts(path: Path, key: str) -> bool:
    """True if the first row of JSON lines or a table has a text under `key`, as what is trained on, and no length."""
    if is_table(path) and path.exists():
        names = column_names(table_files(path)[0])
        return key in names and TOKEN_IDS not in names and not _columns(names)
    if plain_suffix(path) not in (".jsonl", ".ndjson") or not path.is_file():
        return False
    with opened(path) as file:
        first = next((line for line in file if line.strip()), b"")
    data = parse_json(first.decode(errors="replace"), f"{path}:1") if first else None
    return isinstance(data, dict) and isinstance(data.get(key), str) and not _columns(list(data))


def _text_of(path: Path) -> str:
    """The text of a file, decompressed; InputError as for `read_text`, and for tables under other names."""
    if path.suffix not in COMPRESSED or not path.is_file():
        _expect_text(path)
        return read_text(path)
    try:
        with opened(path) as file:
            text = file.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None
    if not text.strip():
        raise InputError(f"{path}: the file is empty")
    return text


def _read_table(path: Path, column: str | None) -> Ints:
    """Lengths in the named column, in the only one that is called after lengths, or of the lists of tokens."""
    files = table_files(path)
    names = column_names(files[0])
    if column is None and TOKEN_IDS in names and not _columns(names):
        found = np.concatenate([token_counts(file) for file in files])
        found = found[found > 0]
    else:
        name = names[_column_of(names, path, column)]
        found = np.concatenate([_whole(batch, name, file) for file in files for batch in rows(file, [name])])
    if not found.size:
        raise InputError(f"{path}: there are no rows with tokens")
    return _checked(found, path)


def _whole(batch: Any, name: str, path: Path) -> Ints:
    """A column of whole numbers."""
    column = batch.column(0).to_numpy(zero_copy_only=False)
    if not np.issubdtype(column.dtype, np.integer):
        raise InputError(f"{path}: column {name!r}: expected whole numbers of tokens, found {batch.column(0).type}")
    return np.asarray(column, np.int64)


def _read_array(path: Path, column: str | None) -> Ints:
    if column is not None:
        raise InputError(f"{path}: an array has no column {column!r}")
    ends = path if path.name.endswith(_ENDS) else path.with_suffix(_ENDS)
    if ends.exists() and path.suffix != INDEX:
        return _between(_load(ends), ends)
    if path.suffix == INDEX or (path.suffix == ".bin" and path.with_suffix(INDEX).exists()):
        index = read_index(path.with_suffix(INDEX))
        expect_whole(index, path.with_suffix(".bin"))
        return _between(index.ends, path.with_suffix(INDEX))
    if path.suffix == ".bin":
        raise InputError(
            f"{path}: a file of tokens is one document unless {ends.name} or Megatron-LM's .idx beside it has its ends"
        )
    return _checked(_load(path), path)


def _expect_text(path: Path) -> None:
    """InputError that names what a table or an archive is; files that can't be opened are left to `read_text`."""
    if not path.is_file() or not os.access(path, os.R_OK):
        return
    with path.open("rb") as file:
        head = file.read(max(map(len, _BINARY)))
    for magic, kind in _BINARY.items():
        if head.startswith(magic):
            raise InputError(
                f"{path}: lengths can't be read from {kind}; write its column of lengths as CSV or text, or name the "
                "file *.parquet, *.arrow, *.gz"
            )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


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
    """One object a line, all with the key that is chosen from the first one's keys."""
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
    known = _columns(header)
    if len(known) == 1:
        return known[0]
    raise InputError(
        f"{path}:1: expected one number per line, or a CSV or JSON lines with one column of lengths "
        f"({', '.join(_COLUMNS[:3])}, ..._tokens), found {', '.join(header)[:80]!r}; name the column (--column)"
    )


def _columns(header: list[str]) -> list[int]:
    return [i for i, name in enumerate(header) if name in _COLUMNS or name.endswith(("_tokens", "_length"))]


def _load(path: Path) -> Ints:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: can't be read as an array of numpy: {error}") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: expected one list of integers, found an archive of arrays")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or not array.size:
        raise InputError(f"{path}: expected a list of integers, found {array.dtype} of shape {array.shape}")
    if (most := int(array.max())) > np.iinfo(np.int64).max:
        raise InputError(f"{path}: entry {int(array.argmax())}: {most} can't be a number of tokens")
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
    if lengths.min(initial=0) < 0 or not lengths.any():
        raise InputError(f"{path}: expected ascending numbers of tokens at which documents end")
    num_tokens = _num_tokens(path)
    if num_tokens not in (None, ends[-1]):
        raise InputError(
            f"{path}: the last document ends at token {ends[-1]}, and the file of tokens has {num_tokens}; write the "
            "ends of these tokens"
        )
    return lengths[lengths > 0]


def _num_tokens(ends: Path) -> int | None:
    """Tokens of the file that `ends` lies beside; None where no array or header says it."""
    name = ends.name.removesuffix(_ENDS)
    array, header = ends.with_name(f"{name}.npy"), ends.with_name(f"{name}.json")
    if array.exists():
        return int(_load(array).size)
    if header.exists():
        return expect_format(parse_json(read_text(header), str(header)), _TOKENS, str(header)).get("num_tokens")
    return None


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
