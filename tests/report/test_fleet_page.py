"""A page on policies side by side, and their figures as CSV: every policy beside the first, today's."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from browsing import AXE, BROWSER, Chromium
from farpipe.cli.app import app
from farpipe.fleet.job import FleetJob, JobState, Spent, timed_kind
from farpipe.fleet.outcome import FleetOutcome, JobRecord
from farpipe.fleet.policies import ABOUT
from farpipe.report.fleet_page import beside_today, best_of, fleet_csv, fleet_page, verdict_lines


def outcome(policy, jcts_s, *, usd=100.0, carbon_g=2e6, unpriced=None):
    """Jobs that took so long, and one that did not finish for each None."""
    records = []
    for number, jct_s in enumerate(jcts_s):
        job = FleetJob(f"job {number}", timed_kind(8), 0.0, 3600, 8, 8)
        spent = Spent(rent_usd={"a": usd / len(jcts_s)}, carbon_g={"a": carbon_g / len(jcts_s)})
        records.append(JobRecord(job, final=JobState(job, spent=spent), finished_s=jct_s))
    return FleetOutcome(policy, records, 0.0, 7200.0, {"a": 16}, {}, {}, unpriced=unpriced or {})


FLEET = """
[clock]
start = "2024-01-01T00:00:00"
[[sites]]
name = "a"
device = "a100-80gb"
num_devices = 8
"""
TODAY, BETTER = outcome("easy", [3600.0, 3600.0]), outcome("farpipe", [1800.0, 3600.0], usd=130.0, carbon_g=5e5)


def test_the_verdict_says_what_the_best_is_worth_beside_today():
    first, second = verdict_lines([TODAY, BETTER])
    assert first == (
        "farpipe instead of easy, today's policy: mean completion time -25.0 %, money +$30.00, carbon -1.50 t."
    )
    assert second.startswith("Over 2 jobs in 2 h 00 min: farpipe has the least mean completion time")
    assert verdict_lines([BETTER, TODAY])[0] == ("Today's policy, farpipe, has the shortest mean completion time.")


def test_of_policies_that_tie_in_time_the_cheaper_one_is_the_best():
    cheap = outcome("bace", [3600.0, 3610.0], usd=90.0)
    assert best_of([TODAY, cheap]) is cheap
    assert verdict_lines([TODAY, cheap])[0].endswith("mean completion time +0.1 %, money -$10.00, carbon 0.")
    assert best_of([TODAY, outcome("sjf", [3600.0, 3600.0])]) is TODAY


def test_who_leaves_jobs_undone_is_not_the_best():
    assert best_of([TODAY, outcome("sjf", [60.0, None])]) is TODAY
    assert best_of([outcome("sjf", [None])]) is None
    assert verdict_lines([outcome("sjf", [None]), outcome("easy", [None])])[0].endswith("no policy finished one.")


def test_the_table_has_money_and_carbon_beside_today():
    view = beside_today([TODAY, BETTER])
    assert view.rows == (
        ("easy (today)", "2 of 2", "1 h 00 min", "-", "$100", "-", "2.00 t", "-"),
        ("farpipe", "2 of 2", "45 min 00 s", "-25.0 %", "$130", "+$30.00", "500.0 kg", "-1.50 t"),
    )
    assert view.chosen == 1


def test_what_is_unknown_is_empty_and_no_difference():
    unknown = {kind: frozenset("a") for kind in ("rent", "electricity", "egress", "carbon")}
    both = [outcome(name, [60.0], unpriced=unknown) for name in ("easy", "fcfs")]
    assert beside_today(both).rows[1][4:] == ("-",) * 4
    row = next(csv.DictReader(io.StringIO(fleet_csv(both))))
    assert (row["total_usd"], row["carbon_t"], row["usd_beside_today"]) == ("", "", "")


def test_the_csv_has_a_row_for_every_policy_in_plain_units():
    rows = list(csv.DictReader(io.StringIO(fleet_csv([TODAY, BETTER]))))
    assert [row["policy"] for row in rows] == ["easy", "farpipe"]
    assert float(rows[1]["mean_jct_s"]) == 2700
    assert float(rows[1]["usd_beside_today"]) == pytest.approx(30)
    assert float(rows[1]["carbon_t_beside_today"]) == pytest.approx(-1.5)
    assert rows[1]["what_it_does"] == ABOUT["farpipe"]


def test_the_page_begins_with_the_verdict_and_describes_every_policy():
    page = fleet_page([TODAY, BETTER], ["Sums leave out b."])
    assert page.index("instead of easy") < page.index("<table")
    for name in ("easy", "farpipe"):
        assert ABOUT[name].split(";")[0].split(",")[0] in page
    assert "Sums leave out b." in page
    assert "data:image/svg+xml" in page
    assert "prefers-color-scheme: dark" in page


def test_the_command_writes_both_and_writes_them_again(tmp_path):
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        '[clock]\nstart = "2024-01-01T00:00:00"\n[[sites]]\nname = "a"\ndevice = "a100-80gb"\nnum_devices = 8\n'
    )
    jobs = tmp_path / "jobs.csv"
    jobs.write_text("job,submit_s,duration_s,devices\none,0,600,8\ntwo,10,600,8\nthree,20,60,8\n")
    html, figures = tmp_path / "fleet.html", tmp_path / "fleet.csv"
    command = ["fleet", "compare", str(fleet), "--jobs", str(jobs), "--policy", "fcfs,sjf", "--json"]
    for _ in range(2):
        found = CliRunner().invoke(app, [*command, "--html", str(html), "--csv", str(figures)])
        assert found.exit_code == 0, found.output
    assert [one["policy"] for one in json.loads(found.stdout)] == ["fcfs", "sjf"]
    assert "sjf instead of fcfs, today" in html.read_text()
    assert figures.read_text().startswith("policy,finished,jobs,")
    figures.write_text("my own\n")
    kept = CliRunner().invoke(app, [*command, "--csv", str(figures)])
    assert kept.exit_code != 0
    assert figures.read_text() == "my own\n"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None or AXE is None, reason="needs Chromium and axe-playwright-python")
def test_axe_finds_nothing_and_nothing_is_too_wide(tmp_path):
    page = tmp_path / "fleet.html"
    page.write_text(fleet_page([TODAY, BETTER], ["Sums leave out b."]))
    browser = Chromium(tmp_path)
    try:
        for width, scheme in [(390, "light"), (1280, "dark")]:
            browser.look(width, scheme)
            browser.go(page.as_uri())
            assert browser.violations() == []
            assert browser.too_wide() == []
        paper = browser.run("getComputedStyle(document.body).backgroundColor")
        assert paper == "rgb(20, 23, 28)"
    finally:
        browser.close()
