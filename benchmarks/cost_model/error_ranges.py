"""Ranges of errors by kind of job, and the tables of errors that README and status lead with.

    FARPIPE_DATA=FOLDER python -m benchmarks.cost_model.error_ranges [--write | --rows WORD]

Predicts every row of published tables, those of strangers, and trainings by their settings and logs. A row counts as if
the constants of its device had been fitted to the other sources alone: its error less the median of theirs, at the same
rate of products. Rows of a source weigh 1/sqrt(their number) each. Prints the ranges, the pairs of layouts, what links
between sites cost, and how many rows lie inside ranges made of other sources, over random halves of the sources.
`--write` writes the catalogue's error_ranges.toml, and README, status and raw/error_ranges.md from it; `--rows` prints
rows instead.
"""

import argparse
import datetime
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np

from benchmarks.cost_model.cases import LOGS, STRANGERS, Case, cases, quantile, ranking_table
from benchmarks.cost_model.far_links import link_ratios
from benchmarks.cost_model.fit_efficiency import Step
from benchmarks.shared.data import data_folder
from farpipe.planning.cost import calibration_of
from farpipe.planning.cost.calibration import REFERENCE
from farpipe.planning.cost.trust import (
    DEGREES,
    FAR_LINKS,
    KINDS,
    NEAR_LINKS,
    ORDERS,
    UNCOMPARED,
    ErrorRange,
)
from farpipe.planning.planner.validation import errors_table

ROOT: Final = Path(__file__).parents[2]
RANGES: Final = ROOT / "src/farpipe/core/catalog/error_ranges.toml"
RAW: Final = ROOT / "docs/reference/benchmarks/raw/error_ranges.md"
PAGES: Final = ("README.md", "docs/status.md")
BEGIN, END = "<!-- errors by family -->\n", "<!-- end of errors by family -->\n"
COMMAND: Final = "FARPIPE_DATA=FOLDER python -m benchmarks.cost_model.error_ranges --write"
LOWEST, HIGHEST = 0.1, 0.9
FEW_ROWS, FEW_SOURCES = 20, 3
"""A kind with fewer rows or sources has the range of all rows too."""
NUM_SPLITS: Final = 400
LARGEST: Final = "vtrain-single-node"
"""Group of 720 rows, which would hide all others."""
FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "twelve settings and logs": (LOGS,),
    "FSDP in PyTorch": ("foundry-h100", "foundry-a100", "torchtitan-2025"),
    "experts in Megatron": ("bridge25-experts", "modelzoo", "deepseek-v3-report"),
    "dense in Megatron": ("bridge25-dense", "primus"),
    "InternEvo, to 512 A100": ("internevo",),
    "NeMo AutoModel": ("automodel",),
    "Megatron on V100": ("dtfm-megatron",),
}
"""Strangers' sources by family; what is not named here makes a family of its own."""


def left_out(known: Sequence[Case]) -> list[float]:
    """Logarithm of measured over predicted of every case, with its source left out."""
    ratios: dict[tuple[tuple[str, str], str], list[float]] = {}
    for case in known:
        ratios.setdefault((case.rate, case.source), []).append(case.ratio)
    middles = {key: median(found) for key, found in ratios.items()}

    def others(case: Case) -> float:
        found = [m for (rate, source), m in middles.items() if rate == case.rate and source != case.source]
        return median(found) if found else 0.0

    return [case.ratio - others(case) for case in known]


def without_device(known: Sequence[Case]) -> ErrorRange:
    """The range where a device has the reference's law alone, scaled to its peak."""
    ratios, sources = [], []
    for case in known:
        assert case.predicted is not None
        device = case.predicted.cluster.sites[0].device
        if device.name != REFERENCE:
            law = calibration_of(device.model_copy(update={"name": "never compared"}))
            ratios.append(-math.log1p(Step(case.point, case.predicted).exact({device.name: law})))
            sources.append(case.source)
    return error_range(UNCOMPARED, ratios, sources)


def deciles(ratios: Sequence[float], sources: Sequence[str]) -> tuple[float, float]:
    """The first and the ninth decile, between neighbours in proportion; sources weigh as the square root of rows."""
    values = np.array(ratios)
    weights = np.array([1 / math.sqrt(sources.count(source)) for source in sources])
    order = np.argsort(values)
    share = np.cumsum(weights[order])
    share = (share - weights[order] / 2) / share[-1]
    low, high = np.interp([LOWEST, HIGHEST], share, values[order])
    return min(float(low), 0.0), max(float(high), 0.0)


def error_range(kind: str, ratios: Sequence[float], sources: Sequence[str]) -> ErrorRange:
    """The range of one kind."""
    low, high = (math.exp(one) for one in deciles(ratios, sources))
    weights = [1 / math.sqrt(sources.count(source)) for source in sources]
    mean = float(np.average([abs(math.expm1(-one)) for one in ratios], weights=weights))
    return ErrorRange(kind, low, high, mean, len(ratios), len(set(sources)))


def ranges(known: Sequence[Case], ratios: Sequence[float]) -> dict[str, ErrorRange]:
    """The range of every kind; one of few rows or sources holds that of all rows too."""
    sources = [case.source for case in known]
    whole = error_range("all", ratios, sources)
    found = {}
    for kind in KINDS:
        own = [index for index, case in enumerate(known) if case.kind == kind]
        if not own:
            found[kind] = replace(whole, kind=kind)
            continue
        mine = error_range(kind, [ratios[i] for i in own], [sources[i] for i in own])
        few = mine.num_rows < FEW_ROWS or mine.num_sources < FEW_SOURCES
        found[kind] = mine.with_(whole) if few else mine
    return found


def coverage(known: Sequence[Case], ratios: Sequence[float]) -> dict[str, float]:
    """Share of each source's rows inside ranges made of a random half of the other sources."""
    names, chance = sorted({case.source for case in known}), random.Random(0)
    inside: dict[str, list[float]] = {}
    for _ in range(NUM_SPLITS):
        half = set(chance.sample(names, len(names) // 2))
        taken = [index for index, case in enumerate(known) if case.source in half]
        made = ranges([known[i] for i in taken], [ratios[i] for i in taken])
        for name in names:
            if name not in half:
                own = [case for case in known if case.source == name]
                inside.setdefault(name, []).append(fmean(_is_inside(case, made) for case in own))
    return {name: fmean(shares) for name, shares in inside.items()}


def _is_inside(case: Case, made: Mapping[str, ErrorRange]) -> bool:
    return made[case.kind].low <= math.exp(case.ratio) <= made[case.kind].high


@dataclass(frozen=True)
class Pair:
    """Two layouts of one training: logarithms of their ratio as predicted and as measured."""

    source: str
    kind: str
    predicted: float
    measured: float
    weight: float


def pairs(known: Sequence[Case]) -> list[Pair]:
    """Every two layouts of the same training; a training's pairs weigh as much as one."""
    jobs: dict[tuple[object, ...], list[Case]] = {}
    for case in known:
        jobs.setdefault((case.source, case.job), []).append(case)
    found = []
    for same in jobs.values():
        both = [(a, b) for a, b in combinations(same, 2) if a.predicted_s != b.predicted_s]
        found += [
            Pair(
                *(a.source, ORDERS if _degrees(a) == _degrees(b) else DEGREES),
                math.log(a.predicted_s / b.predicted_s),
                math.log(a.point.step_s / b.point.step_s),
                1 / len(both),
            )
            for a, b in both
        ]
    return found


def _degrees(case: Case) -> tuple[int, ...]:
    point = case.point
    return point.tensor, point.data, point.pipeline, point.context, point.expert


def difference(kind: str, found: Sequence[Pair]) -> dict[str, Any]:
    """From which predicted difference on 8 of 10 pairs come out in the predicted order, and of how many pairs.

    Errors of a difference are as often on one side as on the other, so that is what 6 of 10 errors are within.
    """
    own = sorted((pair for pair in found if pair.kind == kind), key=lambda pair: abs(pair.predicted - pair.measured))
    share = np.cumsum([pair.weight for pair in own])
    last = own[int(np.searchsorted(share, 0.6 * share[-1]))]
    within = abs(last.predicted - last.measured)
    beyond = [pair for pair in own if abs(pair.predicted) >= within]
    right = sum(pair.weight for pair in beyond if pair.predicted * pair.measured > 0)
    return {
        "tie_within": math.expm1(within),
        "right_beyond": right / sum(pair.weight for pair in beyond),
        "num_pairs": len(own),
        "num_sources": len({pair.source for pair in own}),
    }


def family(name: str, found: Sequence[Case], inside: Mapping[str, float]) -> dict[str, Any]:
    """Figures of a family's errors; `inside` by source."""
    known = [case for case in found if not case.refused]
    errors = [case.error for case in known]
    sizes = [abs(error) for error in errors]
    figures = {
        "name": name,
        "num_rows": len(found),
        "mean_error": fmean(sizes),
        "median_error": median(sizes),
        "ninth_decile": quantile(sizes, 0.9),
        "bias": fmean(errors),
        "inside": fmean(inside[case.source] for case in known),
        "num_marked": sum(case.is_marked for case in known),
        "num_refused": len(found) - len(known) + sum(not case.fits for case in known),
    }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}


def grouped(found: Sequence[Case]) -> dict[str, list[Case]]:
    """Rows by family of strangers, all of these, and the published ones that were partly fitted."""
    strangers = [LOGS, *STRANGERS]
    named = {source for sources in FAMILIES.values() for source in sources}
    every = FAMILIES | {source: (source,) for source in strangers if source not in named}
    groups = {name: [case for case in found if case.source in sources] for name, sources in every.items()}
    groups["all strangers"] = [case for case in found if case.source in strangers]
    groups["published, partly fitted"] = [case for case in found if case.source not in (*strangers, LARGEST)]
    return {name: own for name, own in groups.items() if own}


def toml(tables: Mapping[str, Any]) -> str:
    """The catalogue's file."""
    lines = [
        f"# Written by `{COMMAND}`; nothing here is written by hand.",
        "# Ranges: first and ninth decile of measured over predicted, with each row's source left out.",
        f"date = {datetime.datetime.now(datetime.UTC).date()}",
    ]
    for group in ("ranges", "differences"):
        for name, figures in tables[group].items():
            lines += ["", f'[{group}."{name}"]', *_entries(figures)]
    for figures in tables["families"]:
        lines += ["", "[[families]]", *_entries(figures)]
    return "\n".join(lines) + "\n"


def _entries(figures: Mapping[str, Any]) -> Iterator[str]:
    for key, value in figures.items():
        yield f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {round(value, 4)}"


def figures_of(found: ErrorRange) -> dict[str, Any]:
    """A range as the file has it, under its kind."""
    return {key: value for key, value in vars(found).items() if key != "kind"}


def tables_of(base: Path) -> tuple[dict[str, Any], str]:
    """All that is written, and what a reader sees of it beside the table of errors."""
    found = cases(base)
    known = [case for case in found if not case.refused]
    ratios = left_out(known)
    made = ranges(known, ratios)
    made[UNCOMPARED] = without_device(known)
    made |= link_ranges(base)
    inside, both = coverage(known, ratios), pairs(known)
    groups = grouped(found)
    tables = {
        "ranges": {kind: figures_of(one) for kind, one in made.items()},
        "differences": {kind: difference(kind, both) for kind in (ORDERS, DEGREES)},
        "families": [family(name, own, inside) for name, own in groups.items()],
    }
    by_source = {name: [case for case in found if case.source == name] for name in inside}
    return tables, "\n".join((*details(tables, inside, known), "", *ranking_table(groups | by_source)))


def link_ranges(base: Path) -> dict[str, ErrorRange]:
    """What links between sites cost, measured over predicted; so few rows that far ones have all of their spread."""
    ratios = link_ratios(base)
    low, high = (quantile(ratios, share) for share in (LOWEST, HIGHEST))
    mean = fmean(abs(1 / ratio - 1) for ratio in ratios)
    near = ErrorRange(NEAR_LINKS, min(low, 1.0), max(high, 1.0), mean, len(ratios), 1)
    far = replace(near, kind=FAR_LINKS, low=min(1.0, *ratios), high=max(1.0, *ratios))
    return {NEAR_LINKS: near, FAR_LINKS: far}


def details(tables: Mapping[str, Any], inside: Mapping[str, float], known: Sequence[Case]) -> Iterator[str]:
    """Markdown tables of ranges, pairs and coverage."""
    yield from ("| kind of job | 8 of 10 measured / predicted | mean error | rows | sources |", "|---|---|---|---|---|")
    for kind, one in tables["ranges"].items():
        span = f"{one['low']:.2f} to {one['high']:.2f}"
        yield f"| {kind} | {span} | {one['mean_error']:.1%} | {one['num_rows']} | {one['num_sources']} |"
    yield from ("", "| pairs of layouts | a tie within | right beyond it | pairs | sources |", "|---|---|---|---|---|")
    for kind, one in tables["differences"].items():
        figures = f"{one['tie_within']:.1%} | {one['right_beyond']:.0%} | {one['num_pairs']} | {one['num_sources']}"
        yield f"| {kind} | {figures} |"
    yield from ("", "| source | rows | inside ranges of other sources |", "|---|---|---|")
    counts = {name: sum(case.source == name for case in known) for name in inside}
    for name, share in inside.items():
        yield f"| {name} | {counts[name]} | {share:.0%} |"
    rows = sum(counts[name] * share for name, share in inside.items()) / sum(counts.values())
    yield f"| all rows | {sum(counts.values())} | {rows:.0%} |"
    yield f"| all sources, each the same | {len(inside)} | {fmean(inside.values()):.0%} |"


def rewritten(page: str, table: str) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


def main() -> None:
    """Print all tables, and write them where that is asked for; or the rows of some sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the catalogue, README, status and raw page")
    parser.add_argument("--rows", metavar="WORD", help="print rows, only of sources whose name has this word")
    wanted = parser.parse_args()
    base = data_folder("measured/ and published/")
    if wanted.rows is not None:
        found = cases(base, wanted.rows)
        by_source = {case.source: [other for other in found if other.source == case.source] for case in found}
        print("\n".join((*map(str, found), *ranking_table(by_source))))
        return
    tables, more = tables_of(base)
    errors = errors_table(tables["families"])
    print(f"{errors}\n{more}")
    if wanted.write:
        RANGES.write_text(toml(tables), encoding="utf-8")
        RAW.write_text(f"# error_ranges\n\nBy `{COMMAND}`.\n\n{errors}\n{more}\n", encoding="utf-8")
        for name in PAGES:
            path = ROOT / name
            path.write_text(rewritten(path.read_text(encoding="utf-8"), errors), encoding="utf-8")


if __name__ == "__main__":
    main()
