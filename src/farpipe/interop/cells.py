"""Cells of others' tables: moments and numbers, and the beginning of a file by which its kind is known."""

from datetime import UTC, datetime, tzinfo
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


def moment(text: str, place: str, zone: tzinfo | None) -> datetime:
    """The moment that `text` (ISO 8601) names, in UTC; one that names no zone is of `zone`, or an InputError."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InputError(f'{place}: expected a time such as "2024-01-31T12:00:00", found {text[:40]!r}') from None
    if found.tzinfo is None and zone is None:
        raise InputError(f"{place}: {text[:40]!r} names no time zone; export times with their offset from UTC")
    return (found if found.tzinfo else found.replace(tzinfo=zone)).astimezone(UTC)


def number(text: str, place: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if abs(value) < float("inf"):
        return value
    raise InputError(f"{place}: expected a number, found {text[:40]!r}")
