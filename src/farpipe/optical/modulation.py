"""Modulation by reach: how many bit/s per Hz a light path of some length carries."""

import itertools
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.catalog import mode_names, mode_row
from farpipe.core.errors import InputError
from farpipe.core.strict import nearest
from farpipe.optical.network import number, read_rows


@dataclass(frozen=True)
class Modulation:
    """Rows of (reach in km, bit/s/Hz), reach rising and efficiency falling; a path takes the first row that reaches."""

    name: str
    rows: tuple[tuple[float, float], ...]

    def efficiency(self, km: float) -> float:
        """bit/s per Hz at `km`; 0 beyond the last reach."""
        return next((bits for reach, bits in self.rows if km <= reach), 0.0)

    def gbit_per_slot(self, km: NDArray[np.float64], slot_ghz: float) -> NDArray[np.float64]:
        """Gbit/s that one slot of `slot_ghz` carries over each of the lengths; 0 beyond the last reach."""
        reaches, bits = np.array(self.rows).T
        return np.append(bits, 0.0)[np.searchsorted(reaches, km)] * slot_ghz


def of_modes(name: str, rows: list[tuple[float, float]]) -> Modulation:
    """Table of modes (reach, bit/s/Hz); one that another beats or equals in both is left out."""
    kept: list[tuple[float, float]] = []
    for reach, bits in sorted(rows, reverse=True):
        if not kept or bits > kept[-1][1]:
            kept.append((reach, bits))
    return Modulation(name, tuple(reversed(kept)))


MODULATIONS: Final = {
    table.name: table
    for table in (
        # DeepRMSA, Chen et al., JLT 37(16), 2019, table of the open code: BPSK, QPSK, 8QAM, 16QAM.
        Modulation("deeprmsa", ((625.0, 4.0), (1250.0, 3.0), (2500.0, 2.0), (inf, 1.0))),
        # CBA's setting: 75 Gbit/s per 12.5 GHz slot at any length, reach ignored.
        Modulation("64qam", ((inf, 6.0),)),
        # Modes of a transceiver with the reach that gnpy computes for them.
        of_modes("gnpy", [(row.reach_km, row.rate_gbit_s / row.width_ghz) for row in map(mode_row, mode_names())]),
        # One bit/s/Hz everywhere: requests counted in slots of their width.
        Modulation("bpsk", ((inf, 1.0),)),
    )
}
"""The tables that are known by name."""


def find_modulation(name: str) -> Modulation:
    """The table called `name`, or that of a CSV file with the columns reach_km, bit_s_hz (reach may be ``inf``)."""
    if name in MODULATIONS:
        return MODULATIONS[name]
    if not name.endswith(".csv"):
        raise InputError(
            f"there is no modulation table {name!r}{nearest(name, MODULATIONS)}; known: {', '.join(MODULATIONS)}, "
            "or a CSV file with the columns reach_km,bit_s_hz"
        )
    rows = read_rows(name, ("reach_km", "bit_s_hz"))
    if not rows:
        raise InputError(f"{name}: a modulation table needs at least one row")
    return Modulation(Path(name).stem, _ordered([_row(place, row) for place, row in rows]))


def _row(place: str, row: dict[str, str]) -> tuple[str, float, float]:
    for column in ("reach_km", "bit_s_hz"):
        if not row[column]:
            raise InputError(f"{place}: {column}: the table has a gap: the cell is empty")
    reach = inf if row["reach_km"] == "inf" else number(place, "reach_km", row["reach_km"], exclusive=True)
    return place, reach, number(place, "bit_s_hz", row["bit_s_hz"], exclusive=True)


def _ordered(rows: list[tuple[str, float, float]]) -> tuple[tuple[float, float], ...]:
    for (_, reach, bits), (place, next_reach, next_bits) in itertools.pairwise(rows):
        if next_reach <= reach:
            raise InputError(f"{place}: reach_km: must rise from row to row, found {next_reach:g} after {reach:g}")
        if next_bits >= bits:
            raise InputError(
                f"{place}: bit_s_hz: must fall as the reach rises, found {next_bits:g} after {bits:g}; "
                "leave out the row that is worse in both"
            )
    return tuple((reach, bits) for _, reach, bits in rows)
