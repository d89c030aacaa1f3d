"""Outputs of the fleet's commands: what can't be written leaves all as it was."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farpipe.cli.app import app
from farpipe.core.errors import FarpipeError
from farpipe.fleet.job import FleetJob, JobState, Spent, timed_kind
from farpipe.fleet.outcome import FleetOutcome, JobRecord, verdict
from farpipe.fleet.policies import ABOUT, POLICIES

FLEET = """
[clock]
start = "2024-01-01T00:00:00"
[[sites]]
name = "a"
device = "a100-80gb"
num_devices = 16
electricity = 30.0
[[sites]]
name = "b"
device = "a100-80gb"
num_devices = 16
electricity = 60.0
[[links]]
between = ["a", "b"]
latency = "20 ms"
bandwidth = "10 Gbit/s"
egress_usd_per_gb = 0.02
[[link_changes]]
link = "a>b"
at_s = 1000
bandwidth = "1 Gbit/s"
"""
JOBS = """job,submit_s,model,sequence_length,global_batch,num_steps,min_devices,max_devices,tenant,deadline_s
one,0,llama-3.2-1b,2048,64,50,8,16,,
two,600,llama-3.2-1b,2048,64,20,8,8,,5000
three,900,llama-3.2-1b,2048,64,90,8,16,,
"""


@pytest.fixture
def files(tmp_path):
    fleet, jobs = tmp_path / "fleet.toml", tmp_path / "jobs.csv"
    fleet.write_text(FLEET)
    jobs.write_text(JOBS)
    return fleet, jobs


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["simulate", "--events", "jobs.csv"], 3, "jobs.csv: this command reads it"),
        (["simulate", "--plot", "jobs.csv"], 2, "pictures are written as .svg or .png"),
        (["simulate", "--plot", "x.bmp"], 2, "--plot x.bmp: pictures are written"),
        (["compare", "--policy", "fcfs", "--plot", "nowhere/x.png"], 6, "nowhere does not exist"),
        (["compare", "--policy", "fcfs", "--plot", "/dev/full"], 6, "/dev/full: can't be written: No space left"),
    ],
)
def test_outputs_that_can_not_be_written_leave_all_as_it_was(files, tmp_path, monkeypatch, options, code, message):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine\n")
    Path("folder").mkdir()
    before = files[1].read_text()
    run = CliRunner().invoke(app, ["fleet", options[0], str(files[0]), "--jobs", str(files[1]), *options[1:]])
    error = run.exception
    assert isinstance(error, FarpipeError)
    assert (error.exit_code, message in str(error)) == (code, True), error
    assert (files[1].read_text(), Path("notes.txt").read_text()) == (before, "mine\n")


def test_a_fleet_in_which_no_job_can_ever_run_is_infeasible(files):
    arguments = ["--jobs", str(files[1]), "--json"]
    files[1].write_text(JOBS.replace("8,16,,", "64,64,,"))
    assert CliRunner().invoke(app, ["fleet", "simulate", str(files[0]), *arguments]).exit_code == 0
    files[1].write_text(JOBS.replace("8,16,,", "64,64,,").replace("8,8,,", "64,64,,"))
    for command in (["simulate"], ["compare", "--policy", "fcfs,bace"]):
        run = CliRunner().invoke(app, ["fleet", *command, str(files[0]), *arguments])
        assert isinstance(run.exception, FarpipeError)
        assert (run.exception.exit_code, "none of the 3 jobs" in str(run.exception)) == (4, True)
        assert "ask for 32 at most" in run.stderr
        assert "num_jobs" in run.stdout


@pytest.mark.slow
def test_a_fleet_in_which_no_job_finishes_is_infeasible(files):
    files[0].write_text(FLEET + "[failures]\ndevice_hours = 0.001\n")
    for command in (["simulate"], ["compare", "--policy", "fcfs,bace"]):
        run = CliRunner().invoke(app, ["fleet", *command, str(files[0]), "--jobs", str(files[1])])
        assert isinstance(run.exception, FarpipeError)
        assert (run.exception.exit_code, "none of the 3 jobs finished" in str(run.exception)) == (4, True)
        assert "0 of 3" in run.stdout


def test_several_policies_have_a_row_for_every_tenant_and_small_figures_show(files):
    files[1].write_text(JOBS.replace("8,16,,", "8,16,ada,").replace("8,8,,", "8,8,bob,"))
    run = CliRunner().invoke(app, ["fleet", "compare", str(files[0]), "--jobs", str(files[1]), "--policy", "fcfs,sjf"])
    rows = [line.split()[:2] for line in run.stdout.splitlines() if line.split()[:1] in (["ada"], ["bob"])]
    assert rows == [["ada", "fcfs"], ["bob", "fcfs"], ["ada", "sjf"], ["bob", "sjf"]]
    assert "657.2 Wh" in run.stdout
    assert "$0.02" in run.stdout


def test_why_a_job_waits_carbon_deadlines_and_tenants_are_printed(tmp_path):
    (tmp_path / "fleet.toml").write_text(
        '[clock]\nstart = "2024-01-01"\n[[sites]]\nname = "a"\ndevice = "a100-80gb"\nnum_devices = 8\ncarbon = 400\n'
    )
    rows = ["one,0,3600,8,vision,9000", "two,5,3600,8,speech,6000"]
    (tmp_path / "jobs.csv").write_text("job,submit_s,duration_s,devices,tenant,deadline_s\n" + "\n".join(rows))
    arguments = ["fleet", "simulate", str(tmp_path / "fleet.toml"), "--jobs", str(tmp_path / "jobs.csv")]
    told = CliRunner().invoke(app, [*arguments, "--policy", "fcfs", "--waits", "two"]).stdout
    assert "5 s: fcfs keeps it waiting for others" in told
    assert "with the devices of 'one', which would end at 3720 s" in told
    assert "3,720 s: it no longer waits" in told
    assert "1 of 2" in told
    assert "speech" in told
    assert "never waits" in CliRunner().invoke(app, [*arguments, "--policy", "fcfs", "--waits", "one"]).stdout
    data = json.loads(CliRunner().invoke(app, [*arguments, "--policy", "fcfs", "--waits", "two", "--json"]).stdout)
    assert [line["time_s"] for line in data["why"]] == [5.0, 3720.0]
    assert (data["num_deadlines"], data["num_deadlines_met"]) == (2, 1)
    assert data["tenants"]["vision"]["device_hours"] == pytest.approx(8 * 3720 / 3600)
    failed = CliRunner().invoke(app, [*arguments, "--waits", "tow"])
    assert "has no such job; did you mean 'two'" in str(failed.exception)


PRICES = {
    "rent": "rent_usd_per_device_hour = 2.0",
    "electricity": "electricity = 30.0",
    "carbon": "carbon = 300.0",
}
TIMED = "job,submit_s,duration_s,devices\none,0,3600,8\ntwo,10,7200,16\nthree,20,600,16\n"


def run_fleet(files, given, *arguments, jobs=TIMED, other=()):
    """Output of a command where site a has the figures `given` and site b those `other`."""
    text = FLEET.replace("electricity = 30.0", "\n".join(PRICES[kind] for kind in given))
    text = text.replace("electricity = 60.0", "\n".join(PRICES[kind] for kind in other))
    files[0].write_text(text.replace("egress_usd_per_gb = 0.02\n", ""))
    files[1].write_text(jobs)
    run = CliRunner().invoke(app, ["fleet", arguments[0], str(files[0]), "--jobs", str(files[1]), *arguments[1:]])
    assert run.exception is None, run.exception
    return run.stdout


@pytest.mark.parametrize("given", [(), ("carbon",), ("rent",), ("electricity", "carbon")])
def test_figures_that_nobody_gave_are_null_and_a_dash(files, given):
    data = json.loads(run_fleet(files, given, "simulate", "--json", other=given))
    found = data["money"] | {"carbon": data["carbon_g"]}
    for kind in PRICES:
        assert all((usd is not None) == (kind in given) for usd in found[kind].values()), kind
    assert (data["total_usd"] is None) == (not {"rent", "electricity"} & {*given})
    assert (data["jobs"][0]["cost_usd"] is None) == (data["total_usd"] is None)
    assert {word.split()[0] for word in data["unpriced"]} == {*PRICES, "egress"} - {*given}
    table = run_fleet(files, given, "simulate", other=given)
    assert "0.0 t" not in table
    assert not re.search(r"\$0(?!\.)", table)


def test_a_sum_without_one_sites_price_says_so_and_no_policy_is_the_cheapest(files):
    shown = run_fleet(files, ("electricity",), "compare", "--policy", "fcfs,sjf")
    assert "Sums leave out sites without figures: electricity at b." in shown
    assert "money" not in shown.partition("Over 3 jobs")[2]


def test_jobs_known_by_their_duration_are_said_to_run_at_one_site(files):
    assert "3 of 3 jobs are known by their duration alone" in run_fleet(files, (), "simulate")
    assert "duration alone" not in run_fleet(files, (), "simulate", jobs=JOBS)


def test_comparing_policies_ends_with_who_wins_by_how_much_and_over_what(files):
    every = ("rent", "electricity")
    policies, jobs = "fcfs,sjf,easy", TIMED + "four,30,60,4\n"
    shown = run_fleet(files, every, "compare", "--policy", policies, jobs=jobs, other=every).replace("\n", " ")
    assert "Over 4 jobs in 2 h" in shown
    assert "sjf, easy tie for the least mean completion time" in shown
    assert re.search(
        r"\(next: fcfs, \+\d+\.\d %\); money \(rent, electricity\) is a tie \(\$[\d.]+, all within 1 %\)", shown
    )
    assert "tie" not in run_fleet(files, (), "compare", "--policy", "fcfs")


def outcome(policy, jcts, usd=1.0, num_jobs=2):
    jobs = [FleetJob(str(i), timed_kind(8), 0.0, 1, 8, 8) for i in range(num_jobs)]
    spent = Spent(rent_usd={"a": usd / num_jobs})
    records = [JobRecord(job, final=JobState(job, spent=spent)) for job in jobs]
    for record, jct in zip(records, jcts, strict=False):
        record.finished_s = jct
    return FleetOutcome(policy, records, 0.0, max(jcts, default=1.0), {"a": 8}, {}, {})


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        (
            [outcome("x", [100.0, 100.0]), outcome("y", [200.0, 200.0])],
            "x has the least mean completion time, 100 s (next: y, +100.0 %); money",
        ),
        ([outcome("x", [100.0]), outcome("y", [200.0, 200.0])], "y alone finished 2, the most"),
        ([outcome("x", [100.0, 100.0]), outcome("y", [100.5, 100.0])], "mean completion time is a tie"),
        (
            [outcome("x", [1.0, 1.0], 3.0), outcome("y", [1.0, 1.0], 2.0)],
            "y has the least money (rent, electricity, egress), $2.00 (next: x, +50.0 %)",
        ),
        ([outcome("x", []), outcome("y", [])], "no policy finished one"),
        (
            [outcome("x", [1.0]), outcome("y", [1.0, 1.0]), outcome("z", [3.0, 3.0])],
            "3.00 s, of the 2 policies that finished 2, the most: y has the least mean completion time",
        ),
    ],
)
def test_the_verdict_names_winners_and_ties_as_ties(outcomes, words):
    assert words in verdict(outcomes)


def test_every_policy_is_described_in_a_line():
    assert list(ABOUT) == list(POLICIES)
    found = json.loads(CliRunner().invoke(app, ["list", "policies", "--json"]).stdout)
    assert [one["name"] for one in found] == list(POLICIES)
    assert all(len(one["about"]) <= 105 and len(one["about"].split()) > 3 for one in found)
