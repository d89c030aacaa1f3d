"""Hourly electricity prices and carbon from exports of ENTSO-E, gridstatus and Electricity Maps, as one wide table."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Final, Literal, NamedTuple
from zoneinfo import ZoneInfo

from farpipe.core.errors import InputError
from farpipe.core.strict import as_utc, read_csv, shaped
from farpipe.interop.cells import head_of, number

_ZONES: Final = {
    "UTC": UTC,
    "CET/CEST": ZoneInfo("Europe/Brussels"),
    "WET/WEST": ZoneInfo("Europe/Lisbon"),
    "EET/EEST": ZoneInfo("Europe/Helsinki"),
}
"""Time zones that ENTSO-E's exports name in their header."""
_OFFSETS: Final = {"WET": 0, "WEST": 1, "CET": 1, "CEST": 2, "EET": 2, "EEST": 3}
_MISSING: Final = ("", "-", "n/e", "N/A", "nan")

_UNNAMED: Final = (
    "this series, as entsoe-py gives it, names neither zone nor currency; write it as a fleet reads it, such as "
    "(1.08 * series).tz_convert('UTC').rename('DE-LU').to_csv('prices.csv', index_label='utc')"
)

Measure = Literal["USD/MWh", "g/kWh"]


class PricePoint(NamedTuple):
    """A figure of one zone from a moment on."""

    place: str
    utc: datetime
    column: str
    figure: float


def read_prices(path: Path, given: Mapping[str, str]) -> tuple[Measure, list[PricePoint]] | None:
    """Measure and points of an export; None if the file is none.

    `given` has what a file leaves open: USD per unit of its currency (``EUR=1.08``) and ``carbon=direct`` or
    ``carbon=life-cycle`` (direct where it is not said). InputError names the place of what can't be read.
    """
    with shaped(str(path), "a table of prices or carbon"):
        return _read(path, given)


def _read(path: Path, given: Mapping[str, str]) -> tuple[Measure, list[PricePoint]] | None:
    names = next(csv.reader(head_of(path).splitlines()[:1]), None) or [""]
    by_name = {name.lower(): name for name in names}
    price = next((by_name[name] for name in ("lmp", "spp") if name in by_name), None)
    time = next((name for name in ("interval_start_utc", "Interval Start", "Time") if name in names), None)
    if names == ["", "0"]:
        raise InputError(f"{path}: line 1: {_UNNAMED}")
    if {"DateTime(UTC)", "MapCode", "Currency"} <= set(names[0].split("\t")):
        columns, rows = read_csv(path, "\t")
        return "USD/MWh", list(_entsoe_library(path, columns, rows, given))
    if names[0].startswith("MTU ("):
        names, rows = read_csv(path)
        return "USD/MWh", list(_entsoe(path, names, rows, given))
    if "datetime (utc)" in by_name and "zone id" in by_name:
        return "g/kWh", list(_electricity_maps(path, by_name, read_csv(path)[1], given))
    if price is None or time is None or "location" not in by_name:
        return None
    return "USD/MWh", list(_gridstatus(read_csv(path)[1], time, by_name["location"], price))


def as_table(points: Sequence[PricePoint]) -> str:
    """CSV whose first column is ``utc`` and which has a column for every zone; a figure that is not there is empty."""
    cells: dict[datetime, dict[str, float]] = {}
    for place, utc, column, figure in points:
        known = cells.setdefault(utc, {}).setdefault(column, figure)
        if known != figure:
            raise InputError(
                f"{place}: {column} at {utc:%Y-%m-%d %H:%M} UTC is {figure:g} here and {known:g} before; keep one "
                "market for each zone"
            )
    names = list(dict.fromkeys(point.column for point in points))
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["utc", *names])
    for utc, figures in sorted(cells.items()):
        shown = (f"{figures[name]:.6g}" if name in figures else "" for name in names)
        table.writerow([f"{utc:%Y-%m-%dT%H:%M:%S}", *shown])
    return file.getvalue()


Rows = Iterator[tuple[str, dict[str, str]]]


def _entsoe(path: Path, names: Sequence[str], rows: Rows, given: Mapping[str, str]) -> Iterator[PricePoint]:
    """Day-ahead prices of the Transparency Platform; the first of several auctions (sequences) of a zone."""
    priced = [(name, match) for name in names if (match := re.match(r"Day-ahead Price [\[(](\w+)/MWh[\])]", name))]
    zone = _ZONES.get(names[0].partition("(")[2].rstrip(")"))
    if not priced or zone is None:
        raise InputError(
            f"{path}: line 1: expected 'MTU (UTC)' and 'Day-ahead Price (EUR/MWh)', found {', '.join(names)[:80]!r}"
        )
    (column, match), area = priced[0], next((name for name in names if name.startswith("BZN|")), "")
    factor = _usd_per(match[1], path, given)
    before = None
    for place, row in rows:
        if row[column].strip() in _MISSING or row.get("Sequence", "")[-1:] not in ("", "e", "1"):
            continue
        before = utc = _interval_start(row[names[0]], place, zone, before)
        yield PricePoint(place, utc, (area or row["Area"]).removeprefix("BZN|"), factor * number(row[column], place))


def _entsoe_library(path: Path, names: Sequence[str], rows: Rows, given: Mapping[str, str]) -> Iterator[PricePoint]:
    """Day-ahead prices of the bidding zones of a monthly file of ENTSO-E's file library (12.1.D)."""
    price = next((name for name in names if name.startswith("Price[")), None)
    if price is None:
        raise InputError(f"{path}: line 1: expected 'Price[Currency/MWh]', found {', '.join(names)[:80]!r}")
    for place, row in rows:
        is_taken = row.get("ContractType", "Day-ahead") == "Day-ahead" and row.get("AreaTypeCode", "BZN") == "BZN"
        if is_taken and row[price] not in _MISSING and row.get("Sequence", "") in ("", "1"):
            factor = _usd_per(row["Currency"], path, given)
            utc = as_utc(row["DateTime(UTC)"], f"{place}: DateTime(UTC)", UTC)
            yield PricePoint(place, utc, row["MapCode"], factor * number(row[price], place))


def _interval_start(text: str, place: str, zone: tzinfo, before: datetime | None) -> datetime:
    """Beginning of ``31/12/2023 23:00:00 (CET) - ...`` in UTC; the hour that comes twice in autumn is told by order."""
    match = re.match(r"(\d\d)[./](\d\d)[./](\d{4}) (\d\d):(\d\d)(?::\d\d)?(?: \((\w+)\))?", text)
    if match is None:
        raise InputError(f"{place}: expected 31/12/2023 23:00:00 - 01/01/2024 00:00:00, found {text[:50]!r}")
    day, month, year, hour, minute = map(int, match.groups()[:5])
    try:
        local = datetime(year, month, day, hour, minute)
    except ValueError as error:
        raise InputError(f"{place}: {text[:50]!r}: {error}") from None
    if match[6] in _OFFSETS:
        return local.replace(tzinfo=timezone(timedelta(hours=_OFFSETS[match[6]]))).astimezone(UTC)
    first, second = (local.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    return second if before is not None and first <= before < second else first


def _gridstatus(rows: Rows, time: str, location: str, price: str) -> Iterator[PricePoint]:
    """Locational prices of gridstatus, in USD/MWh; its times have their zone."""
    for place, row in rows:
        if row[price].strip() not in _MISSING:
            utc = as_utc(row[time], f"{place}: {time}", None if time != "interval_start_utc" else UTC)
            yield PricePoint(place, utc, row[location], number(row[price], f"{place}: {price}"))


def _electricity_maps(
    path: Path, names: Mapping[str, str], rows: Rows, given: Mapping[str, str]
) -> Iterator[PricePoint]:
    """Carbon intensity of Electricity Maps: direct, or over the life cycle."""
    endings = {"direct": ("(direct)",), "life-cycle": ("(life cycle)", "(lca)")}
    which = given.get("carbon", "direct")
    if which not in endings:
        raise InputError(f"carbon={which}: expected direct or life-cycle")
    carbon = {low: name for low, name in names.items() if low.startswith("carbon i")}
    column = next((name for low, name in carbon.items() if low.endswith(endings[which])), None)
    if column is None:
        there = [other for other, ends in endings.items() if any(low.endswith(ends) for low in carbon)]
        raise InputError(
            f"{path}: line 1: there is no column 'Carbon intensity gCO₂eq/kWh {endings[which][0]}'"
            + "".join(f"; it has {other} carbon: --set carbon={other}" for other in there)
        )
    for place, row in rows:
        if row[column].strip() not in _MISSING:
            utc = as_utc(row[names["datetime (utc)"]], place, UTC)
            yield PricePoint(place, utc, row[names["zone id"]], number(row[column], f"{place}: {column}"))


def _usd_per(currency: str, path: Path, given: Mapping[str, str]) -> float:
    if currency == "USD":
        return 1.0
    if currency not in given:
        raise InputError(f"{path}: prices are in {currency}: say what one is in USD, such as --set {currency}=1.08")
    if (usd := number(given[currency], f"--set {currency}")) <= 0:
        raise InputError(f"--set {currency}={given[currency]}: expected more than 0")
    return usd
