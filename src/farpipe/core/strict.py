"""Strict reading of the files that people and programs exchange.

Every failure is an InputError that names the source, the key path, the value and, where there is one, the
nearest good word. Nothing unknown is accepted and nothing is guessed.
"""

import csv
import difflib
import glob
import io
import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, time, tzinfo
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from farpipe.core.errors import InputError, RunError

MAX_FILE_BYTES = 1 << 30
_KINDS = re.compile(r"literal\[.*|bool|int|str|float", re.DOTALL)
_MESSAGES = {  # the class behind a table means nothing to the user
    **dict.fromkeys(("model_type", "dict_type"), "expected a table"),
    **dict.fromkeys(("tuple_type", "list_type"), "expected a list"),
    "too_short": "expected {min_length} or more entries",
    "too_long": "expected {max_length} entries",
}

ModelType = TypeVar("ModelType", bound=BaseModel)


def nearest(word: str, words: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest of `words`, or an empty string when none is close.

    A word that begins with another letter has to be closer than one that begins with the same.
    """
    by_lower = {known.lower(): known for known in words}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.75) or difflib.get_close_matches(
        word.lower(), [known for known in by_lower if known[:1] == word[:1].lower()], n=1, cutoff=0.6
    )
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def seen_from(folder: Path, name: str) -> Path:
    """The file `name` in `folder`, which a document there names; or else the one seen from where farpipe runs."""
    with suppress(OSError, ValueError):  # what is not a path at all is reported when it is read
        if Path(name).is_file() and not (folder / name).is_file():
            return Path(name)
    return folder / name


def read_text(path: Path | str) -> str:
    """The file's text; InputError when it is missing, no plain file, too large, empty or not UTF-8."""
    try:
        path = Path(path)
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe could keep us waiting for ever
            raise InputError(f"{path}: not a plain file")
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; this can't be one of farpipe's files")
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")  # some editors put this mark first
    except UnicodeDecodeError as error:
        advice = "unpack it (gunzip)" if error.object.startswith(b"\x1f\x8b") else "save the file as UTF-8"
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); {advice}") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None
    except (ValueError, TypeError) as error:  # a NUL in the path, or no path at all
        raise InputError(f"{str(path)!r}: can't be read: {error}") from None
    if not text.strip():
        raise InputError(f"{path}: the file is empty")
    return text


def read_csv(path: Path | str, delimiter: str = ",") -> tuple[list[str], Iterator[tuple[str, dict[str, str]]]]:
    """Column names of a CSV, and its rows, each with its place; quotes mean nothing in one with bars.

    InputError for a column that is there twice and for a row with another number of cells.
    """
    table = _csv_table(path, delimiter)
    _, names = next(table)
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path}: line 1: column {twice[0]!r} appears twice")

    def rows() -> Iterator[tuple[str, dict[str, str]]]:
        for line, cells in table:
            place = f"{path}: line {line}"
            if len(cells) != len(names):
                raise InputError(f"{place}: expected {len(names)} columns, found {len(cells)}")
            yield place, dict(zip(names, cells, strict=True))

    return names, rows()


def as_utc(text: str, place: str, zone: tzinfo | None = UTC) -> datetime:
    """The moment that `text` (ISO 8601) names, in UTC; one that names no zone is of `zone`, or an InputError."""
    try:
        found = datetime.fromisoformat(text.strip())
        if found.tzinfo is None and zone is None:
            raise InputError(f"{place}: {text[:40]!r} has no time zone; export times with their offset from UTC")
        return (found if found.tzinfo else found.replace(tzinfo=zone)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InputError(f'{place}: expected a time such as "2024-01-31T12:00:00", found {text[:40]!r}') from None


def _csv_table(path: Path | str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Lines that are not empty, each with its number and its cells without blanks around them."""
    bars = delimiter == "|"
    lines = csv.reader(
        io.StringIO(read_text(path)), delimiter=delimiter, quoting=csv.QUOTE_NONE if bars else csv.QUOTE_MINIMAL
    )
    try:
        for cells in filter(None, lines):
            yield lines.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise InputError(f"{path}: line {lines.line_num}: not CSV: {error}") from None


def write_text(path: Path | str, text: str, *, private: bool = False) -> None:
    """Write `text` in UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"), private=private)


def write_bytes(path: Path | str, data: bytes | memoryview, *, private: bool = False) -> None:
    """Write `data` so that the file is there whole or not at all; to a device or a pipe it is written straight.

    A `private` file can be read by its owner only, from the first moment on, and so can a folder made for it.
    Raises RunError when the disk is full or the place can't be written; what stood there before stays.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
        else:
            _write_whole(path, data, private=private)
    except FileExistsError:
        raise RunError(f"{path}: can't be written: {path.parent} is not a directory") from None
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror or error}") from None


def remove_unfinished(path: Path) -> None:
    """Delete leftovers of processes that were killed while they wrote `path`; only while no process writes it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}"):
        with suppress(OSError):
            left.unlink()


def _write_whole(path: Path, data: bytes | memoryview, *, private: bool) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o600 if private else 0o644)
        temporary.replace(path)
        temporary = None
    finally:
        if temporary is not None:  # also after Ctrl-C
            temporary.unlink(missing_ok=True)


@contextmanager
def shaped(source: str, kind: str) -> Iterator[None]:
    """InputError in place of what a reader raises whose file looks like `kind`, but has something else in a place."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{source}: looks like {kind}, but has a different structure: {error!r:.120}") from None


def parse_json(text: str, source: str) -> Any:
    """The JSON value in `text`; NaN, infinities and repeated keys are errors as well."""

    def reject_constant(name: str) -> NoReturn:
        raise InputError(f"{source}: {name} is not a number in JSON")

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            seen: set[str] = set()
            double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InputError(f"{source}: key {double!r} is given twice")
        return data

    with _as_input_errors(source):
        try:
            return json.loads(text, parse_constant=reject_constant, object_pairs_hook=unique_keys)
        except json.JSONDecodeError as error:
            raise InputError(f"{source}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The TOML table in `text`."""
    with _as_input_errors(source):
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            hint = _json_hint(text) if text.lstrip().startswith("{") else ""
            if "twice" in str(error):
                hint = "; only tables of a list may repeat, in double brackets: [[cluster.sites]]"
            raise InputError(f"{source}: not TOML: {error}{hint}") from None


def _json_hint(text: str) -> str:
    found = re.search(r'"format": *"farpipe/(\w+)/', text[:300])
    shown = ", which `farpipe simulate` shows" if found and found[1] == "plan" else ""
    return f"; it is a {found[1]} of farpipe{shown}" if found else "; it looks like JSON"


@contextmanager
def _as_input_errors(source: str) -> Iterator[None]:
    """InputError in place of what parsers raise besides their own errors."""
    try:
        yield
    except RecursionError:
        raise InputError(f"{source}: nested too deeply") from None
    except ValueError as error:  # integers of thousands of digits
        raise InputError(f"{source}: {error}") from None


def expect_format(data: Any, name: str, source: str) -> dict[str, Any]:
    """`data` without its ``format`` key, which must be `name`."""
    if not isinstance(data, dict):
        raise InputError(f'{source}: expected an object with "format": "{name}", found {show(data)}')
    if data.get("format") != name:
        raise InputError(f"{source}: format: expected {name!r}, found {show(data.get('format'))}")
    return {key: value for key, value in data.items() if key != "format"}


def validate(model: type[ModelType], data: Any, source: str, prefix: str = "", toml: str = "") -> ModelType:
    """`data` as a `model`; the first thing that is wrong becomes an InputError with its key path.

    Where `toml` is given, the text that `data` was read from, the error ends with the line in it.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        line = toml_line(toml, _most_telling(error)["loc"])
        raise InputError(explain(model, error, source, prefix) + (f" (line {line})" if line else "")) from None


def toml_line(text: str, location: Sequence[int | str]) -> int:
    """Number of the line of a TOML text on which the value at `location` begins, or else the innermost table around
    it; 0: nowhere. Lines count from 1.
    """
    found, deepest = 0, 0
    table: tuple[int | str, ...] = ()
    last_index: dict[tuple[int | str, ...], int] = {}
    for number, statement in _toml_statements(text):
        data = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            table, depth = _toml_table(data, last_index), 0
        else:
            depth = _depth(data, location[len(table) :])
        if location[: len(table)] == table and len(table) + depth > deepest:
            found, deepest = number, len(table) + depth
    return found


def _toml_statements(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every header and every key with its value, whether on one line or on several."""
    begin, statement = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        begin, statement = (begin, f"{statement}\n{line}") if statement else (number, line)
        with suppress(tomllib.TOMLDecodeError):
            if tomllib.loads(statement):
                yield begin, statement
            statement = ""


def _toml_table(header: dict[str, Any], last_index: dict[tuple[int | str, ...], int]) -> tuple[int | str, ...]:
    """The location of the table that begins at `header`, itself read as TOML; lists of tables are counted."""
    path: tuple[int | str, ...] = ()
    inner: Any = header
    while inner:
        ((key, inner),) = inner.items()
        path = (*path, key)
        if isinstance(inner, list):
            inner, last_index[path] = inner[0], last_index.get(path, -1) + 1
        if path in last_index:
            path = (*path, last_index[path])
    return path


def _depth(data: Any, location: Sequence[int | str]) -> int:
    """Number of the keys of `location`, from the first on, that lead into `data`."""
    for depth, key in enumerate(location):
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return depth
    return len(location)


def explain(model: type[BaseModel], error: ValidationError, source: str, prefix: str = "") -> str:
    """The first thing that is wrong by `error`, with its place in `source`."""
    first = _most_telling(error)
    location = first["loc"]
    if location[-1:] == ("[key]",) and first["type"] != "extra_forbidden":
        location = location[:-1]  # pydantic's mark for an error in the key itself, which precedes it
    expected = str(first["msg"])
    if location and _KINDS.fullmatch(str(location[-1])):  # its mark for one kind of a value that may be of several
        location = location[:-1]
        messages = [str(e["msg"]) for e in error.errors(include_url=False) if e["loc"][:-1] == location]
        expected = " or ".join([messages[0], *(text.removeprefix("Input should be ") for text in messages[1:])])
    path = key_path([prefix, *location] if prefix else location)
    place = f"{source}: {path}" if path else source
    if first["type"] == "extra_forbidden":
        known = _known_keys(model, first["loc"][:-1])
        hint = nearest(str(first["loc"][-1]), known) or f"; known here: {', '.join(sorted(known))}"
        return f"{place}: unknown key{hint}"
    if first["type"] == "missing":
        return f"{place}: missing"
    message = expected.removeprefix("Value error, ")
    if first["type"] in _MESSAGES:
        message = _MESSAGES[first["type"]].format(**first.get("ctx", {}))
    if first["type"] == "value_error":  # our own validators show the value where it helps, and may begin with a name
        return f"{place}: {message}"
    message = message[:1].lower() + message[1:]
    return f"{place}: {message}, found {show(first['input'])}"


def _most_telling(error: ValidationError) -> Any:
    """A misspelt key often also leaves the right one missing: the misspelling is what to tell."""
    errors = error.errors(include_url=False)
    return next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])


def key_path(location: Sequence[int | str]) -> str:
    """``("links", 0, "latency")`` as ``links[0].latency``, in one line whatever the keys are."""
    path = ""
    for part in location:
        word = str(part) if str(part).isprintable() else repr(part)
        path += f"[{part}]" if isinstance(part, int) else f".{word}" if path else word
    return path if len(path) <= 200 else path[:197] + "..."


def _known_keys(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys that are allowed at `location` inside `model`, found by walking its annotations."""
    here: list[Any] = [model]
    for part in location:
        if isinstance(part, int):
            continue
        fields = [kind.model_fields for kind in here if _is_model(kind)]
        found = [f.annotation for table in fields for name, f in table.items() if part in (name, f.alias)]
        here = [kind for annotation in found for kind in _models_in(annotation)] or here
    return [f.alias or name for kind in here if _is_model(kind) for name, f in kind.model_fields.items()]


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if _is_model(annotation):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def show(value: Any) -> str:
    """A value in an error, in few words."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, date | time):
        return value.isoformat()
    try:
        text = "nothing" if value is None else repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def finite(value: Any, *, minimum: float = 0.0, exclusive: bool = False) -> float:
    """`value` as a float if it is a plain finite number not below `minimum`; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, found {show(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"too large for a number: {show(value)}") from None
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, found {value}")
    if number < minimum or (exclusive and number == minimum):
        raise ValueError(f"must be {'more than' if exclusive else 'at least'} {minimum:g}, found {show(value)}")
    return number
