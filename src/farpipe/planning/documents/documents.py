"""Documents: the texts in the files that the user names and their tokens, one after the other, never all at once."""

import hashlib
import itertools
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError
from farpipe.core.spec import Data
from farpipe.core.strict import nearest, read_text
from farpipe.planning.workload.lengths import COUNTED, ENDS
from farpipe.planning.workload.tables import (
    TOKEN_IDS,
    about_chats,
    column_names,
    is_table,
    row_of,
    rows,
    table_files,
    token_rows,
)
from farpipe.planning.workload.token_files import INDEX, opened, plain_suffix

Form = Literal["text", "jsonl", "parquet", "arrow", "tokens"]

MAX_PIECE_CHARS: Final = 1 << 20
"""Longer texts are cut, at the end of a line where there is one, so that no tokenizer has to swallow a whole file."""
_ENDINGS: Final[dict[str, Form]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".npy": "tokens",
    ".bin": "tokens",
    ".idx": "tokens",
}
NUM_BYTES: Final = 256
BETWEEN_TEXTS: Final = b"\n\n"
_PIECES_AT_ONCE: Final = 256


def source_files(data: Data) -> list[Path]:
    """The files of ``data.source`` in order of their names; InputError when there are none."""
    if data.source == "stdlib":
        path = Path(sysconfig.get_path("stdlib"))
        files = sorted(path.glob("*.py"))
    else:
        path = Path(data.source)
        path = path.with_suffix(".bin") if path.suffix == INDEX else path
        files = [path]
        if path.is_dir():
            files = table_files(path) if is_table(path) else sorted(_visible_files(path))
    if not path.exists():
        raise InputError(f'data.source: there is no file or folder {str(path)!r}; "stdlib" is always there')
    if form_of(data, files) == "tokens":
        files = [file for file in files if file.suffix in (".npy", ".bin") and not file.name.endswith((ENDS, COUNTED))]
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
        forms.setdefault(_ENDINGS.get(plain_suffix(file), "text"), file)
    if "tokens" in forms and all(file.suffix in (".npy", ".bin", ".json", INDEX) for file in files):
        return "tokens"
    if len(forms) > 1:
        (one, a), (other, b), *_ = forms.items()
        raise InputError(f"data.source: {a} is {one}, but {b} is {other}; give data.format, or a folder of one kind")
    return next(iter(forms), "text")


class TrainingText(NamedTuple):
    """A text to train on, and one before it that is only read."""

    text: str
    prompt: str = ""


def documents(data: Data, files: list[Path]) -> Iterator[TrainingText]:
    """The texts of all files; InputError names the file and line that can't be read."""
    form = form_of(data, files)
    for file in files:
        if form == "jsonl":
            yield from _json_lines(file, data)
        elif form in ("parquet", "arrow"):
            yield from _table_rows(file, data)
        else:
            yield TrainingText(read_whole(file).decode("utf-8"))


def is_text(data: Data) -> bool:
    """True if what ``data.source`` has is text, which a tokenizer turns into tokens."""
    files = source_files(data)
    return form_of(data, files) != "tokens" and not has_tokens(data, files)


def has_tokens(data: Data, files: list[Path]) -> bool:
    """True for tables without the column of texts and with one of tokens."""
    if form_of(data, files) not in ("parquet", "arrow"):
        return False
    names = column_names(files[0])
    return data.text_key not in names and TOKEN_IDS in names


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
        with opened(path) as file:
            text = file.read()
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


def _json_lines(path: Path, data: Data) -> Iterator[TrainingText]:
    try:
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _document(_parse(line, path, number), data, f"{path}:{number}")
    except OSError as error:
        raise unreadable(path, error) from None


def _parse(line: bytes, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"data.source: {path}:{number}: not JSON: {error}") from None


def _document(row: Any, data: Data, place: str) -> TrainingText:
    prompt = "" if data.prompt_key is None else _text_of(row, data.prompt_key, "prompt_key", place)
    return TrainingText(_text_of(row, data.text_key, "text_key", place), prompt)


def _text_of(row: Any, key: str, setting: str, place: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(key), str):
        raise InputError(
            f"data.source: {place}: expected an object with text under {key!r} (data.{setting}): {_instead(row, key)}"
        )
    return str(row[key])


def _instead(row: Any, key: str) -> str:
    """Words for a row without a text under `key`."""
    if not isinstance(row, dict):
        return "no object"
    if key not in row:
        return f"keys {', '.join(map(repr, row))}{about_chats([*row])}"
    if row[key] is None:
        return "there is none (null); leave out such rows"
    return f"found {repr(row[key])[:40]}, which is no text; name another key"


def _table_rows(path: Path, data: Data) -> Iterator[TrainingText]:
    columns = {data.text_key: "text_key"} | ({} if data.prompt_key is None else {data.prompt_key: "prompt_key"})
    names = column_names(path)
    for key, setting in columns.items():
        if key not in names:
            raise InputError(
                f"data.source: {path}: there is no column {key!r} (data.{setting}), only {', '.join(names)}"
                f"{nearest(key, names)}; name the column of texts, or save tokens as {TOKEN_IDS!r}{about_chats(names)}"
            )
    number = itertools.count()
    for batch in rows(path, [*columns]):
        yield from (_document(row, data, row_of(path, next(number))) for row in batch.to_pylist())


class Encoded(NamedTuple):
    """Tokens in order, whether a document ends behind them, and which are trained on."""

    tokens: NDArray[Any]
    is_end: bool
    counted: NDArray[np.bool_] | bool = True


class TokenRows:
    """Documents that are tokens already: the column ``input_ids`` of tables."""

    key, vocab_size, dtype = f"{TOKEN_IDS} without padding", 0, np.dtype("uint32")
    """Vocabulary: at least that many; the greatest token tells."""

    def encoded(self, files: Iterable[Path]) -> Iterator[Encoded]:
        """The rows of all files; InputError for numbers that are no tokens."""
        for file in files:
            for tokens, counted in token_rows(file):
                if tokens.size and not 0 <= tokens.min() <= tokens.max() < 1 << 32:
                    raise InputError(f"data.source: {file}: column {TOKEN_IDS!r}: {tokens.min()} to {tokens.max()}")
                yield Encoded(tokens.astype(self.dtype), True, True if counted is None else counted)


class ByteTokenizer:
    """One token per byte."""

    key, vocab_size, dtype = "bytes", NUM_BYTES, np.dtype("uint8")

    def encoded(self, documents: Iterable[TrainingText]) -> Iterator[Encoded]:
        """The bytes of all texts, with an empty line behind each but the last."""
        for number, document in enumerate(documents):
            if number:
                yield Encoded(np.frombuffer(BETWEEN_TEXTS, np.uint8), True)
            if document.prompt:
                yield Encoded(np.frombuffer(document.prompt.encode(), np.uint8), False, False)
            yield Encoded(np.frombuffer(document.text.encode(), np.uint8), False)


class LearnedTokenizer:
    """A tokenizer.json of the tokenizers library."""

    def __init__(self, data: Data) -> None:
        """InputError when the file is missing or damaged, or the library is."""
        path = Path(data.tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        text = read_text(path)
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InputError("data.tokenizer: needs the tokenizers library: pip install 'farpipe[data]'") from None
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises Exception itself
            raise InputError(f"data.tokenizer: {path}: not a tokenizer: {error}") from None
        self._end = None if data.end_of_text is None else self._tokenizer.token_to_id(data.end_of_text)
        if data.end_of_text is not None and self._end is None:
            raise InputError(f"data.end_of_text: {path} has no token {data.end_of_text!r}")
        self.key = f"{hashlib.sha256(text.encode()).hexdigest()} {self._end}"
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self.dtype = np.dtype("uint16" if self.vocab_size <= 1 << 16 else "uint32")

    def encoded(self, documents: Iterable[TrainingText]) -> Iterator[Encoded]:
        """The tokens of all texts, with the end of text behind each document."""
        marked = _marked(documents)
        while group := [*itertools.islice(marked, _PIECES_AT_ONCE)]:
            batch = self._tokenizer.encode_batch([piece.text for piece in group], add_special_tokens=False)
            for found, piece in zip(batch, group, strict=True):
                ends = [self._end] if piece.is_last and self._end is not None else []
                yield Encoded(np.array([*found.ids, *ends], self.dtype), piece.is_last, piece.is_counted)


class _Piece(NamedTuple):
    text: str
    is_last: bool
    """True if the document ends behind it."""
    is_counted: bool


def _marked(documents: Iterable[TrainingText]) -> Iterator[_Piece]:
    """The texts and prompts in pieces."""
    for document in documents:
        if document.prompt:
            yield from (_Piece(piece, False, False) for piece in pieces(document.prompt))
        *before, last = pieces(document.text)
        yield from (_Piece(piece, False, True) for piece in before)
        yield _Piece(last, True, True)
