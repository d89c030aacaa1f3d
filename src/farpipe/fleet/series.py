"""Hourly series of electricity prices and carbon: CSV files whose first column is ``utc``."""

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

from farpipe.core.errors import InputError
from farpipe.core.strict import as_utc, nearest, read_csv

HOUR_S: Final = 3600.0
MAX_GAP_S: Final = 7 * 24 * HOUR_S
"""A longer gap in a series is an error; in a shorter one the last figure goes on."""

Series = list[tuple[float, float]]
"""(seconds since `start`, figure from then on), in the order of time."""


def read_series(path: Path | str, column: str, start: datetime, *, negative: bool) -> Series:
    """The figures in `column`, from the hour of `start` on.

    Prices may be `negative`. An empty cell leaves the figure of the hour before. InputError names file and line of a
    time out of order, a gap of more than a week, a figure that is no number, and a series that does not reach `start`.
    """
    names, table = read_csv(path)
    if names[:1] != ["utc"]:
        raise InputError(f"{path}: line 1: the first column is 'utc', found {names[:1]}")
    if column not in names:
        raise InputError(f"{path}: line 1: there is no column {column!r}{nearest(column, names)}")
    rows: Series = []
    for place, row in table:
        time_s = (as_utc(row["utc"], f"{place}: utc") - start).total_seconds()
        if rows and time_s <= rows[-1][0]:
            raise InputError(f"{place}: {row['utc']} is not after the hour before it")
        if row[column]:
            rows.append((time_s, _figure(row[column], f"{place}: {column}", negative)))
    return _from_start(rows, f"{path}: {column}", start)


def _figure(text: str, place: str, negative: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{place}: expected a number, found {text[:40]!r}") from None
    if not abs(value) < 1e6 or (value < 0 and not negative):
        raise InputError(f"{place}: {text[:40]!r} is no {'price' if negative else 'carbon intensity'}")
    return value


def _from_start(rows: Series, place: str, start: datetime) -> Series:
    before = [row for row in rows if row[0] <= 0]
    if not before or before[-1][0] < -MAX_GAP_S:
        raise InputError(f"{place}: has no figure for the start of the clock, {start:%Y-%m-%dT%H:%M}")
    kept: Sequence[tuple[float, float]] = [(0.0, before[-1][1]), *(row for row in rows if row[0] > 0)]
    for (one, _), (other, _) in pairwise(kept):
        if other - one > MAX_GAP_S:
            raise InputError(f"{place}: nothing for {(other - one) / 86400:.1f} days after {one / 86400:.1f} days")
    return list(kept)
