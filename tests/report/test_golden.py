"""Small pictures and traces, kept as files so that a change of how they look is seen in review.

To write them anew after a wanted change: GOLDEN=write python -m pytest tests/report/test_golden.py
"""

import json
import os
from pathlib import Path

import pytest

from farpipe.report.gantt import Panel, draw_gantt, draw_small_multiples
from farpipe.report.trace import trace
from report.steps import as_measured, play, sites_of, two_sites

GOLDEN = Path(__file__).parent / "golden"


def gantt():
    problem, slower = two_sites(2, 3, sync=True), two_sites(2, 3, sync=True, latency_s=0.75)
    panels = [
        Panel("predicted", play(problem), sites_of(2), "latency 0.5 s"),
        Panel("measured", as_measured(play(slower)), sites_of(2), "latency 0.75 s"),
    ]
    return draw_gantt(panels).svg()


def small_multiples():
    problem = two_sites(4, 6)
    return draw_small_multiples([Panel(name, play(problem, name)) for name in ("gpipe", "1f1b", "eager")]).svg()


def small_trace():
    timeline = play(two_sites(2, 2))
    events = trace({"predicted": timeline, "measured": as_measured(timeline)})["traceEvents"]
    return "[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n"


@pytest.mark.parametrize(
    ("name", "make"),
    [("gantt.svg", gantt), ("small_multiples.svg", small_multiples), ("trace.json", small_trace)],
)
def test_what_is_drawn_is_what_was_approved(name, make):
    path, text = GOLDEN / name, make()
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    same = path.read_text(encoding="utf-8") == text
    assert same, f"{path} differs; look at both, and if the change is wanted: see the top of this file"
