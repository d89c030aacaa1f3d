"""The table of what happened to the links in a run: outages, reconnections, bursts of retransmitted packets."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from farpipe.report.views import TableView
from farpipe.transport.link_events import event_text

MAX_ROWS: Final = 40
_COLUMNS: Final = ("step", "time (UTC)", "link", "processes", "event")


def link_event_view(metrics: Sequence[Mapping[str, Any]], run: str = "") -> TableView | None:
    """The events in the lines of metrics.jsonl, the newest MAX_ROWS of them; None when there are none.

    `run` names the run in the title where there are several.
    """
    rows = [_row(line["step"], event) for line in metrics for event in line.get("link_events", ())]
    if not rows:
        return None
    left_out = len(rows) - MAX_ROWS
    note = f"The newest {MAX_ROWS} of {len(rows)} events; metrics.jsonl has all." if left_out > 0 else ""
    return TableView(
        f"Link events{run and ' of '}{run}",
        _COLUMNS,
        tuple(rows[-MAX_ROWS:]),
        frozenset({0}),
        note=note,
        expendable=(1,),
    )


def _row(step: int, event: Mapping[str, Any]) -> tuple[str, ...]:
    time = datetime.fromtimestamp(event["unix_s"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    return str(step), time, event.get("link", "-"), f"{event['process']} to {event['peer']}", event_text(event)
