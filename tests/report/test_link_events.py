"""The table of link events, and the page that has it."""

from farpipe.engine.figures.metrics import event_sentence
from farpipe.report.summary import MAX_EVENTS, link_event_view

OUTAGE = {"process": 0, "link": "west>east", "kind": "outage", "unix_s": 0.0, "peer": 2, "reason": "it was closed"}
BACK = OUTAGE | {"kind": "reconnection", "unix_s": 10.0, "duration_s": 10.0, "num_connections": 9, "resent_frames": 4}


def test_a_run_without_events_has_no_table():
    assert link_event_view([{"step": 0}, {"step": 1}]) is None


def test_every_event_has_its_step_time_link_processes_and_words():
    table = link_event_view([{"step": 0}, {"step": 7, "link_events": [OUTAGE, BACK]}])
    assert table.rows == (
        ("7", "1970-01-01 00:00:00", "west>east", "0 to 2", "outage (it was closed)"),
        (
            "7",
            "1970-01-01 00:00:10",
            "west>east",
            "0 to 2",
            "back after 10.0 s: 9 connections, 4 frames (0 B) sent again",
        ),
    )


def test_of_very_many_events_the_newest_are_shown_and_the_rest_counted():
    table = link_event_view([{"step": step, "link_events": [OUTAGE]} for step in range(100)])
    assert [row[0] for row in table.rows] == [str(step) for step in range(100 - MAX_EVENTS, 100)]
    assert "of 100 events" in table.note


def test_a_sentence_for_the_log():
    assert event_sentence(OUTAGE) == "link west>east, process 0 to 2: outage (it was closed)"


def test_the_events_of_one_run_among_several_have_its_name():
    metrics = [{"step": 1, "link_events": [OUTAGE]}]
    assert link_event_view(metrics, "1f1b").title == "Link events of 1f1b"
