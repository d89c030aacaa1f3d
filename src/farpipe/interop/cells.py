"""Cells of others' tables: numbers, and the beginning of a file by which its kind is known."""

from pathlib import Path
from typing import Final

from farpipe.errors import InputError

_HEAD_BYTES: Final = 1 << 16


def head_of(path: Path) -> str:
    """The first 64 KiB of a file; empty where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES).decode("utf-8", errors="replace").removeprefix("\ufeff")


def number(text: str, place: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if abs(value) < float("inf"):
        return value
    raise InputError(f"{place}: expected a number, found {text[:40]!r}")
