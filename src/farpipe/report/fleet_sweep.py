"""A picture of a grid of simulated fleets: times and money over the offered load."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from farpipe.report.pyplot import load_pyplot, save_figure

PANELS: Final = (
    ("mean_jct_s", "mean completion, h", 3600.0),
    ("p95_jct_s", "95 % completed within, h", 3600.0),
    ("electricity_usd", "electricity, USD", 1.0),
    ("total_usd", "all money, USD", 1.0),
)
LINES: Final = ("-", "--", ":", "-.")


def draw_sweep(rows: Sequence[dict[str, Any]], path: Path | str) -> None:
    """A panel for each figure; a colour for each policy, a style of line for each factor of the links' rates.

    Points are means over the seeds.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    policies, factors = (list(dict.fromkeys(row[name] for row in rows)) for name in ("policy", "bandwidth"))
    palette = pyplot.get_cmap("tab20")
    for axis, (column, title, unit) in zip(axes.flat, PANELS, strict=True):
        for index, policy in enumerate(policies):
            for style, factor in enumerate(factors):
                loads, values = _series(rows, policy, factor, column)
                label = policy if len(factors) == 1 else f"{policy}, links x {factor:g}"
                line = {"color": palette(index % 20), "linestyle": LINES[style % len(LINES)], "label": label}
                axis.plot(loads, [value / unit for value in values], marker="o", markersize=4, **line)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylim(bottom=0)
    for axis in axes[1]:
        axis.set_xlabel("offered load")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    save_figure(figure, path, dpi=120)
    pyplot.close(figure)


def _series(rows: Sequence[dict[str, Any]], policy: str, factor: float, column: str) -> tuple[list[float], list[float]]:
    """Loads and means over the seeds; a trace as it is stands at 0."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if (row["policy"], row["bandwidth"]) == (policy, factor) and row[column] is not None:
            found.setdefault(row["load"] or 0.0, []).append(row[column])
    return sorted(found), [fmean(found[load]) for load in sorted(found)]
