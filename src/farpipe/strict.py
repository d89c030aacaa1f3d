"""Strict reading of the files that people and programs exchange.

Every failure is an InputError that names the source, the key path, the value and, where there is one, the
nearest good word. Nothing unknown is accepted and nothing is guessed.
"""

import difflib
import json
import math
import os
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from farpipe.errors import InputError, RunError

MAX_FILE_BYTES = 1 << 30

ModelType = TypeVar("ModelType", bound=BaseModel)


def nearest(word: str, words: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest of `words`, or an empty string when none is close."""
    close = difflib.get_close_matches(word.lower(), {w.lower(): w for w in words}, n=1, cutoff=0.6)
    by_lower = {w.lower(): w for w in words}
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def read_text(path: Path | str) -> str:
    """The file's text; InputError when it is missing, a folder, too large, empty or not UTF-8."""
    path = Path(path)
    try:
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; this can't be one of farpipe's files")
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None
    if not text.strip():
        raise InputError(f"{path}: the file is empty")
    return text


def write_text(path: Path | str, text: str) -> None:
    """Write `text` so that the file is there whole or not at all.

    Raises RunError when the disk is full or the place can't be written; what stood there before stays.
    """
    path = Path(path)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise RunError(f"{path}: can't be written: {error.strerror or error}") from None


def parse_json(text: str, source: str) -> Any:
    """The JSON value in `text`; NaN, infinities and repeated keys are errors as well."""

    def reject_constant(name: str) -> NoReturn:
        raise InputError(f"{source}: {name} is not a number that JSON or farpipe knows")

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            seen: set[str] = set()
            double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InputError(f"{source}: key {double!r} is given twice")
        return data

    try:
        return json.loads(text, parse_constant=reject_constant, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise InputError(f"{source}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise InputError(f"{source}: nested too deeply") from None
    except ValueError as error:  # integers of thousands of digits
        raise InputError(f"{source}: {error}") from None


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The TOML table in `text`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML: {error}") from None
    except RecursionError:
        raise InputError(f"{source}: nested too deeply") from None


def expect_format(data: Any, name: str, source: str) -> dict[str, Any]:
    """`data` without its ``format`` key, which must be `name`."""
    if not isinstance(data, dict):
        raise InputError(f'{source}: expected an object with "format": "{name}", found {_show(data)}')
    if data.get("format") != name:
        raise InputError(f"{source}: format: expected {name!r}, found {_show(data.get('format'))}")
    return {key: value for key, value in data.items() if key != "format"}


def validate(model: type[ModelType], data: Any, source: str, prefix: str = "") -> ModelType:
    """`data` as a `model`; the first thing that is wrong becomes an InputError with its key path."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(model, error, source, prefix)) from None


def _explain(model: type[BaseModel], error: ValidationError, source: str, prefix: str) -> str:
    first = _most_telling(error)
    path = key_path([prefix, *first["loc"]] if prefix else first["loc"])
    if first["type"] == "extra_forbidden":
        known = _known_keys(model, first["loc"][:-1])
        hint = nearest(str(first["loc"][-1]), known) or f"; known here: {', '.join(sorted(known))}"
        return f"{source}: {path}: unknown key{hint}"
    if first["type"] == "missing":
        return f"{source}: {path}: missing"
    message = str(first["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if first["type"] == "value_error":  # our own validators show the value where it helps
        return f"{source}: {path}: {message}" if path else f"{source}: {message}"
    return f"{source}: {path}: {message}, found {_show(first['input'])}"


def _most_telling(error: ValidationError) -> Any:
    """A misspelt key often also leaves the right one missing: the misspelling is what to tell."""
    errors = error.errors(include_url=False)
    return next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])


def key_path(location: Sequence[int | str]) -> str:
    """``("links", 0, "latency")`` as ``links[0].latency``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


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


def _show(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    if isinstance(value, Mapping):
        text = "a table"
    elif isinstance(value, list | tuple):
        text = f"a list of {len(value)}"
    return text if len(text) <= 60 else text[:57] + "..."


def finite(value: Any, *, minimum: float = 0.0, exclusive: bool = False) -> float:
    """`value` as a float if it is a plain finite number not below `minimum`; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, found {_show(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"too large for a number: {_show(value)}") from None
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, found {value}")
    if number < minimum or (exclusive and number == minimum):
        raise ValueError(f"must be {'more than' if exclusive else 'at least'} {minimum:g}, found {value}")
    return number
