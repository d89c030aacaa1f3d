"""Charts of simulated fleets: completion times, use, queue and money over time, use of the links, a map."""

import csv
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from farpipe.fleet.outcome import Allocation, FleetOutcome
from farpipe.report.fleet import HOUR_S, levels, queue_levels
from farpipe.report.pyplot import load_pyplot, save_figure

Location = tuple[float, float]
"""Latitude and longitude in degrees."""
LINKS_SHOWN: Final = 12
POINTS: Final = 400
"""Points along the axis of time."""


def draw_charts(
    outcomes: Sequence[FleetOutcome], path: Path | str, locations: Mapping[str, Location] | None = None
) -> None:
    """Six panels; the last two, links and map, are of the last outcome.

    Sites without a location in `locations` lie on a circle.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(3, 2, figsize=(13, 12), layout="constrained")
    palette = pyplot.get_cmap("tab20")
    for index, outcome in enumerate(outcomes):
        style = {"color": palette(2 * index % 20 + (2 * index // 20) % 2), "label": outcome.policy, "linewidth": 1.4}
        _draw_completion(axes[0][0], outcome, style)
        _draw_over_time(axes[0][1], axes[1][0], outcome, style)
        _draw_money(axes[1][1], outcome, outcomes, style)
    _draw_links(axes[2][0], outcomes[-1])
    _draw_map(axes[2][1], outcomes[-1], dict(locations or {}))
    axes[0][0].legend(fontsize=8)
    save_figure(figure, path, dpi=110)
    pyplot.close(figure)


def _draw_completion(axis: Any, outcome: FleetOutcome, style: Mapping[str, Any]) -> None:
    hours = [seconds / HOUR_S for seconds in outcome.jcts_s]
    axis.step(hours, [(index + 1) / len(hours) for index in range(len(hours))], where="post", **style)
    axis.set(xscale="log", xlabel="completion time, h", ylim=(0, 1.02))
    _title(axis, "share of the finished jobs that took no longer")


def _draw_over_time(use: Any, queue: Any, outcome: FleetOutcome, style: Mapping[str, Any]) -> None:
    total = sum(outcome.num_devices.values())
    times_s, held = levels(outcome.changes, lambda change: sum(change.devices.values()))
    use.step([t / HOUR_S for t in times_s], [number / total for number in held], where="post", **style)
    use.set(ylim=(0, 1.02))
    _title(use, "share of all devices in use")
    times_s, waiting = queue_levels(outcome)
    queue.step([t / HOUR_S for t in times_s], waiting, where="post", **style)
    _title(queue, "devices that queued jobs want at least")
    for axis in (use, queue):
        axis.set_xlabel("hours")


def _draw_money(axis: Any, outcome: FleetOutcome, outcomes: Sequence[FleetOutcome], style: Mapping[str, Any]) -> None:
    """Money over time; of several policies what each has spent more than the first one, as they do the same work."""
    begin_s, end_s = min(one.begin_s for one in outcomes), max(one.end_s for one in outcomes)
    grid_s = [begin_s + (end_s - begin_s) * i / POINTS for i in range(POINTS + 1)]
    spent, first = spent_usd(outcome, grid_s), spent_usd(outcomes[0], grid_s)
    several = len(outcomes) > 1
    usd = [mine - its for mine, its in zip(spent, first, strict=True)] if several else spent
    axis.plot([t / HOUR_S for t in grid_s], [figure / 1e3 for figure in usd], **style)
    axis.set_xlabel("hours")
    less = f", less what {outcomes[0].policy} has spent" if several else ""
    _title(axis, f"rent, electricity and egress so far{less}, thousand USD")


def spent_usd(outcome: FleetOutcome, times_s: Sequence[float]) -> list[float]:
    """Money of all jobs up to each of `times_s`; between two changes of a job its bill grows evenly."""
    import numpy as np

    bills: dict[str, list[Allocation]] = {}
    for change in outcome.changes:
        bills.setdefault(change.job, []).append(change)
    total = np.zeros(len(times_s))
    for found in bills.values():
        total += np.interp(times_s, [change.time_s for change in found], [change.usd for change in found])
    return [float(usd) for usd in total]


def link_use(outcome: FleetOutcome) -> dict[str, tuple[float, float]]:
    """Mean and largest share of every directed link's rate that jobs had reserved; links that nobody used left out."""
    found: dict[str, tuple[float, float]] = {}
    for link, rate in outcome.link_bytes_per_s.items():
        times_s, reserved = levels(outcome.changes, lambda change, link=link: change.rates.get(link, 0.0))  # type: ignore[misc]
        ends_s = [*times_s[1:], outcome.end_s]
        area = sum(level * (end - begin) for begin, end, level in zip(times_s, ends_s, reserved, strict=True))
        most = max(reserved, default=0.0)
        if rate > 0 and most > 1.0:
            found[link] = area / rate / max(outcome.end_s - outcome.begin_s, 1e-9), most / rate
    return found


def _draw_links(axis: Any, outcome: FleetOutcome) -> None:
    used = sorted(link_use(outcome).items(), key=lambda pair: -pair[1][0])[:LINKS_SHOWN][::-1]
    rows = range(len(used))
    axis.barh(rows, [most for _, (_, most) in used], color="tab:blue", alpha=0.25, label="largest")
    axis.barh(rows, [mean for _, (mean, _) in used], color="tab:blue", label="mean")
    axis.set_yticks(rows, [link.replace(">", " > ") for link, _ in used], fontsize=8)
    axis.set(xlim=(0, 1.02), xlabel="reserved share of the link's rate")
    _title(axis, f"{outcome.policy}: links" + ("" if used else ": none was used"))
    if used:
        axis.legend(fontsize=8, loc="lower right")


def _draw_map(axis: Any, outcome: FleetOutcome, locations: dict[str, Location]) -> None:
    """A circle for each site, its colour the share of its device-hours in use; a line for each link, the wider the more
    was sent over it."""
    places = _placed(outcome.num_devices, locations)
    sent = outcome.spent.sent_bytes
    most = max(sent.values(), default=0.0)
    for link in outcome.link_bytes_per_s:
        (y1, x1), (y2, x2) = (places[site] for site in link.split(">"))
        share = sent.get(link, 0.0) / most if most else 0.0
        line = {"arrowstyle": "-", "connectionstyle": "arc3,rad=0.12", "color": "tab:red" if share else "lightgrey"}
        axis.annotate("", (x2, y2), (x1, y1), arrowprops=line | {"linewidth": 0.4 + 3.5 * share, "zorder": 1})
    span_s = max(outcome.end_s - outcome.begin_s, 1e-9)
    held = outcome.spent.device_s
    use = {site: held.get(site, 0.0) / (number * span_s) for site, number in outcome.num_devices.items()}
    largest = max(outcome.num_devices.values())
    sizes = [60 + 340 * outcome.num_devices[site] / largest for site in places]
    points = axis.scatter(
        [x for _, x in places.values()], [y for y, _ in places.values()], s=sizes, c=[use[site] for site in places],
        cmap="viridis", vmin=0, vmax=1, zorder=3, edgecolors="black",
    )  # fmt: skip
    for site, (y, x) in places.items():
        label = f"{site} {use[site]:.0%}"
        axis.annotate(label, (x, y), (0, 14), textcoords="offset points", ha="center", fontsize=8, zorder=4)
    axis.figure.colorbar(points, ax=axis, label="device-hours in use")
    axis.margins(0.15)
    known = all(site in locations for site in places)
    if known:
        _draw_coast(axis)
    axis.set(xlabel="longitude" if known else "", ylabel="latitude" if known else "")
    terabytes = sum(sent.values()) / 1e12
    _title(axis, f"{outcome.policy}: {terabytes:,.1f} TB between sites (lines), use of the sites (colour)")


def _draw_coast(axis: Any) -> None:
    """Coastlines below what is drawn already, whose limits stay."""
    limits = axis.get_xlim(), axis.get_ylim()
    for line in coastlines():
        axis.plot(*zip(*line, strict=True), color="#b0b0b0", linewidth=0.7, zorder=0)
    axis.set(xlim=limits[0], ylim=limits[1])


def coastlines() -> list[list[tuple[float, float]]]:
    """(longitude, latitude) along the coasts of the world but Antarctica: Natural Earth's 1:110m coastline (public
    domain, naturalearthdata.com), simplified to half a degree, islands below 2.5 degrees left out."""
    lines: dict[str, list[tuple[float, float]]] = {}
    text = (files("farpipe.catalog") / "coastlines.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        lines.setdefault(row["line"], []).append((float(row["longitude"]), float(row["latitude"])))
    return list(lines.values())


def _placed(sites: Mapping[str, int], locations: Mapping[str, Location]) -> dict[str, Location]:
    """Latitude and longitude of every site, or places on a circle if one of them has none."""
    if all(site in locations for site in sites):
        return {site: locations[site] for site in sites}
    turns = [2 * math.pi * index / len(sites) for index in range(len(sites))]
    return {site: (math.sin(turn), math.cos(turn)) for site, turn in zip(sites, turns, strict=True)}


def _title(axis: Any, text: str) -> None:
    axis.set_title(text, loc="left", fontsize=10)
