"""How well published steps are predicted, by family: rows that constants were fitted to, and strangers' rows.

    FARPIPE_DATA=FOLDER python -m benchmarks.cost_model.families [--rows] [--family WORD]

For every family the mean, median and 90th percentile of the error without sign, its mean with sign, how many rows do
not fit in memory or are refused, and, where rows are other layouts of the same training, how well they are ranked: the
mean of Kendall's tau, and by how much the layout predicted fastest was slower than the fastest (regret).
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from benchmarks.cost_model.published_steps import SOURCES
from benchmarks.cost_model.strangers import READERS, async_tp, strangers
from benchmarks.shared.data import data_folder
from farpipe.core.errors import FarpipeError
from farpipe.core.strict import validate
from farpipe.planning.planner.reference_points import ReferenceJob, ReferencePoint
from farpipe.planning.planner.validation import predict

STRANGERS: Final = {name: partial(strangers, name) for name in READERS} | {"torchtitan-2025": async_tp}
"""Readers of the families that no constant was fitted to, or only since the table says so."""
SAME_JOB: Final = ("model", "num_layers", "hidden", "vocab_size", "sequence_length", "global_batch", "device")
SAME_NUMBERS: Final = ("precision", "matmul", "lora", "mtp_num_layers")


@dataclass(frozen=True)
class Row:
    """One measured step and its prediction; `refused` says why there is none."""

    point: ReferencePoint
    predicted: ReferenceJob | None = None
    """The job that was predicted."""
    predicted_s: float = 0.0
    fits: bool = True
    refused: str = ""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_s / self.point.step_s - 1

    @property
    def job(self) -> tuple[object, ...]:
        """Equal for rows that are layouts of one training."""
        point = self.point
        num_devices = point.tensor * point.data * point.pipeline * point.context
        words = point.model.split()[0]  # the rest tells layouts and devices apart
        shape = tuple(getattr(point, key) for key in SAME_JOB if key != "model")
        return (words, num_devices, *shape, *(str(getattr(point, key)) for key in SAME_NUMBERS))


def row_of(point: ReferencePoint) -> Row:
    """The prediction of a point."""
    try:
        found = predict(point)
    except FarpipeError as error:
        return Row(point, refused=str(error).splitlines()[0])
    return Row(point, found.job, found.step_s, found.fits)


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of them lie, between two neighbours in proportion."""
    found = sorted(values)
    place = share * (len(found) - 1)
    low = int(place)
    return found[low] + (place - low) * (found[min(low + 1, len(found) - 1)] - found[low])


def rankings(found: Sequence[Row]) -> list[tuple[float, float]]:
    """Kendall's tau and the regret of each training that has several layouts."""
    jobs: dict[tuple[object, ...], list[Row]] = {}
    for row in found:
        jobs.setdefault(row.job, []).append(row)
    ranked = []
    for same in jobs.values():
        agree = [
            1 if (a.predicted_s < b.predicted_s) == (a.point.step_s < b.point.step_s) else -1
            for a, b in combinations(same, 2)
            if a.predicted_s != b.predicted_s  # else they are runs of one layout
        ]
        if not agree:
            continue
        chosen, best = min(same, key=lambda row: row.predicted_s), min(row.point.step_s for row in same)
        ranked.append((fmean(agree), chosen.point.step_s / best - 1))
    return ranked


def line(name: str, found: Sequence[Row]) -> str:
    """The figures of one family, or of several."""
    known = [row for row in found if not row.refused]
    if not known:
        return f"{name:24} {len(found):4} rows, all refused: {found[0].refused}"
    errors = [row.error for row in known]
    sizes = [abs(error) for error in errors]
    ranked = rankings(known)
    order = ""
    if ranked:
        tau, regret = (fmean(one[i] for one in ranked) for i in (0, 1))
        order = f"{len(ranked):4} {tau:+6.2f} {regret:6.1%}"
    full = sum(not row.fits for row in known)
    return (
        f"{name:24} {len(found):5} {fmean(sizes):7.1%} {median(sizes):7.1%} {quantile(sizes, 0.9):7.1%} "
        f"{fmean(errors):+7.1%} {full:4} {len(found) - len(known):4}   {order}"
    )


HEAD: Final = (
    f"{'family':24} {'rows':>5} {'mean':>7} {'median':>7} {'p90':>7} {'bias':>7} full  ref.   jobs   tau regret"
)


def families(base: Path, readers: dict[str, Any], word: str) -> dict[str, list[Row]]:
    """Rows by family, of the families whose name has `word`."""
    chosen = {name: read for name, read in readers.items() if word in name}
    found = {name: [row_of(validate(ReferencePoint, one, name)) for one in read(base)] for name, read in chosen.items()}
    return {name: rows for name, rows in found.items() if rows}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="print every row too")
    parser.add_argument("--family", default="", help="only families whose name has this word")
    asked = parser.parse_args()
    base = data_folder("measured/ and published/")
    fitted = {name: read for name, (*_, read) in SOURCES.items()}
    for title, readers in (("fitted sources", fitted), ("strangers' sources", STRANGERS)):
        found = families(base, readers, asked.family)
        print(f"{title}\n{HEAD}")
        for name, same in found.items():
            print(line(name, same), flush=True)
            for row in same if asked.rows else ():
                told = row.refused or f"{row.point.step_s:9.3f} {row.predicted_s:9.3f} {row.error:+7.1%}"
                print(f"    {str(row.point)[:86]:86} {told}{'' if row.fits else ' full'}")
        whole = [row for name, same in found.items() for row in same if len(same) < 500]
        if whole:
            print(line("all but the largest table" if title.startswith("fitted") else "all", whole) + "\n")


if __name__ == "__main__":
    main()
