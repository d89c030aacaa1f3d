"""Cells of the fleet's tables: a column has one unit, so that policies can be compared."""

from collections.abc import Sequence
from typing import Final

Units = tuple[tuple[str, float], ...]
"""Names and sizes, the largest first."""
TIMES: Final[Units] = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
"""Units of times, in seconds."""
ENERGIES: Final[Units] = (("MWh", 1e3), ("kWh", 1.0), ("Wh", 1e-3))
"""Units of energy, in kWh."""
MASSES: Final[Units] = (("t", 1e6), ("kg", 1e3), ("g", 1.0))
"""Units of mass, in grams."""
WHOLE_USD: Final = 100.0
"""Least amount for which a column leaves out cents, USD."""


def in_unit(
    values: Sequence[float | None], units: Units, num_digits: int, beside: Sequence[float | None] = ()
) -> list[str]:
    """Cells in the largest unit in which the largest figure, in the columns `beside` too, is 1 or more.

    ``-`` where there is none; what is more than nothing is not written as zero.
    """
    most = max((abs(value) for value in (*values, *beside) if value is not None), default=0.0)
    name, size = next((unit for unit in units if most >= unit[1]), units[-1] if most else units[0])
    return ["-" if value is None else f"{_shown(value / size, num_digits)} {name}" for value in values]


def _shown(value: float, num_digits: int) -> str:
    least = 10.0**-num_digits
    return f"<{least:.{num_digits}f}" if 0 < value < least / 2 else f"{value:,.{num_digits}f}"


def in_usd(amounts: Sequence[float | None]) -> list[str]:
    """Cells in whole dollars, with cents in a column of small ones; energy may have a negative price."""
    most = max((abs(usd) for usd in amounts if usd is not None), default=0.0)
    num_digits = 2 if 0 < most < WHOLE_USD else 0
    return ["-" if usd is None else _in_usd(usd, num_digits) for usd in amounts]


def _in_usd(usd: float, num_digits: int) -> str:
    return f"{'-' if round(usd, num_digits) < 0 else ''}${abs(usd):,.{num_digits}f}"
