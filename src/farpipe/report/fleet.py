"""Pictures of a simulated fleet: who had which devices, who was stopped or moved, prices, and who waited."""

from collections.abc import Callable, Mapping, Sequence
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
    mean = outcome.to_data()["mean_jct_s"] or 0.0
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
    """Devices that queued jobs want, and those that nobody has: where both are high, the head of the line blocks."""
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
