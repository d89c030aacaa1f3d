"""The optical commands."""

import io
import json
import re

import pytest
from rich.console import Console

from farpipe.cli.optical_training import _table
from farpipe.optical.training import pipeline_problem
from job_files import SMALL_MODEL, cluster_text
from optical_data import BY_HOPS, BY_KM, LINKS, TRACE, needs_data

KEYS = {"requests", "accepted", "blocked", "blocking_ratio", "bandwidth_blocking_ratio"}


@pytest.fixture
def small_trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"{i},{i / 10},1,{2 + i % 13},{25 + i},5.0" for i in range(50)]
    path.write_text("request,arrival_s,src,dst,gbit_s,holding_s\n" + "\n".join(rows) + "\n")
    return path


@needs_data
@pytest.mark.parametrize(("paths", "accepted"), [(BY_KM, 9551), (BY_HOPS, 9754)])
def test_blocking_of_the_frozen_trace(farpipe, paths, accepted):
    options = ("--policy", "ksp-ff", "--slots", "100", "--slot-ghz", "12.5", "--guard", "1", "--modulation", "deeprmsa")
    run = farpipe("optical", "blocking", "--network", LINKS, "--trace", TRACE, "--paths", paths, *options, "--json")
    found = json.loads(run.stdout)
    assert found.keys() >= KEYS
    assert (found["requests"], found["accepted"], found["blocked"]) == (10_000, accepted, 10_000 - accepted)
    assert found["blocking_ratio"] == (10_000 - accepted) / 10_000


def test_blocking_needs_no_files_but_the_trace(farpipe, small_trace):
    run = farpipe("optical", "blocking", "--trace", small_trace, "--json")
    assert json.loads(run.stdout)["requests"] == 50
    assert "requests: 50 accepted" in farpipe("optical", "blocking", "--trace", small_trace).stdout


def test_poisson_blocking_has_an_interval(farpipe):
    options = ("--load", "300", "--requests", "2000", "--warm-up", "500", "--seeds", "3", "--truncate", "2")
    found = json.loads(farpipe("optical", "blocking", *options, "--json").stdout)
    low, high = found["blocking_ratio_interval"]
    assert low < found["blocking_ratio"] < high
    assert [run["requests"] for run in found["seeds"]] == [2000] * 3


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ((), 2, "--trace FILE or as --load ERLANG"),
        (("--load", "10", "--trace", "x.csv"), 2, "one of them"),
        (("--load", "10", "--policy", "ksp-fff"), 2, "did you mean 'ksp-ff'"),
        (("--load", "10", "--rates", "100"), 2, "two whole numbers"),
        (("--load", "10", "--rates", "1000-2000", "--slots", "20"), 3, "split the request"),
        (("--load", "10", "--network", "arpanet"), 3, "give nsfnet"),
        (("--trace", "nowhere.csv"), 3, "can't be read"),
        (("--trace", "nowhere.csv", "--seeds", "4"), 2, "--seeds is for --load"),
        (("--load", "10", "--paths", "p.csv", "--k", "4"), 2, "--paths gives them"),
        (("--load", "-1"), 2, "load_erlang must be more than 0"),
    ],
)
def test_blocking_says_what_is_wrong(farpipe, options, code, says):
    run = farpipe("optical", "blocking", *options)
    assert run.returncode == code, run.stderr
    assert says in run.stderr


@pytest.fixture
def small_step(tmp_path):
    path = tmp_path / "problem.json"
    pipeline_problem([0.02] * 3, [0.04] * 3, 4, ("1", "4", "10"), 256e6).save(path)
    return path


@pytest.mark.slow
def test_a_training_over_light_paths_is_simulated(farpipe, small_step, tmp_path):
    picture = tmp_path / "light.png"
    run = farpipe("optical", "simulate", small_step, "--nodes", "1,4,10", "--shared", "--plot", picture, "--json")
    found = json.loads(run.stdout)
    assert found["no_network_s"] < found["bound_s"] <= found["step_s"]
    assert len(found["steps"][0]) == 3
    assert picture.stat().st_size > 10_000
    assert "s per step" in farpipe("optical", "simulate", small_step, "--nodes", "1,4,10", "--order", "1f1b").stdout


def test_the_table_of_policies_cuts_no_word_at_80_columns():
    figures = {
        "refused_ratio": 0.2375,
        "waited_ratio": 0.2375,
        "mean_wait_s": 0.009,
        "mean_units": 3.688,
        "harm": -0.001,
    }
    names = ("ksp-ff", "ksp-ff-fewer", "cd-cba-fewer", "known-ends", "earliest")
    changes = {"change": 0.002, "change_interval": (0.0, 0.004), "held_slots": 0.0009788}
    rows = [{"policy": name, "step_s": 1.83, **figures, **changes} for name in names]
    out = io.StringIO()
    Console(file=out, width=80).print(_table(rows))
    assert "…" not in out.getvalue()
    assert all(re.search(rf"^  {name} +1.83 +\+0.2 % ± 0.2 % +23.75 %", out.getvalue(), re.MULTILINE) for name in names)


@pytest.mark.slow
def test_policies_are_compared(farpipe, small_step):
    options = ("--nodes", "1,4,10", "--policies", "ksp-ff,cd-cba,earliest", "--seeds", "2", "--steps", "1")
    found = json.loads(farpipe("optical", "compare", small_step, *options, "--json").stdout)
    assert [row["policy"] for row in found["policies"]] == ["ksp-ff", "cd-cba", "earliest"]
    assert found["policies"][0]["change"] == 0
    assert "harm" in farpipe("optical", "compare", small_step, *options).stdout


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--nodes", "1,4"), 2, "a node for each of 3 ranks"),
        (("--nodes", "1,4,99"), 3, "there is no node '99'"),
        (("--nodes", "zurich=1"), 2, "has no sites"),
        (("--nodes", "1,4,10", "--policy", "cbaa"), 2, "did you mean 'cba'"),
        (("--nodes", "1,4,10", "--slots", "2", "--load", "0", "--policy", "ksp-ff"), 4, "never finds 3 units"),
    ],
)
def test_simulate_says_what_is_wrong(farpipe, small_step, options, code, says):
    run = farpipe("optical", "simulate", small_step, *options)
    assert run.returncode == code, run.stderr
    assert says in run.stderr


@pytest.mark.slow
def test_a_plan_runs_over_the_light_paths_that_were_simulated_for_it(farpipe, tmp_path):
    job, plan, light, run_dir = (tmp_path / name for name in ("job.toml", "plan.json", "light.json", "run"))
    pins = "[layout]\npipeline = 2\ndata = 1\n"
    training = '[training]\nsequence_length = 64\nglobal_batch = 8\nprecision = "fp32"\n'
    job.write_text(SMALL_MODEL + training + pins + cluster_text())
    assert farpipe("plan", job, "--output", plan).returncode == 0
    options = ("--nodes", "zurich=1,lugano=4", "--steps", "2", "--light-paths", light)
    steps = json.loads(farpipe("optical", "simulate", plan, *options, "--json").stdout)["steps"][0]
    over_light = ("train", plan, "--light-paths", light, "--device", "sleep")
    run = farpipe(*over_light, "--steps", "3", "--run-dir", run_dir, "--json")
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["predicted_makespan_s"] for line in lines] == pytest.approx([*steps, steps[0]])
    assert json.loads(run.stdout)["predicted_makespan_s"] in map(pytest.approx, steps)
    assert farpipe("report", run_dir).returncode == 0
    other = farpipe(*over_light, "--method", "gpipe", "--run-dir", tmp_path / "other")
    assert other.returncode == 3
    assert "its order is" in other.stderr
    without = farpipe(*over_light, "--no-emulate", "--run-dir", tmp_path / "other")
    assert without.returncode == 2
    assert "is for emulated links" in without.stderr
