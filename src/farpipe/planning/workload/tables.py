"""Tables of documents: Parquet, Arrow files and streams, and folders of Hugging Face's `datasets`. Needs pyarrow."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError
from farpipe.core.strict import nearest, parse_json, read_text

TABLES: Final = (".parquet", ".arrow", ".feather")
TOKEN_IDS: Final = "input_ids"
"""Column of documents that are tokens already."""
COUNTED: Final = ("labels", "loss_mask", "completion_mask", "assistant_masks")
"""Columns beside it that say which tokens are trained on: `labels` that are not IGNORED, others that are not 0."""
ATTENDED: Final = "attention_mask"
"""Column beside it that is 0 where a row is filled up to the length of others."""
IGNORED: Final = -100
"""Label of a token that is not trained on."""
_ROWS: Final = 1024
_SPLITS: Final = "dataset_dict.json"
_STATE: Final = "state.json"


def is_table(path: Path) -> bool:
    """True for Parquet and Arrow files, and for folders that `datasets` has saved."""
    if path.is_dir():
        return (path / _STATE).is_file() or (path / _SPLITS).is_file()
    return path.suffix in TABLES


def row_of(path: Path, number: int) -> str:
    """Place of a row in messages, counted as pandas and `datasets` do."""
    return f"{path}: row {number} (from 0)"


def about_chats(names: Sequence[str]) -> str:
    """Advice for columns that are chats; empty for others."""
    is_chat = not {"messages", "conversations"}.isdisjoint(names)
    return "; chats need a template first: save the input_ids that it gives" if is_chat else ""


def table_files(path: Path) -> list[Path]:
    """The files of a table: itself, or those that a folder of `datasets` names; InputError where a split is missing."""
    if not path.is_dir():
        return [path]
    if (path / _SPLITS).is_file():
        splits = parse_json(read_text(path / _SPLITS), str(path / _SPLITS)).get("splits", [])
        if "train" not in splits:
            raise InputError(
                f"{path}: a folder of splits; name one of them: {', '.join(str(path / s) for s in splits)}"
            )
        return table_files(path / "train")
    place = path / _STATE
    state = parse_json(read_text(place), str(place))
    try:
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise InputError(f"{place}: not the state of a data set: no _data_files with filename") from None
    if state.get("_indices_data_files"):
        raise InputError(
            f"{path}: some rows are chosen of its files; save what flatten_indices() of `datasets` returns"
        )
    if not names:
        raise InputError(f"{path}: the data set has no rows")
    return [path / name for name in names]


def column_names(path: Path) -> list[str]:
    """Names of a file's columns; InputError when it is none."""
    with _opened(path) as (names, _):
        return names


def rows(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Parts of a table as record batches of pyarrow, with these columns; InputError where one is missing."""
    with _opened(path) as (names, batches):
        for column in columns:
            if column not in names:
                raise InputError(
                    f"{path}: there is no column {column!r}, only {', '.join(names)}{nearest(column, names)}"
                )
        for batch in batches(list(columns)):
            yield batch.select(list(columns))


def token_rows(path: Path) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_] | None]]:
    """Tokens of every row without padding, and which are trained on (None: all); InputError for no lists of tokens."""
    names = column_names(path)
    beside = next((name for name in COUNTED if name in names), None)
    columns = [TOKEN_IDS, *([beside] if beside else []), *([ATTENDED] if ATTENDED in names else [])]
    number = itertools.count()
    for batch in rows(path, columns):
        for lists in zip(*(_lists(batch, name, path) for name in columns), strict=True):
            row = dict(zip(columns, lists, strict=True))
            part = _unpadded(row, row_of(path, next(number)))
            marks = row[beside][part] != (IGNORED if beside == "labels" else 0) if beside else None
            yield row[TOKEN_IDS][part], marks


def _unpadded(row: dict[str, NDArray[np.int64]], place: str) -> slice:
    """The tokens of a row that are no padding."""
    size = row[TOKEN_IDS].size
    for name, values in row.items():
        if values.size != size:
            raise InputError(f"{place}: {size} tokens, but {values.size} in column {name!r}; save as many of both")
    if ATTENDED not in row:
        return slice(size)
    kept = np.flatnonzero(row[ATTENDED])
    begin, end = (int(kept[0]), int(kept[-1]) + 1) if kept.size else (0, 0)
    if kept.size != end - begin:
        hole = int(np.setdiff1d(np.arange(begin, end), kept)[0])
        raise InputError(
            f"{place}: {ATTENDED} is 0 at token {hole}, between tokens where it is not; padding is at the ends of a "
            f"row: leave such tokens out of {TOKEN_IDS}, or leave out the column"
        )
    return slice(begin, end)


def _lists(batch: Any, name: str, path: Path) -> list[NDArray[np.int64]]:
    """The rows of a column of lists of whole numbers."""
    column = _lists_of(batch, name, path)
    ends = np.concatenate([[0], column.value_lengths().to_numpy(zero_copy_only=False)]).cumsum().astype(np.int64)
    flat = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    return [flat[begin:end] for begin, end in itertools.pairwise(ends)]


def _lists_of(batch: Any, name: str, path: Path) -> Any:
    from pyarrow import types

    column = batch.column(name)
    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type)):
        raise InputError(f"{path}: column {name!r}: expected lists of whole numbers, found {kind}")
    if column.null_count or column.flatten().null_count:
        raise InputError(f"{path}: column {name!r}: a row is empty (null)")
    return column


@contextmanager
def _opened(path: Path) -> Iterator[tuple[list[str], Any]]:
    """(names of columns, function of columns that yields record batches)"""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        raise InputError(f"{path}: tables need pyarrow: pip install 'farpipe[data]'") from None
    try:
        if path.suffix == ".parquet":
            with parquet.ParquetFile(path) as file:
                yield file.schema_arrow.names, lambda columns: file.iter_batches(batch_size=_ROWS, columns=columns)
            return
        with pyarrow.memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = (ipc.open_file if is_file else ipc.open_stream)(file)
            every = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
            yield reader.schema.names, lambda _: every
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not a table of Parquet or Arrow: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None
