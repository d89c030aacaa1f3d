"""Quantities as people write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.core.units import (
    BYTES,
    BYTES_PER_S,
    FLOPS,
    SECONDS,
    WATTS,
    counted,
    format_bytes,
    format_change,
    format_count,
    format_percent,
    format_rate,
    format_seconds,
    parse,
)

TABLES = [SECONDS, BYTES, BYTES_PER_S, FLOPS, WATTS]


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("35 ms", SECONDS, 0.035),
        ("3.4 us", SECONDS, 3.4e-6),
        ("3.4µs", SECONDS, 3.4e-6),
        ("2 min", SECONDS, 120.0),
        ("  1_500 ns ", SECONDS, 1.5e-6),
        (".5 s", SECONDS, 0.5),
        ("80 GiB", BYTES, 80 * 2**30),
        ("1.5e3 MB", BYTES, 1.5e9),
        ("400 Gbit/s", BYTES_PER_S, 50e9),
        ("10 Gbps", BYTES_PER_S, 1.25e9),
        ("3350 GB/s", BYTES_PER_S, 3.35e12),
        ("1 Mibit/s", BYTES_PER_S, 2**17),
        ("989.4 TFLOP/s", FLOPS, 989.4e12),
        ("66.9TFLOPS", FLOPS, 66.9e12),
        ("1.2 kW", WATTS, 1200.0),
        ("0 ms", SECONDS, 0.0),
        (0, SECONDS, 0.0),
        (-0.0, SECONDS, 0.0),
    ],
)
def test_quantities_are_read_to_the_nearest_float(text, units, value):
    assert parse(text, units, "1 x") == value
    assert math.copysign(1, parse(text, units, "1 x")) == 1


@pytest.mark.parametrize(
    "text",
    ["", " ", "35", "ms", "35 ms ms", "1,5 ms", "0x10 ms", "1__0 ms", "1e ms", "nan ms", "inf ms", "--1 ms", "1 0 ms",
     35, 35.0, True, False, None, [], {}, math.nan, pytest.param(10**5000, id="huge"), b"35 ms"],
)  # fmt: skip
def test_what_is_not_a_quantity_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match='expected a quantity with its unit such as "35 ms"') as error:
        parse(text, SECONDS, "35 ms")
    assert len(str(error.value)) < 150


@pytest.mark.parametrize("text", ["-1 ms", "1e400 s", "1e999999999999999999999 s", "9" * 400 + " s"])
def test_impossible_quantities_are_refused(text):
    with pytest.raises(ValueError, match="must be finite and not negative"):
        parse(text, SECONDS, "35 ms")


@pytest.mark.parametrize(
    ("text", "units", "hint"),
    [
        ("100 Gb/s", BYTES_PER_S, "did you mean 'Gbit/s' or 'GB/s'?"),  # eight times apart: never guess
        ("100 Gbit", BYTES_PER_S, "did you mean 'Gbit/s'?"),
        ("80 Gib", BYTES, "did you mean 'GiB'?"),
        ("5 mS", SECONDS, "did you mean 'ms'?"),
        ("989 TFLOP", FLOPS, "did you mean 'TFLOPS'?"),
        ("5 parsec", SECONDS, 'write it like "35 ms"'),
        ("5 " + "x" * 10_000, SECONDS, 'write it like "35 ms"'),
    ],
)
def test_an_unknown_unit_is_answered_with_the_nearest_one(text, units, hint):
    with pytest.raises(ValueError, match="unknown unit") as error:
        parse(text, units, "35 ms")
    assert hint in str(error.value)
    assert len(str(error.value)) < 200


@given(st.floats(0, 1e250, allow_subnormal=False), st.sampled_from(TABLES), st.data())
def test_a_number_written_with_the_base_unit_reads_back_exactly(value, units, data):
    unit = data.draw(st.sampled_from([unit for unit, factor in units.items() if factor == 1.0]))
    assert parse(f"{value!r} {unit}", units, "") == value


@given(st.floats(1e-3, 1e6), st.sampled_from(TABLES), st.data())
def test_every_unit_is_its_factor(value, units, data):
    unit, factor = data.draw(st.sampled_from(list(units.items())))
    assert parse(f"{value!r} {unit}", units, "") == pytest.approx(value * factor, rel=1e-15)


@given(st.text() | st.integers() | st.floats() | st.none() | st.lists(st.integers()))
def test_anything_else_is_a_value_error(text):
    for units in TABLES:
        try:
            value = parse(text, units, "1 x")
        except ValueError:
            continue
        assert math.isfinite(value)
        assert value >= 0


@given(st.floats(1e-8, 119.0))
def test_formatted_seconds_read_back_within_three_digits(value):
    assert parse(format_seconds(value), SECONDS, "") == pytest.approx(value, rel=0.0051)


@given(st.floats(1, 1e18))
def test_formatted_bytes_and_rates_read_back_within_three_digits(value):
    assert parse(format_bytes(value), BYTES, "") == pytest.approx(value, rel=0.0051)
    assert parse(format_rate(value), BYTES_PER_S, "") == pytest.approx(value, rel=0.0051)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_seconds(1.2099), "1.21 s"),
        (format_seconds(0.035), "35.0 ms"),
        (format_seconds(0.99999), "1.00 s"),
        (format_seconds(3.4e-6), "3.40 us"),
        (format_seconds(0), "0 s"),
        (format_seconds(125), "2 min 05 s"),
        (format_seconds(-125), "-2 min 05 s"),
        (format_seconds(3_725), "1 h 02 min"),
        (format_seconds(math.inf), "inf s"),
        (format_bytes(80 * 2**30), "80 GiB"),
        (format_bytes(512), "512 B"),
        (format_bytes(0), "0 B"),
        (format_bytes(math.inf), "inf B"),
        (format_rate(25e6), "200 Mbit/s"),
        (format_rate(1.25e10), "100 Gbit/s"),
    ],
)
def test_figures_are_shown_as_a_person_would_write_them(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (format_percent, 0.19, "19.0 %"),
        (format_percent, 0.0, "0.0 %"),
        (format_change, 0.325, "+32.5 %"),
        (format_change, -0.0509, "-5.1 %"),
        (format_change, -0.0001, "0.0 %"),
        (format_count, 6978.6, "6,979"),
        (format_seconds, 2.0, "2.00 s"),
        (format_bytes, 72.04 * 2**30, "72.0 GiB"),
        (format_bytes, 80.0 * 2**30, "80 GiB"),
    ],
)
def test_shares_changes_and_counts_are_written_in_one_way(write, value, text):
    assert write(value) == text


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (counted(1, "point"), "1 point"),
        (counted(0, "point"), "0 points"),
        (counted(1024, "microbatch"), "1,024 microbatches"),
        (counted(1, "microbatch"), "1 microbatch"),
    ],
)
def test_numbers_of_things_are_in_their_grammatical_number(told, expected):
    assert told == expected
