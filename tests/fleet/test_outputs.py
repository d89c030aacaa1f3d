"""Outputs of the fleet's commands: what can't be written leaves all as it was."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farpipe.cli.app import app
from farpipe.errors import FarpipeError

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
        (["simulate", "--charts", "x.bmp"], 2, "--charts x.bmp: pictures are written"),
        (["compare", "--policies", "fcfs", "--plot", "nowhere/x.png"], 6, "nowhere does not exist"),
        (["compare", "--policies", "fcfs", "--plot", "/dev/full"], 6, "/dev/full: can't be written: No space left"),
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
    for command in (["simulate"], ["compare", "--policies", "fcfs,bace"]):
        run = CliRunner().invoke(app, ["fleet", *command, str(files[0]), *arguments])
        assert isinstance(run.exception, FarpipeError)
        assert (run.exception.exit_code, "none of the 3 jobs" in str(run.exception)) == (4, True)
        assert "ask for 32 at most" in run.stderr
        assert "num_jobs" in run.stdout


@pytest.mark.slow
def test_a_fleet_in_which_no_job_finishes_is_infeasible(files):
    files[0].write_text(FLEET + "[failures]\ndevice_hours = 0.001\n")
    for command in (["simulate"], ["compare", "--policies", "fcfs,bace"]):
        run = CliRunner().invoke(app, ["fleet", *command, str(files[0]), "--jobs", str(files[1])])
        assert isinstance(run.exception, FarpipeError)
        assert (run.exception.exit_code, "none of the 3 jobs finished" in str(run.exception)) == (4, True)
        assert "0 of 3" in run.stdout


def test_several_policies_have_a_row_for_every_tenant_and_small_figures_show(files):
    files[1].write_text(JOBS.replace("8,16,,", "8,16,ada,").replace("8,8,,", "8,8,bob,"))
    run = CliRunner().invoke(
        app, ["fleet", "compare", str(files[0]), "--jobs", str(files[1]), "--policies", "fcfs,sjf"]
    )
    rows = [line.split()[:2] for line in run.stdout.splitlines() if line.split()[:1] in (["ada"], ["bob"])]
    assert rows == [["ada", "fcfs"], ["bob", "fcfs"], ["ada", "sjf"], ["bob", "sjf"]]
    assert "656.1 Wh" in run.stdout
    assert "$0.02" in run.stdout


def test_why_a_job_waits_carbon_deadlines_and_tenants_are_printed(tmp_path):
    (tmp_path / "fleet.toml").write_text(
        '[clock]\nstart = "2024-01-01"\n[[sites]]\nname = "a"\ndevice = "a100-80gb"\nnum_devices = 8\ncarbon = 400\n'
    )
    rows = ["one,0,3600,8,vision,9000", "two,5,3600,8,speech,6000"]
    (tmp_path / "jobs.csv").write_text("job,submit_s,duration_s,devices,tenant,deadline_s\n" + "\n".join(rows))
    arguments = ["fleet", "simulate", str(tmp_path / "fleet.toml"), "--jobs", str(tmp_path / "jobs.csv")]
    told = CliRunner().invoke(app, [*arguments, "--policy", "fcfs", "--why", "two"]).stdout
    assert "5 s: fcfs keeps it waiting for others" in told
    assert "with the devices of 'one', which would end at 3720 s" in told
    assert "3,720 s: it does not wait any more" in told
    assert "1 of 2" in told
    assert "speech" in told
    assert "never waits" in CliRunner().invoke(app, [*arguments, "--policy", "fcfs", "--why", "one"]).stdout
    data = json.loads(CliRunner().invoke(app, [*arguments, "--policy", "fcfs", "--why", "two", "--json"]).stdout)
    assert [line["time_s"] for line in data["why"]] == [5.0, 3720.0]
    assert (data["num_deadlines"], data["num_deadlines_met"]) == (2, 1)
    assert data["tenants"]["vision"]["device_hours"] == pytest.approx(8 * 3720 / 3600)
    failed = CliRunner().invoke(app, [*arguments, "--why", "tow"])
    assert "has no such job; did you mean 'two'" in str(failed.exception)
