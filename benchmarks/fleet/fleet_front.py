"""Completion time against money as `hour_value` of `farpipe` varies: python -m benchmarks.fleet.fleet_front PICTURE.png

Regions and jobs of bace_setting with rigid and with elastic sizes, where electricity is all money, and the first window
of fleet_limits (Philly's jobs of 8 GPUs and more, elastic sizes, listed rents, load 0.9). Means over draws; the window
is one simulation. FARPIPE_DATA names the folder with jobs/, prices/ and wan/.
"""

import argparse
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.fleet import bace_setting, fleet_limits
from benchmarks.fleet.baselines import COMPARED
from benchmarks.fleet.fleet_case import DEVICES, REGIONS, jobs_of, scenario
from benchmarks.fleet.fleet_comparison import figures
from benchmarks.fleet.fleet_tables import head, line, named
from benchmarks.fleet.fleet_traces import at_load
from farpipe.fleet.play import play
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.protocol import Policy
from farpipe.report.pyplot import load_pyplot, save_figure

HOUR_VALUES: Final = (0.0, 8.0, 32.0, 128.0, 512.0, 1e9)
OTHERS: Final = ("bace", "srtf", "sjf", "easy", "cr-lcf", "cr-ldf")
LOAD: Final = 0.9


class Point(NamedTuple):
    """Means of one policy in one case."""

    mean_h: float
    electricity_usd: float
    total_usd: float


Case = Callable[[Policy], Point]


def policies() -> Iterator[tuple[str, Policy]]:
    """`farpipe` by its `hour_value`, and the others."""
    for value in HOUR_VALUES:
        yield f"farpipe, {value:g}", replace(FarpipePolicy(), hour_value=value)
    yield from ((name, COMPARED[name]) for name in OTHERS)


def of_setting(elastic: bool, draws: int, shared: dict[int, Any], policy: Policy) -> Point:
    """Of the regions of BACE-Pipe's setting: without rent and egress."""
    rows = [bace_setting.row(draw, 24, 1.0, elastic, policy, shared) for draw in range(draws)]
    usd = statistics.fmean(row["electricity"] for row in rows)
    return Point(statistics.fmean(row["mean_h"] for row in rows), usd, usd)


def of_window(policy: Policy) -> Point:
    """Of one window of a trace."""
    raw = at_load(fleet_limits.raw_jobs(fleet_limits.TRACES[0], 0), len(REGIONS) * DEVICES, LOAD)
    jobs = jobs_of(raw, fleet_limits.STEPS)
    outcome = play(scenario(), jobs, policy, quotes=fleet_limits.QUOTES(DEVICES), tick_s=0.0)
    row = figures(outcome)
    return Point(row["mean_h"], row["electricity_usd"], row["total_usd"])


def table(found: Mapping[str, Mapping[str, Point]]) -> None:
    """Rows by policy; of every case JCT, electricity and, where that is not all, all money."""
    head("policy", *(f"{case}: mean JCT h / electricity / all money, USD" for case in found))
    for name in next(iter(found.values())):
        points = [of_case[name] for of_case in found.values()]
        shown = [f"{p.mean_h:.2f} / {p.electricity_usd:,.0f} / {p.total_usd:,.0f}" for p in points]
        line([named(name) if name in OTHERS else name.replace("farpipe, ", "`farpipe`, "), *shown])


def draw(found: Mapping[str, Mapping[str, Point]], path: Path) -> None:
    """A panel for every case: `farpipe` as a line, the others as points."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(found), figsize=(4.8 * len(found), 4.4), layout="constrained")
    for axis, (case, points) in zip(axes, found.items(), strict=True):
        ours = [point for name, point in points.items() if name not in OTHERS]
        axis.plot([p.total_usd for p in ours], [p.mean_h for p in ours], "o-", color="tab:blue")
        others = [points[name] for name in OTHERS]
        axis.plot([p.total_usd for p in others], [p.mean_h for p in others], "x", color="black")
        for words, point in labels(points).items():
            is_ours = words.split(", ")[0] not in OTHERS
            style = {"fontsize": 8, "ha": "center", "color": "tab:blue" if is_ours else "black"}
            style |= {"va": "bottom", "xytext": (0, 5)} if is_ours else {"va": "top", "xytext": (0, -5)}
            words = textwrap.fill(words, 20, break_on_hyphens=False)
            axis.annotate(words, (point.total_usd, point.mean_h), textcoords="offset points", **style)
        axis.set_title(case, loc="left", fontsize=10)
        axis.set(xlabel="all money, USD", ylabel="mean completion time, h")
        axis.xaxis.set_major_locator(pyplot.MaxNLocator(5))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.margins(0.15)
    axes[0].legend(["farpipe, by hour_value", "other policies"], fontsize=8)
    save_figure(figure, path, dpi=110)


def labels(points: Mapping[str, Point]) -> dict[str, Point]:
    """Names, those of points that nearly coincide as one, each with the first one's place."""
    usd, hours = ([getattr(p, key) for p in points.values()] for key in ("total_usd", "mean_h"))
    wide, high = max(usd) - min(usd), max(hours) - min(hours)
    groups = list[tuple[list[str], Point]]()
    for name, point in points.items():
        near = (
            names
            for names, other in groups
            if abs(other.total_usd - point.total_usd) < 0.15 * wide and abs(other.mean_h - point.mean_h) < 0.1 * high
            if (names[0] in OTHERS) == (name in OTHERS)
        )
        shown = name.removeprefix("farpipe, ").replace("1e+09", "1e9")
        if (names := next(near, None)) is not None:
            names.append(shown)
        else:
            groups.append(([shown], point))
    return {", ".join(names): point for names, point in groups}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("--draws", type=int, default=10)
    given = parser.parse_args()
    cases: dict[str, Case] = {
        f"bace_setting, {word} sizes": partial(of_setting, elastic, given.draws, {})
        for word, elastic in (("rigid", False), ("elastic", True))
    }
    cases["a window of fleet_limits"] = of_window
    found = {case: {name: run(policy) for name, policy in policies()} for case, run in cases.items()}
    table(found)
    draw(found, given.picture)


if __name__ == "__main__":
    main()
