"""Pictures of simulated fleets: devices over time, stops, prices and waits; charts of several policies and a map."""

import csv
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from farpipe.fleet.outcome import Allocation, FleetOutcome
from farpipe.report.pyplot import load_pyplot, save_figure

HOUR_S = 3600.0
COLOURS = 20
MARKS: Final[Mapping[str, tuple[str, str]]] = {
    "preempt": ("x", "stopped"),
    "migrate": (">", "moved"),
    "resize": ("|", "resized"),
}
"""Marker and word of what ends a stretch of a job on its devices, by the name of the event."""

Bar = tuple[str, str, int, int, float, float, bool]
"""(site, job, first row, rows, begin, end, starting)."""


def draw_fleet(outcomes: Sequence[FleetOutcome], path: Path | str) -> None:
    """A Gantt of the sites for every outcome; below it prices of electricity, where they differ or change, and the
    devices that are waited for and those that are free."""
    pyplot = load_pyplot()
    heights = [[3.0, *([0.9] if has_prices(outcome) else []), 1.0] for outcome in outcomes]
    figure, axes = pyplot.subplots(
        *(sum(map(len, heights)), 1),
        figsize=(11, sum(map(sum, heights)) * 1.05),
        sharex=True,
        squeeze=False,
        height_ratios=[height for of_one in heights for height in of_one],
        layout="constrained",
    )
    colours = _colours(outcomes, pyplot.get_cmap("tab20"))
    wanted = [max(queue_levels(outcome)[1]) for outcome in outcomes]
    most = 1.05 * max(*wanted, *(sum(outcome.num_devices.values()) for outcome in outcomes))
    rows = iter(axes[:, 0])
    for outcome in outcomes:
        _draw_gantt(next(rows), outcome, colours)
        if has_prices(outcome):
            _draw_prices(next(rows), outcome)
        _draw_queue(next(rows), outcome, most)
    axes[-1][0].set_xlabel("hours")
    save_figure(figure, path, dpi=120)
    pyplot.close(figure)


def _colours(outcomes: Sequence[FleetOutcome], palette: Any) -> dict[str, Any]:
    names = dict.fromkeys(record.job.name for outcome in outcomes for record in outcome.records)
    return {name: palette(index % COLOURS) for index, name in enumerate(names)}


def has_prices(outcome: FleetOutcome) -> bool:
    """True if electricity does not cost the same everywhere and always."""
    return len({usd for series in outcome.prices.values() for _, usd in series}) > 1


def _draw_prices(axis: Any, outcome: FleetOutcome) -> None:
    """USD/MWh of every site, from the first submission to the last end."""
    for site, series in outcome.prices.items():
        before = [usd for time_s, usd in series if time_s <= outcome.begin_s][-1:] or [series[0][1]]
        shown = [(outcome.begin_s, before[0]), *((t, usd) for t, usd in series if outcome.begin_s < t < outcome.end_s)]
        times = [time_s / HOUR_S for time_s, _ in shown] + [outcome.end_s / HOUR_S]
        axis.step(times, [usd for _, usd in shown] + [shown[-1][1]], where="post", linewidth=0.9, label=site)
    axis.set_ylabel("USD/MWh")
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.4 * (high - low))  # room for the legend
    axis.legend(fontsize=7, loc="upper right", ncols=min(6, len(outcome.prices)))


def _draw_gantt(axis: Any, outcome: FleetOutcome, colours: Mapping[str, Any]) -> None:
    """Each site is a band as high as it has devices; a job's bars lie where there was room for them."""
    base, bases = 0, {}
    for site, number in outcome.num_devices.items():
        bases[site] = base
        base += number
    bars = _bars(outcome)
    for site, job, row, count, begin, end, starting in bars:
        style = {"facecolor": colours[job], "edgecolor": "white", "linewidth": 0.3, "alpha": 0.5 if starting else 1.0}
        axis.broken_barh([(begin / HOUR_S, (end - begin) / HOUR_S)], (bases[site] + row, count), **style)
    _draw_marks(axis, outcome, bars, bases)
    for low in bases.values():
        axis.axhline(low, color="black", linewidth=0.6)
    middles = [low + outcome.num_devices[site] / 2 for site, low in bases.items()]
    axis.set_yticks(middles, [f"{site}: {outcome.num_devices[site]}" for site in bases])
    mean = outcome.mean_jct_s or 0.0
    axis.set_title(f"{outcome.policy}: mean completion {mean / HOUR_S:.1f} h", loc="left", fontsize=10)
    axis.set_ylim(0, base)
    axis.set_ylabel("devices")


def _draw_marks(axis: Any, outcome: FleetOutcome, bars: Sequence[Bar], bases: Mapping[str, int]) -> None:
    """A mark where a job was stopped, moved or resized, on the first device that it had at each site."""
    ends = {(site, job, end): row for site, job, row, _, _, end, _ in reversed(bars)}
    for event, (marker, word) in MARKS.items():
        places = [
            (change.time_s / HOUR_S, bases[site] + row + 0.5)
            for change in outcome.changes
            if change.event == event
            for site in bases
            if (row := ends.get((site, change.job, change.time_s))) is not None
        ]
        if places:
            axis.scatter(
                *zip(*places, strict=True), marker=marker, s=16, color="black", linewidths=0.8, zorder=3, label=word
            )
    if any(change.event in MARKS for change in outcome.changes):
        axis.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(MARKS), frameon=False)


def _bars(outcome: FleetOutcome) -> list[Bar]:
    """Every stretch in which a job held devices of a site."""
    held: dict[tuple[str, str], tuple[list[int], float, bool]] = {}
    free = {site: list(range(number)) for site, number in outcome.num_devices.items()}
    found = []
    for change in outcome.changes:
        mine = [key for key in held if key[1] == change.job]
        for key in mine:
            rows, begin, starting = held.pop(key)
            found += [(*key, *run, begin, change.time_s, starting) for run in _runs(rows)]
            free[key[0]] = sorted(free[key[0]] + rows)
        for site, number in change.devices.items():
            rows, free[site] = free[site][:number], free[site][number:]
            held[site, change.job] = rows, change.time_s, change.is_starting
    return found


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of neighbouring rows."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][0] + runs[-1][1] == row:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((row, 1))
    return runs


def _draw_queue(axis: Any, outcome: FleetOutcome, most: float) -> None:
    """Devices that queued jobs want, and free ones: where both are high, the head of the queue blocks it."""
    times_s, wanted = queue_levels(outcome)
    hours = [time_s / HOUR_S for time_s in times_s]
    axis.fill_between(
        hours, wanted, step="post", color="tab:red", alpha=0.5, linewidth=0, label="wanted by queued jobs"
    )
    times_s, held = levels(outcome.changes, lambda change: sum(change.devices.values()))
    total = sum(outcome.num_devices.values())
    hours, free = [time_s / HOUR_S for time_s in times_s], [total - number for number in held]
    axis.step(hours, free, where="post", color="black", linewidth=0.8, label="free")
    axis.set_ylim(0, most)
    axis.set_ylabel("devices")
    axis.legend(fontsize=8, loc="upper right")


def levels(changes: Sequence[Allocation], value: Callable[[Allocation], float]) -> tuple[list[float], list[float]]:
    """(times, sum over all jobs of `value` of the newest change of each, from each time on)."""
    newest, total = dict[str, float](), 0.0
    times_s, sums = list[float](), list[float]()
    for change in changes:
        now = value(change)
        total += now - newest.get(change.job, 0.0)
        newest[change.job] = now
        times_s.append(change.time_s)
        sums.append(total)
    return times_s, sums


def queue_levels(outcome: FleetOutcome) -> tuple[list[float], list[int]]:
    """(times, from each on the devices that queued jobs want at least)."""
    steps: list[tuple[float, int]] = []
    for record in outcome.records:
        waiting = False
        for time_s, state in record.states:
            queued = state == "queued"
            if queued != waiting:
                steps.append((time_s, record.job.min_devices if queued else -record.job.min_devices))
            waiting = queued
    total, times_s, levels = 0, [0.0], [0]
    for time_s, change in sorted(steps, key=lambda step: (step[0], -step[1])):
        total += change
        times_s.append(time_s)
        levels.append(total)
    return times_s, levels


Location = tuple[float, float]
"""Latitude and longitude in degrees."""
LINKS_SHOWN: Final = 12
MAX_COLOURED: Final = 6
"""Most policies that charts tell apart by colours."""
Style = Mapping[str, Any]
POINTS: Final = 400
"""Points along the axis of time."""


def draw_charts(
    outcomes: Sequence[FleetOutcome], path: Path | str, locations: Mapping[str, Location] | None = None
) -> None:
    """Six panels; the last two, links and map, are of the last outcome.

    Of more outcomes than `MAX_COLOURED` those with the shortest mean completion time and the last one have colours, and
    the others are grey, cut off where they exceed these. Sites without a location in `locations` lie on a circle.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(3, 2, figsize=(13, 12), layout="constrained")
    panels, chosen = [axes[0][0], axes[0][1], axes[1][0], axes[1][1]], coloured(outcomes)
    palette, grey = pyplot.get_cmap("tab10"), [outcome for outcome in outcomes if outcome not in chosen]
    for index, outcome in enumerate(chosen):
        _draw_lines(panels, outcome, outcomes, {"color": palette(index), "label": outcome.policy, "linewidth": 1.4})
    for panel in panels if grey else ():
        panel.set(xlim=panel.get_xlim(), ylim=panel.get_ylim())
    names = textwrap.fill("grey: " + ", ".join(outcome.policy for outcome in grey), 28, break_on_hyphens=False)
    for outcome in grey:
        style = {"color": "#c8c8c8", "linewidth": 0.8, "zorder": 1, "label": names if outcome is grey[0] else None}
        _draw_lines(panels, outcome, outcomes, style)
    _draw_links(axes[2][0], outcomes[-1])
    _draw_map(axes[2][1], outcomes[-1], dict(locations or {}))
    axes[0][0].legend(fontsize=8)
    save_figure(figure, path, dpi=110)
    pyplot.close(figure)


def coloured(outcomes: Sequence[FleetOutcome]) -> list[FleetOutcome]:
    """Outcomes that have a colour in charts, in their order: the best in completion times, and the last one."""
    if len(outcomes) <= MAX_COLOURED:
        return list(outcomes)
    jcts = [outcome.jcts_s for outcome in outcomes]
    ranked = sorted(range(len(jcts)), key=lambda index: (-len(jcts[index]), sum(jcts[index])))
    chosen = {*ranked[: MAX_COLOURED - 1], len(outcomes) - 1}
    return [outcome for index, outcome in enumerate(outcomes) if index in chosen]


def _draw_lines(panels: Sequence[Any], one: FleetOutcome, outcomes: Sequence[FleetOutcome], style: Style) -> None:
    completion, use, queue, money = panels
    _draw_completion(completion, one, style)
    _draw_over_time(use, queue, one, style)
    _draw_money(money, one, outcomes, style)


def _draw_completion(axis: Any, outcome: FleetOutcome, style: Style) -> None:
    hours = [seconds / HOUR_S for seconds in outcome.jcts_s]
    shares = [index / len(hours) for index in range(len(hours) + 1)] if hours else []
    axis.step(hours[:1] + hours, shares, where="post", **style)
    axis.set(xscale="log", xlabel="completion time, h", ylim=(0, 1.02))
    _title(axis, "share of the finished jobs that took no longer")


def _draw_over_time(use: Any, queue: Any, outcome: FleetOutcome, style: Style) -> None:
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


def _draw_money(axis: Any, outcome: FleetOutcome, outcomes: Sequence[FleetOutcome], style: Style) -> None:
    """Money over time; of several policies what each has spent more than the first one, as they do the same work."""
    begin_s, end_s = min(one.begin_s for one in outcomes), max(one.end_s for one in outcomes)
    grid_s = [begin_s + (end_s - begin_s) * i / POINTS for i in range(POINTS + 1)]
    spent, first = spent_usd(outcome, grid_s), spent_usd(outcomes[0], grid_s)
    several = len(outcomes) > 1
    usd = [mine - its for mine, its in zip(spent, first, strict=True)] if several else spent
    axis.plot([t / HOUR_S for t in grid_s], [figure / 1e3 for figure in usd], **style)
    axis.set_xlabel("hours")
    less = f", less what {outcomes[0].policy} has spent" if several else ""
    less += "" if outcome.is_priced else " (no prices given)"
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
    """Mean and largest share of every directed link's rate that jobs had reserved; unused links are left out."""
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
    _draw_sites(axis, outcome, places)
    axis.margins(0.15)
    if all(site in locations for site in places):
        _draw_coast(axis)
        axis.set(xlabel="longitude", ylabel="latitude")
    else:
        axis.set(xticks=(), yticks=())
    terabytes = sum(sent.values()) / 1e12
    _title(axis, f"{outcome.policy}: {terabytes:,.1f} TB between sites (lines), use of the sites (colour)")


def _draw_sites(axis: Any, outcome: FleetOutcome, places: Mapping[str, Location]) -> None:
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
    text = (files("farpipe.core.catalog") / "coastlines.csv").read_text(encoding="utf-8")
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
