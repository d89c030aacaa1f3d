"""The part of the timelines that a Gantt chart draws, and its layout: time window, ranks, links and sizes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.simulate import Slack, slack
from farpipe.core.simulate.events import waits
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.step import KINDS
from farpipe.report.axis import TIME, AxisTick, Scale, duration, moment, ticks

MAX_BOXES: Final = 2500
"""Actions and messages drawn per panel; several panels share three times as many."""
MIN_BOX_PX: Final = 3.0
"""Mean width of a box below which the time window is cut."""
MAX_RANKS: Final = 64
MAX_LINKS: Final = 12
FEW_LINKS: Final = 8
"""Links inside sites are drawn only when there are at most this many links in all."""

CRITICAL: Final = "critical"
SPARE: Final = "spare"

WIDTH_PX: Final = 1080.0
GUTTER_PX: Final = 132.0
"""Room for labels at the left."""
RANKS_PX: Final = 66.0
"""Room for the names of low rows, beside the titles."""
MARGIN_PX: Final = 24.0


@dataclass(frozen=True)
class Panel:
    """One timeline of a chart.

    `sites` names the site of every rank, if that is known; `text` is a short remark beside the title.
    """

    title: str
    timeline: Timeline
    sites: tuple[str, ...] = ()
    text: str = ""

    @cached_property
    def waits(self) -> NDArray[np.void]:
        """Every exposed wait."""
        return waits(self.timeline)

    @cached_property
    def slack(self) -> Slack | None:
        """The slack of a predicted step; what was measured shared its links otherwise than slack supposes."""
        return slack(self.timeline) if self.timeline.source == "predicted" else None

    @cached_property
    def slack_classes(self) -> NDArray[np.str_]:
        """Class of each message's box: CRITICAL, SPARE (it could take twice as long) or neither."""
        messages = self.timeline.messages
        if self.slack is None:
            return np.full(len(messages), "")
        is_spare = self.slack.messages_s >= messages["arrival_s"] - messages["start_s"]
        return np.where(self.slack.critical_messages, CRITICAL, np.where(is_spare, SPARE, ""))

    def rank_name(self, rank: int) -> str:
        """``zurich 0``, or ``rank 0`` where sites are not known."""
        return f"{self.sites[rank] if rank < len(self.sites) else 'rank'} {rank}"

    def begins_site(self, rank: int) -> bool:
        """True if `rank` is the first of its site, or the site is another than the rank's before."""
        return rank < len(self.sites) and (rank == 0 or self.sites[rank] != self.sites[rank - 1])


@dataclass(frozen=True)
class GanttFrame:
    """The choices that all panels of one chart share; times in seconds, sizes in pixels."""

    key: str
    low: float
    high: float
    whole: tuple[float, float]
    ranks: tuple[int, ...]
    links: tuple[str, ...]
    compact: bool = False
    left_out: tuple[str, ...] = field(default=())
    width: float = WIDTH_PX

    @cached_property
    def scale(self) -> Scale:
        """Time to pixels."""
        left = GUTTER_PX + RANKS_PX * self.compact
        return Scale(self.low, self.high, left, self.width - MARGIN_PX)

    @cached_property
    def ticks(self) -> list[AxisTick]:
        """The ticks of the time axis."""
        return ticks(self.low, self.high, TIME, 10)

    @property
    def is_cut(self) -> bool:
        """True if only a part of the step is drawn."""
        return self.low > self.whole[0] or self.high < self.whole[1]

    @property
    def row_px(self) -> float:
        """Height of a rank's row."""
        num_ranks = len(self.ranks)
        if self.compact:
            return max(2.0, min(8.0, 44 / num_ranks - 1))
        return next((height for most, height in ((8, 22.0), (16, 18.0), (32, 14.0)) if num_ranks <= most), 11.0)

    @property
    def gap_px(self) -> float:
        """Space between rows."""
        return 1.0 if self.compact or len(self.ranks) > 16 else 3.0

    @property
    def font_px(self) -> float:
        """Size of the numbers inside boxes; 0: none."""
        return 0.0 if self.compact else min(10.0, self.row_px - 2)

    def within(self, events: NDArray[np.void], until: str) -> NDArray[np.void]:
        """Events that the time window shows; field `until` has their ends."""
        return events[self.shows(events, until)]

    def shows(self, events: NDArray[np.void], until: str) -> NDArray[np.bool_]:
        """Mask of those `events` that the time window shows."""
        return np.asarray((events[until] >= self.low) & (events["start_s"] <= self.high))

    def visible(self, waited: NDArray[np.void]) -> NDArray[np.void]:
        """Waits that are in the window and long enough to be seen."""
        seconds_per_px = (self.high - self.low) / (self.scale.end - self.scale.start)
        return self.within(waited[waited["end_s"] - waited["start_s"] > 0.5 * seconds_per_px], "end_s")


def choose_frame(
    panels: Sequence[Panel], window: tuple[float, float] | None, key: str, compact: bool = False, zoom: int = 1
) -> GanttFrame:
    """Choose what to draw of `panels`; without `window` as much of them as can be distinguished."""
    timelines = [panel.timeline for panel in panels]
    extents = [extent(timeline) for timeline in timelines]
    outer = [end for timeline in timelines for came in timeline.outer for end in (came.arrival_s, came.needed_s)]
    whole = (min(0.0, *(low for low, _ in extents)), max([*(high for _, high in extents), *outer]))
    ranks = spaced(max(timeline.num_ranks for timeline in timelines), MAX_RANKS)
    links, num_links = ((), 0) if compact else _choose_links(timelines)
    low, high = window or _fitting_window(timelines, ranks, links, whole, zoom)
    frame = GanttFrame(key, low, high, whole, ranks, links, compact)
    return GanttFrame(key, low, high, whole, ranks, links, compact, tuple(_left_out(frame, timelines, num_links)))


def fitting_window(panels: Sequence[Panel], zoom: int) -> tuple[float, float]:
    """The (from, until) in seconds that one chart of all these panels would draw; for charts of one scale.

    `zoom`: factor by which the chart can be enlarged; it may show that much more detail.
    """
    frame = choose_frame(panels, None, "", zoom=zoom)
    return frame.low, frame.high


def extent(timeline: Timeline) -> tuple[float, float]:
    """Start of the first and end of the last action or collective; other messages are not part of the step."""
    collectives = timeline.messages[timeline.messages["microbatch"] < 0]
    starts = np.concatenate([collectives["ready_s"], timeline.actions["start_s"]])
    ends = np.concatenate([collectives["arrival_s"], timeline.actions["end_s"]])
    return (float(starts.min()), float(ends.max())) if starts.size else (0.0, 0.0)


def spaced(total: int, most: int) -> tuple[int, ...]:
    """Indices of ``range(total)``, at most `most`, evenly spaced, the first and the last among them."""
    return tuple(sorted({round(i) for i in np.linspace(0, total - 1, min(total, most))}))


def _choose_links(timelines: Sequence[Timeline]) -> tuple[tuple[str, ...], int]:
    """(names to draw, number of links that carried anything); those between sites come first."""
    used: dict[str, bool] = {}
    for timeline in timelines:
        carried = np.unique(timeline.messages["link"])
        names = [timeline.links[index] for index in carried[carried >= 0]]
        used |= {name: timeline.is_between_sites(name) for name in names}
    names = sorted(used, key=lambda name: not used[name])
    drawn = names if len(names) <= FEW_LINKS else [name for name in names if used[name]]
    return tuple(drawn[:MAX_LINKS]), len(names)


def _fitting_window(
    timelines: Sequence[Timeline], ranks: Sequence[int], links: Sequence[str], whole: tuple[float, float], zoom: int
) -> tuple[float, float]:
    """The beginning of the step; its middle, if the beginning ends before every rank has begun a backward."""
    rows = [list(_rows(timeline, ranks, links)) for timeline in timelines]
    end = _fitting_end(rows, *whole, zoom)
    if end == whole[1] or end > max(_pipeline_is_full_s(timeline) for timeline in timelines):
        return whole[0], end
    middle = (whole[0] + whole[1]) / 2
    return middle, _fitting_end(rows, middle, whole[1], zoom)


def _pipeline_is_full_s(timeline: Timeline) -> float:
    """Time at which the last of the ranks begins its first backward."""
    backward = timeline.actions[timeline.actions["kind"] != KINDS.index("F")]
    _, first = np.unique(backward["rank"], return_index=True)
    return float(backward["start_s"][first].max(initial=0.0))


def _fitting_end(panels: Sequence[Sequence[NDArray[np.float64]]], start: float, end: float, zoom: int) -> float:
    """The latest time until which, from `start`, no panel has too many boxes and no row too narrow ones."""
    most = zoom * min(MAX_BOXES, 3 * MAX_BOXES // len(panels))
    per_row = int(zoom * (WIDTH_PX - GUTTER_PX - MARGIN_PX) / MIN_BOX_PX)
    for rows in panels:
        for starts, limit in [(np.concatenate(rows), most), *((row, per_row) for row in rows)]:
            later = starts[starts >= start]
            if later.size > limit:
                end = min(end, float(np.partition(later, limit)[limit]))
    return end


def _rows(timeline: Timeline, ranks: Sequence[int], links: Sequence[str]) -> Iterator[NDArray[np.float64]]:
    """The starts of everything in every row."""
    for rank in ranks:
        yield timeline.actions["start_s"][timeline.actions["rank"] == rank]
    for name in links:
        if name in timeline.links:
            yield timeline.messages["start_s"][timeline.messages["link"] == timeline.links.index(name)]


def _left_out(frame: GanttFrame, timelines: Sequence[Timeline], num_links: int) -> Iterator[str]:
    if frame.is_cut:
        finest = frame.high - frame.low
        yield (
            f"Drawn: {moment(frame.low, finest)} to {moment(frame.high, finest)} "
            f"of {duration(frame.whole[1] - frame.whole[0])}; the strip below shows the whole step."
        )
    num_ranks = max(timeline.num_ranks for timeline in timelines)
    if num_ranks > len(frame.ranks):
        yield f"Drawn: {len(frame.ranks)} of {num_ranks} ranks, evenly spaced."
    if not frame.compact and num_links > len(frame.links):
        kind = "links inside sites" if len(frame.links) < MAX_LINKS else "links"
        yield f"Not drawn: {num_links - len(frame.links)} more {kind} that carried messages."
