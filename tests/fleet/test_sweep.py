"""Grids of simulations: what varies, what stays, and that nothing is computed twice."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farpipe.cli.app import app
from farpipe.errors import FarpipeError, InputError, UsageError
from farpipe.fleet.conformance import SimpleQuotes
from farpipe.fleet.scenario import load_scenario
from farpipe.fleet.sweep import at_load, dealt, grid, key_of, offered_load, with_bandwidth
from farpipe.fleet.traces import read_jobs

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


def test_a_load_stretches_the_time_between_jobs(files):
    scenario, jobs = load_scenario(files[0]), read_jobs(files[1])
    for load in (0.3, 1.5):
        found = at_load(jobs, scenario, SimpleQuotes(), load)
        assert offered_load(found, scenario, SimpleQuotes()) == pytest.approx(load)
        assert [job.num_steps for job in found] == [50, 20, 90]
    with pytest.raises(InputError, match="two jobs at different times"):
        at_load(jobs[:1], scenario, SimpleQuotes(), 1.0)


def test_seeds_deal_the_same_jobs_to_the_same_times(files):
    jobs = read_jobs(files[1])
    assert dealt(jobs, 0) == jobs
    found = [dealt(jobs, seed) for seed in range(1, 6)]
    assert all([job.submit_s for job in one] == [0.0, 600.0, 900.0] for one in found)
    assert all({job.name for job in one} == {"one", "two", "three"} for one in found)
    assert any(one != jobs for one in found)
    two = next(job for one in found for job in one if job.name == "two" and job.submit_s != 600.0)
    assert two.deadline_s - two.submit_s == 4400.0


def test_links_and_their_changes_scale_together(files):
    scenario = load_scenario(files[0])
    faster = with_bandwidth(scenario, 4.0)
    assert faster.cluster.links[0].bandwidth_bytes_per_s == 4 * scenario.cluster.links[0].bandwidth_bytes_per_s
    rates = [[e.bytes_per_s for e in one.events if hasattr(e, "bytes_per_s")] for one in (scenario, faster)]
    assert rates[1] == [4 * rate for rate in rates[0]] != []


def test_a_grid_is_checked():
    assert len(grid(["fcfs", "bace"], [0.5, 1.0], [1.0], range(3))) == 12
    with pytest.raises(UsageError, match="did you mean 'bace'"):
        grid(["bake"], [], [1.0], [0])
    with pytest.raises(UsageError, match="a load is more than zero"):
        grid(["bace"], [0.0], [1.0], [0])


@pytest.mark.slow
def test_a_sweep_keeps_its_rows_and_computes_only_what_is_missing(files, tmp_path):
    rows, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    command = ["fleet", "sweep", str(files[0]), "--jobs", str(files[1]), "--policies", "fcfs,farpipe", "--json"]
    command += ["--rows", str(rows), "--processes", "1"]
    first = CliRunner().invoke(app, [*command, "--loads", "0.5"])
    assert first.exit_code == 0, first.output
    with rows.open("a") as file:
        file.write('{"policy": "fcfs", "lo')  # cut off
    marked = [json.loads(line) | {"mean_jct_s": 1.0} for line in rows.read_text().splitlines()[:2]]
    rows.write_text("".join(json.dumps(row) + "\n" for row in marked) + '{"policy": "fc')
    second = CliRunner().invoke(app, [*command, "--loads", "0.5,1.0", "--plot", str(plot)])
    assert second.exit_code == 0, second.output
    found = json.loads(second.stdout)
    assert [row["mean_jct_s"] == 1.0 for row in found] == [True, False, True, False], "what is kept is not computed"
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["simulate", "--events", "jobs.csv"], 3, "jobs.csv: this command reads it"),
        (["simulate", "--plot", "jobs.csv"], 2, "pictures are written as .svg or .png"),
        (["simulate", "--charts", "x.bmp"], 2, "--charts x.bmp: pictures are written"),
        (["compare", "--policies", "fcfs", "--plot", "nowhere/x.png"], 6, "nowhere does not exist"),
        (["compare", "--policies", "fcfs", "--plot", "/dev/full"], 6, "/dev/full: can't be written: No space left"),
        (["sweep", "--rows", "jobs.csv"], 3, "jobs.csv: this command reads it"),
        (["sweep", "--rows", "notes.txt"], 3, "notes.txt: is there already, and no rows of a sweep"),
        (["sweep", "--rows", "folder"], 3, "folder: can't be read: Is a directory"),
        (["sweep", "--policies", "fcfs", "--rows", "/dev/full"], 3, "/dev/full: not a plain file"),
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


def test_another_trace_has_another_key(files):
    scenario, jobs = load_scenario(files[0]), read_jobs(files[1])
    assert key_of(scenario, jobs, "1") == key_of(load_scenario(files[0]), read_jobs(files[1]), "1")
    assert len({key_of(scenario, jobs, "1"), key_of(scenario, jobs[:2], "1"), key_of(scenario, jobs, "2")}) == 3
