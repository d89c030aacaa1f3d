"""Cells of the fleet's tables."""

import pytest

from farpipe.cli.fleet_units import ENERGIES, MASSES, TIMES, in_unit, in_usd


@pytest.mark.parametrize(
    ("values", "units", "cells"),
    [
        ([5000.0, 4.0], ENERGIES, ["5.0 MWh", "<0.1 MWh"]),
        ([0.25, 0.004], ENERGIES, ["250.0 Wh", "4.0 Wh"]),
        ([0.0, 0.0], ENERGIES, ["0.0 MWh", "0.0 MWh"]),
        ([120.0, None], TIMES, ["2.0 min", "-"]),
        ([900.0, -20.0], MASSES, ["900.0 g", "-20.0 g"]),
        ([], TIMES, []),
    ],
)
def test_a_column_has_the_largest_unit_in_which_its_largest_figure_shows(values, units, cells):
    assert in_unit(values, units, 1) == cells


def test_small_amounts_have_cents():
    assert in_usd([12.345, -0.5, 0.0]) == ["$12.35", "-$0.50", "$0.00"]
    assert in_usd([1234.5, -0.4]) == ["$1,234", "$0"]
    assert in_usd([0.0]) == ["$0"]


def test_columns_that_are_read_side_by_side_have_one_unit():
    waits, longest = [0.0, 12.0], [1164.6, 90.0]
    assert in_unit(waits, TIMES, 2, longest) == ["0.00 min", "0.20 min"]
    assert in_unit(longest, TIMES, 2, waits) == ["19.41 min", "1.50 min"]
    assert in_unit(waits, TIMES, 2, [7200.0]) == ["0.00 h", "<0.01 h"]


def test_what_nobody_gave_is_a_dash():
    assert in_usd([None, 12.0]) == ["-", "$12.00"]
    assert in_unit([None, None], MASSES, 1) == ["-", "-"]
