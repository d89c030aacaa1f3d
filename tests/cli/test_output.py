"""Progress where nobody watches a terminal: lines in a log, not too many; and files that may be replaced."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from farpipe.cli import output
from farpipe.cli.output import PacedLog, check_folder, console, progress_bar, search_status, status
from farpipe.core.errors import InputError
from farpipe.optical.traffic_outcome import request_rows
from farpipe.planning.search import Progress
from farpipe.report.light import light_rows
from farpipe.report.pyplot import load_pyplot, save_figure


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(output, "LINE_EVERY_S", 0.05)


def test_a_line_is_due_after_every_interval_and_not_before():
    now = 0.0
    pace = PacedLog(10.0, lambda: now)
    due = []
    for now in (0.0, 9.9, 10.0, 15.0, 19.9, 21.0, 50.0, 59.0):
        due += [now] * pace.due()
    assert due == [10.0, 21.0, 50.0]


@pytest.mark.parametrize("doing", [status("planning"), progress_bar("planning", "layout")])
def test_what_takes_long_is_told_while_it_lasts_and_at_its_end(capsys, doing):
    with doing:
        time.sleep(0.2)
        begun = capsys.readouterr().err
    assert begun == "planning ...\n"
    assert capsys.readouterr().err.startswith("planning: done after ")


def test_what_is_quick_is_not_told(capsys):
    with status("planning"):
        pass
    time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_a_long_plan_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(PacedLog, "due", lambda self: True)
    with progress_bar("planning", "layout") as advance:
        advance(3, 262)
        advance(35, 0)
    with search_status("searching") as tell:
        tell(Progress("local", 1.0, 2.0, 1.5))
        tell(Progress("exact", 1.0, float("inf"), 1.5))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("planning: 3 of 262 layouts, ")
    assert lines.pop(1).startswith("planning: 35 layouts, ")
    assert lines[1].startswith("searching: local, makespan 2.00 s, lower bound 1.50 s, ")
    assert lines[2].startswith("searching: exact, lower bound 1.50 s, ")


@pytest.mark.parametrize(("columns", "width"), [("72", 72), ("", 140), ("wide", 140), ("0", 140)])
def test_a_pipe_is_as_wide_as_columns_says(monkeypatch, capsys, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert console().width == width


@pytest.mark.parametrize("name", ["picture.svg", "picture.png", "requests.csv", "paths.csv", "events.jsonl"])
def test_pictures_and_logs_of_an_earlier_time_may_be_replaced(name, tmp_path):
    path = tmp_path / name
    if name.startswith("picture"):
        save_figure(load_pyplot().figure(), path, dpi=20)
    else:
        first = {
            "requests.csv": next(request_rows(SimpleNamespace(traffic=None), None)),
            "paths.csv": next(light_rows(None, None, [])),
            "events.jsonl": json.dumps({"time_s": 0.0, "event": "submitted"}),
        }[name]
        path.write_text(first + "\n")
    check_folder(path)
    path.write_bytes(b"mine" + path.read_bytes())
    with pytest.raises(InputError, match=rf"{name}: exists and is not a farpipe result"):
        check_folder(path)


def test_an_empty_file_and_a_device_are_written_to(tmp_path):
    (tmp_path / "empty.html").touch()
    check_folder(tmp_path / "empty.html", Path("/dev/null"))
