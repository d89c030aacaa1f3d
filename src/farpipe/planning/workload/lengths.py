"""Lengths of sequences: read from a file, or drawn from a corpus by seed."""

import csv
import io
import os
import tokenize
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError
from farpipe.core.strict import nearest, parse_json, read_text
from farpipe.planning.workload.chunk import Ints
from farpipe.planning.workload.tables import TOKEN_IDS, about_chats, column_names, is_table, row_of, rows, table_files
from farpipe.planning.workload.token_files import COMPRESSED, INDEX, opened, plain_suffix

MAX_LENGTH: Final = 1 << 40
MAX_SEQUENCES: Final = 1 << 26
"""Largest number of sequences in a histogram, whose counts could be of any size."""
_COLUMNS: Final = ("length", "lengths", "tokens", "num_tokens", "token_count")
_COUNTS: Final = ("count", "counts", "num_sequences")
"""Names of the second column of a histogram."""
_FEW: Final = 256
"""Numbers of which fewer tell too little by their sizes."""
_TOKEN_NAMES: Final = ("token", "corpus", "train", "val", "input_ids", "text", "data")
"""Words in the names of arrays of tokens."""
_SPECIAL: Final = 3
"""Largest number of a special token (padding, begin, end, unknown), and a length that hardly any document has."""
_LONG: Final = 8192
"""Half of the documents of a corpus are hardly longer; half of the numbers of its tokens often are larger."""
UNREADABLE_ARRAYS: Final = (
    *(OSError, ValueError, EOFError, SyntaxError, TypeError, LookupError, ArithmeticError, MemoryError),
    *(tokenize.TokenError, zipfile.BadZipFile),
)
"""Errors of numpy for a file that is no whole array."""
ENDS: Final = ".ends.npy"
"""End of the name of the array with the ends of the documents of a file of tokens."""
COUNTED: Final = ".counted.npy"
"""End of the name of the array that marks the tokens of a file that are trained on."""
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

    A CSV of two columns, lengths and counts, has each length so many times. An array ``NAME.ends.npy`` has the ends of
    documents. Tables are Parquet, Arrow and folders of `datasets`. Text may be compressed.
    `column` names the column of a CSV, JSON lines or a table; None: the only one that is called after lengths or
    tokens. ``length`` says of an array that looks like tokens that it has lengths. InputError names the line or row of
    what is no whole number from 1 on.
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


def has_documents(path: Path, key: str) -> bool:
    """True if a file has documents, tokens or texts under `key`, as what is trained on, rather than their lengths."""
    if path.suffix == ".npy":
        return any(path.with_suffix(end).exists() for end in (ENDS, COUNTED))
    if path.suffix in (".bin", INDEX) or (path.is_dir() and not is_table(path)):
        return True
    names = _names(path)
    if key in names:
        return not _columns(names)
    return is_table(path) and TOKEN_IDS in names


def _names(path: Path) -> list[str]:
    """Columns of a table, or keys of the first of JSON lines; none where a file is neither."""
    if is_table(path) and path.exists():
        return column_names(table_files(path)[0])
    if plain_suffix(path) not in (".jsonl", ".ndjson") or not path.is_file():
        return []
    with opened(path) as file:
        first = next((line for line in file if line.strip()), b"")
    data = parse_json(first.decode(errors="replace"), f"{path}:1") if first else None
    return list(data) if isinstance(data, dict) else []


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
    """Lengths in the named column, or in the only one that is called after lengths."""
    files = table_files(path)
    names = column_names(files[0])
    name = names[_column_of(names, path, column)]
    found = np.concatenate([np.empty(0, np.int64), *(part for file in files for part in _numbers_in(file, name))])
    if not found.size:
        raise InputError(f"{path}: there are no rows; name a table that has some")
    return found


def _numbers_in(path: Path, name: str) -> Iterator[Ints]:
    """Parts of a column of lengths."""
    first = 0
    for batch in rows(path, [name]):
        column = batch.column(0)
        if column.null_count:
            row = row_of(path, first + column.is_null().to_pylist().index(True))
            raise InputError(f"{row}: column {name!r}: there is no length (null); leave out such rows")
        numbers = column.to_numpy(zero_copy_only=False)
        if not np.issubdtype(numbers.dtype, np.integer):
            raise InputError(f"{path}: column {name!r}: expected whole numbers of tokens, found {column.type}")
        if (wrong := _no_lengths(numbers)).size:
            row = row_of(path, first + int(wrong[0]))
            raise InputError(f"{row}: column {name!r}: {_problem(int(numbers[wrong[0]]))}")
        first += numbers.size
        yield numbers.astype(np.int64)


def _read_array(path: Path, column: str | None) -> Ints:
    if column not in (None, *_COLUMNS[:2]):
        raise InputError(f"{path}: an array has no column {column!r}; --column length says that it is one of lengths")
    array = _load(path)
    if path.name.endswith(ENDS):
        return _between(array, path)
    if column is None and len(signs := _signs_of_tokens(array, path.name)) > 1:
        raise InputError(
            f"{path}: lengths of sequences, or the tokens of a corpus? {', '.join(signs)}. Lengths: say so with "
            f"--column length. Tokens: put an array {path.with_suffix(ENDS).name} of the ends of documents beside them"
        )
    if (wrong := _no_lengths(array)).size:
        raise InputError(
            f"{path}: entry {wrong[0]}: {_problem(int(array[wrong[0]]))}; tokens need an array "
            f"{path.with_suffix(ENDS).name} of the ends of documents beside them"
        )
    return array.astype(np.int64)


def _signs_of_tokens(array: NDArray[np.integer], name: str) -> list[str]:
    """Signs by which an array looks like tokens, in words; none where its name says lengths."""
    word = name.lower()
    sample = array[: 1 << 20]
    signs = {
        f"its numbers are {array.dtype}, as tokens are kept": array.dtype in (np.uint16, np.uint32),
        "its name speaks of tokens": any(one in word for one in _TOKEN_NAMES),
        f"it has numbers up to {_SPECIAL}, as special tokens have": sample.size >= _FEW
        and int(sample.min()) <= _SPECIAL,
        f"half of its numbers are above {_LONG:,}": sample.size >= _FEW and float(np.median(sample)) > _LONG,
    }
    return [] if "len" in word else [sign for sign, is_there in signs.items() if is_there]


def _no_lengths(numbers: NDArray[np.integer]) -> Ints:
    """Places of what can't be lengths."""
    return np.flatnonzero((numbers < 1) | (numbers > MAX_LENGTH))


def _problem(length: int) -> str:
    return f"{length} is no length of a sequence: expected 1 to {MAX_LENGTH} tokens"


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
        f"{_expected(path)}, found {', '.join(header)[:80]!r}; name the column (--column){about_chats(header)}"
    )


def _expected(path: Path) -> str:
    """Place and words for what a file may have, by its name."""
    lengths = f"one column of lengths ({', '.join(_COLUMNS[:3])}, ..._tokens)"
    if is_table(path):
        return f"{path}: expected {lengths}, of texts ('text', or data.text_key of --job) or of tokens ({TOKEN_IDS!r})"
    if plain_suffix(path) in (".jsonl", ".ndjson"):
        return f"{path}:1: expected {lengths}, or of texts ('text', or data.text_key of --job)"
    return f"{path}:1: expected one number per line, or a CSV or JSON lines with {lengths}"


def _columns(header: list[str]) -> list[int]:
    return [i for i, name in enumerate(header) if name in _COLUMNS or name.endswith(("_tokens", "_length"))]


def _load(path: Path) -> NDArray[np.integer]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except UNREADABLE_ARRAYS as error:
        raise InputError(f"{path}: can't be read as an array of numpy: {error}") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: expected one list of integers, found an archive of arrays")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or not array.size:
        raise InputError(f"{path}: expected a list of integers, found {array.dtype} of shape {array.shape}")
    return array


def _between(ends: NDArray[np.integer], path: Path) -> Ints:
    """Lengths of documents that end after so many tokens; empty documents are left out, as in training."""
    if (most := int(ends.max())) > np.iinfo(np.int64).max:
        raise InputError(f"{path}: entry {int(ends.argmax())}: {most} can't be a number of tokens")
    lengths = np.asarray(np.diff(ends.astype(np.int64), prepend=0), np.int64)
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
