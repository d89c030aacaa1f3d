"""Exports of electricity markets, with the columns that they document."""

from datetime import UTC, datetime

import pytest

from farpipe.core.errors import InputError
from farpipe.fleet.series import read_series
from farpipe.interop.price_lists import as_table, read_prices

ENTSOE = """\
"MTU (UTC)","Area","Sequence","Day-ahead Price (EUR/MWh)","Intraday Period (UTC)","Intraday Price (EUR/MWh)"
"01/01/2025 00:00:00 - 01/01/2025 01:00:00","BZN|FR","Without Sequence","18.92","",""
"01/01/2025 01:00:00 - 01/01/2025 02:00:00","BZN|FR","Without Sequence","-4.5","",""
"""
SEQUENCES = """\
"MTU (UTC)","Area","Sequence","Day-ahead Price (EUR/MWh)"
"01/01/2025 00:00:00 - 01/01/2025 01:00:00","BZN|DE-LU","Sequence 1","2.16"
"01/01/2025 00:00:00 - 01/01/2025 00:15:00","BZN|DE-LU","Sequence 2","9.99"
"""
OLD = """\
"MTU (CET/CEST)","Day-ahead Price [EUR/MWh]","Currency","BZN|AT"
"31.03.2024 01:00 - 31.03.2024 02:00","10","EUR",""
"31.03.2024 02:00 - 31.03.2024 03:00","","EUR",""
"31.03.2024 03:00 - 31.03.2024 04:00","30","EUR",""
"27.10.2024 02:00 - 27.10.2024 03:00","1","EUR",""
"27.10.2024 02:00 - 27.10.2024 03:00","2","EUR",""
"27.10.2024 03:00 - 27.10.2024 04:00","3","EUR",""
"""
MARKED = OLD.replace("MTU (CET/CEST)", "MTU (CET/CEST)").replace(
    '"27.10.2024 02:00 - 27.10.2024 03:00","1"', '"27/10/2024 02:00:00 (CEST) - 27/10/2024 02:00:00 (CET)","1"'
)
GRIDSTATUS = """\
Time,Interval Start,Interval End,Market,Location,Location Type,LMP,Energy,Congestion,Loss
2024-01-01 00:00:00-05:00,2024-01-01 00:00:00-05:00,2024-01-01 01:00:00-05:00,DAY_AHEAD_HOURLY,CAPITL,Zone,25.02,24.24,0,0.78
2024-01-01 00:00:00-05:00,2024-01-01 00:00:00-05:00,2024-01-01 01:00:00-05:00,DAY_AHEAD_HOURLY,N.Y.C.,Zone,26.5,24.24,0,0.78
2024-01-01 01:00:00-05:00,2024-01-01 01:00:00-05:00,2024-01-01 02:00:00-05:00,DAY_AHEAD_HOURLY,CAPITL,Zone,20,24.24,0,0.78
"""  # noqa: E501
HOSTED = """\
interval_start_utc,interval_end_utc,location,spp
2024-01-01T00:00:00+00:00,2024-01-01T00:15:00+00:00,HB_NORTH,-3.1
"""
MAPS = """\
Datetime (UTC),Country,Zone name,Zone id,Carbon intensity gCO₂eq/kWh (direct),Carbon intensity gCO₂eq/kWh (Life cycle),Data source
2024-01-01 00:00:00,France,France,FR,21.5,55.2,ENTSO-E
2024-01-01 01:00:00,France,France,FR,,50,ENTSO-E
"""  # noqa: E501

LIBRARY = (
    "InstanceCode\tDateTime(UTC)\tAreaTypeCode\tMapCode\tContractType\tSequence\tPrice[Currency/MWh]\tCurrency\n"
    "1\t2024-01-01 00:00:00.000\tBZN\tDE_LU\tDay-ahead\t1\t10\tEUR\n"
    "2\t2024-01-01 00:00:00.000\tBZN\tDE_LU\tIntraday\t\t99\tEUR\n"
    "3\t2024-01-01 00:00:00.000\tBZN\tDE_LU\tDay-ahead\t2\t98\tEUR\n"
    "4\t2024-01-01 00:00:00.000\tBZN\tFR\tDay-ahead\t\t20\tEUR\n"
)


def table_of(tmp_path, *texts, **given):
    points = []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.csv"
        path.write_text(text)
        measure, found = read_prices(path, given)
        points += found
    return measure, as_table(points).splitlines()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (ENTSOE, ["utc,FR", "2025-01-01T00:00:00,20.812", "2025-01-01T01:00:00,-4.95"]),
        (SEQUENCES, ["utc,DE-LU", "2025-01-01T00:00:00,2.376"]),
        (GRIDSTATUS, ["utc,CAPITL,N.Y.C.", "2024-01-01T05:00:00,25.02,26.5", "2024-01-01T06:00:00,20,"]),
        (LIBRARY, ["utc,DE_LU,FR", "2024-01-01T00:00:00,11,22"]),
        (HOSTED, ["utc,HB_NORTH", "2024-01-01T00:00:00,-3.1"]),
        (HOSTED.replace("+00:00", ""), ["utc,HB_NORTH", "2024-01-01T00:00:00,-3.1"]),
    ],
)
def test_an_export_becomes_a_table_by_zone_in_utc_and_dollars(tmp_path, text, rows):
    assert table_of(tmp_path, text, EUR="1.1") == ("USD/MWh", rows)


@pytest.mark.parametrize("text", [OLD, MARKED])
def test_the_hours_that_summer_time_adds_and_takes_are_right(tmp_path, text):
    assert table_of(tmp_path, text, EUR="1")[1] == [
        "utc,AT",
        "2024-03-31T00:00:00,10",
        "2024-03-31T01:00:00,30",
        "2024-10-27T00:00:00,1",
        "2024-10-27T01:00:00,2",
        "2024-10-27T02:00:00,3",
    ]


def test_carbon_is_direct_or_over_the_life_cycle(tmp_path):
    assert table_of(tmp_path, MAPS) == ("g/kWh", ["utc,FR", "2024-01-01T00:00:00,21.5"])
    assert table_of(tmp_path, MAPS, carbon="life-cycle")[1][1:] == [
        "2024-01-01T00:00:00,55.2",
        "2024-01-01T01:00:00,50",
    ]


def test_several_zones_become_one_table_that_a_fleet_reads(tmp_path):
    _, rows = table_of(tmp_path, ENTSOE, SEQUENCES, EUR="1")
    (tmp_path / "prices.csv").write_text("\n".join(rows))
    start = datetime(2025, 1, 1, tzinfo=UTC)
    assert read_series(tmp_path / "prices.csv", "FR", start, negative=True) == [(0.0, 18.92), (3600.0, -4.5)]
    assert read_series(tmp_path / "prices.csv", "DE-LU", start, negative=True) == [(0.0, 2.16)]


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        (ENTSOE, {}, "prices are in EUR: .* --set EUR=1.08"),
        (ENTSOE, {"EUR": "-1"}, "--set EUR=-1: expected more than 0"),
        (ENTSOE, {"EUR": "x"}, "--set EUR: expected a number, found 'x'"),
        (ENTSOE.replace("18.92", "cheap"), {"EUR": "1"}, "line 2: expected a number, found 'cheap'"),
        (ENTSOE.replace("01/01/2025 00", "2025-01-01 00"), {"EUR": "1"}, "line 2: expected 31/12/2023"),
        (ENTSOE.replace("01/01/2025 01:00:00 - 01", "01/13/2025 01:00:00 - 01"), {"EUR": "1"}, "line 3: .*month"),
        (ENTSOE.replace("MTU (UTC)", "MTU (TRT)"), {"EUR": "1"}, "line 1: expected 'MTU"),
        (ENTSOE + ENTSOE.splitlines()[1].replace("18.92", "19"), {"EUR": "1"}, "line 4: FR at .* is 19 here and 18.92"),
        (GRIDSTATUS.replace("-05:00", ""), {}, "line 2: Interval Start: .* names no time zone"),
        (MAPS, {"carbon": "all"}, "carbon=all: expected direct or life-cycle"),
        (MAPS.replace("(direct)", "(x)"), {}, r"there is no column .*\(direct\)'; .* --set carbon=life-cycle"),
        (",0\n2024-01-01 00:00:00+01:00,0.1\n", {}, "line 1: this series, as entsoe-py gives it, .*index_label='utc'"),
    ],
)
def test_what_is_wrong_with_an_export_is_named(tmp_path, text, given, message):
    with pytest.raises(InputError, match=message):
        table_of(tmp_path, text, **given)


def test_other_tables_are_no_prices(tmp_path):
    (tmp_path / "other.csv").write_text("utc,FR\n2024-01-01T00:00:00,1\n")
    assert read_prices(tmp_path / "other.csv", {}) is None
    assert read_prices(tmp_path / "absent.csv", {}) is None
