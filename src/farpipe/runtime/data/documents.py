"""Documents: the pieces of text in the files that the user names, one after the other, never all at once."""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from farpipe.errors import InputError
from farpipe.spec import Data

Form = Literal["text", "jsonl", "parquet", "tokens"]

MAX_PIECE_CHARS: Final = 1 << 20
"""Longer texts are cut, at the end of a line where there is one, so that no tokenizer has to swallow a whole file."""
_ENDINGS: Final[dict[str, Form]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".npy": "tokens",
    ".bin": "tokens",
}
_ROWS: Final = 1024


def source_files(data: Data) -> list[Path]:
    """The files of ``data.source`` in order of their names; InputError when there are none."""
    if data.source == "stdlib":
        path = Path(sysconfig.get_path("stdlib"))
        files = sorted(path.glob("*.py"))
    else:
        path = Path(data.source)
        files = sorted(_visible_files(path)) if path.is_dir() else [path]
    if not path.exists():
        raise InputError(f'data.source: there is no file or folder {data.source!r}; "stdlib" is always there')
    if form_of(data, files) == "tokens":
        files = [file for file in files if file.suffix in (".npy", ".bin") and not file.name.endswith(".ends.npy")]
        if not files:
            raise InputError(f"data.source: {str(path)!r}: tokens are in files that end in .npy or .bin")
    if not files:
        raise InputError(f"data.source: the folder {str(path)!r} has no files in it")
    return files


def form_of(data: Data, files: list[Path]) -> Form:
    """Return the format of the files; InputError if their names don't agree on it."""
    if data.format != "auto":
        return data.format
    forms: dict[Form, Path] = {}
    for file in files:
        forms.setdefault(_ENDINGS.get(file.suffix, "text"), file)
    if "tokens" in forms and all(file.suffix in (".npy", ".bin", ".json") for file in files):
        return "tokens"
    if len(forms) > 1:
        (one, a), (other, b), *_ = forms.items()
        raise InputError(f"data.source: {a} is {one}, but {b} is {other}; give data.format, or a folder of one kind")
    return next(iter(forms), "text")


def documents(data: Data, files: list[Path]) -> Iterator[str]:
    """The texts of all files; InputError names the file and line that can't be read."""
    form = form_of(data, files)
    for file in files:
        if form == "jsonl":
            yield from _json_lines(file, data.text_key)
        elif form == "parquet":
            yield from _parquet_rows(file, data.text_key)
        else:
            yield read_whole(file).decode("utf-8")


def pieces(document: str) -> Iterator[str]:
    """The document in pieces that are not too long."""
    start = 0
    while len(document) - start > MAX_PIECE_CHARS:
        end = document.rfind("\n", start, start + MAX_PIECE_CHARS) + 1 or start + MAX_PIECE_CHARS
        yield document[start:end]
        start = end
    yield document[start:]


def read_whole(path: Path) -> bytes:
    """The file, which must be UTF-8 text."""
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"data.source: {path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise unreadable(path, error) from None
    return text


def _visible_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def unreadable(path: Path, error: OSError) -> InputError:
    """Error for a file of ``data.source`` that can't be read."""
    return InputError(f"data.source: {path}: can't be read: {error.strerror or error}")


def _json_lines(path: Path, key: str) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_of(_parse(line, path, number), key, f"{path}:{number}")
    except OSError as error:
        raise unreadable(path, error) from None


def _parse(line: bytes, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"data.source: {path}:{number}: not JSON: {error}") from None


def _text_of(row: Any, key: str, place: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(key), str):
        found = "no object" if not isinstance(row, dict) else f"keys {', '.join(map(repr, row))}"
        raise InputError(f"data.source: {place}: expected an object with text under {key!r} (data.text_key): {found}")
    return str(row[key])


def _parquet_rows(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError("data.format: parquet needs pyarrow: pip install 'farpipe[data]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                known = ", ".join(file.schema_arrow.names)
                raise InputError(f"data.source: {path}: there is no column {column!r} (data.text_key), only {known}")
            for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
                yield from (_text_of(row, column, str(path)) for row in batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise InputError(f"data.source: {path}: not a parquet file: {error}") from None
    except OSError as error:
        raise unreadable(path, error) from None
