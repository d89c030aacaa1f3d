"""The optical commands."""

import csv
import io
import json
import re

import pytest
from rich.console import Console

from farpipe.cli.optical import _table
from farpipe.report.tables import to_rich
from job_files import SMALL_MODEL, cluster_text
from optical_data import BY_HOPS, BY_KM, LINKS, TRACE, pipeline_problem

KEYS = {"requests", "accepted", "blocked", "blocking_ratio", "bandwidth_blocking_ratio"}


@pytest.fixture
def small_trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"{i},{i / 10},1,{2 + i % 13},{25 + i},5.0" for i in range(50)]
    path.write_text("request,arrival_s,src,dst,gbit_s,holding_s\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize(("paths", "accepted"), [(BY_KM, 1149), (BY_HOPS, 1182)])
def test_blocking_of_the_frozen_trace(farpipe, paths, accepted):
    options = ("--policy", "ksp-ff", "--slots", "100", "--slot-ghz", "12.5", "--guard", "1", "--modulation", "deeprmsa")
    run = farpipe("optical", "blocking", "--network", LINKS, "--trace", TRACE, "--paths", paths, *options, "--json")
    found = json.loads(run.stdout)
    assert found.keys() >= KEYS
    assert (found["requests"], found["accepted"], found["blocked"]) == (1200, accepted, 1200 - accepted)
    assert found["blocking_ratio"] == (1200 - accepted) / 1200


def test_blocking_needs_no_files_but_the_trace(farpipe, small_trace):
    run = farpipe("optical", "blocking", "--trace", small_trace, "--json")
    assert json.loads(run.stdout)["requests"] == 50
    assert "requests: 50 accepted" in farpipe("optical", "blocking", "--trace", small_trace).stdout


def test_every_request_of_a_trace_is_listed(farpipe, small_trace, tmp_path):
    options = ("--network", LINKS, "--paths", BY_KM, "--events", tmp_path / "log.csv", "--slots", "20", "--json")
    found = json.loads(farpipe("optical", "blocking", "--trace", TRACE, *options).stdout)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "log.csv").read_text())))
    assert [int(row["request"]) for row in rows] == list(range(1200))
    lit = [row for row in rows if row["accepted"] == "1"]
    assert (len(lit), len(rows) - len(lit)) == (found["accepted"], found["blocked"])
    assert found["blocked"] > 0
    assert all((row["nodes"].split("-")[0], row["nodes"].split("-")[-1]) == (row["src"], row["dst"]) for row in lit)
    assert all(0 <= int(row["first_slot"]) <= 20 - int(row["slots"]) for row in lit)
    refused = farpipe("optical", "blocking", "--load", "5", "--events", tmp_path / "log.csv")
    assert (refused.returncode, "--events needs --trace" in refused.stderr) == (2, True)
    kept = farpipe("optical", "blocking", "--trace", small_trace, "--events", small_trace)
    assert kept.returncode == 3
    assert small_trace.read_text().startswith("request,arrival_s")


def test_poisson_blocking_has_an_interval(farpipe):
    options = (
        "--load",
        "300",
        "--set",
        "requests=2000",
        "--set",
        "warm_up=500",
        "--set",
        "seeds=3",
        "--set",
        "truncate=2",
    )
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
        (("--load", "10", "--set", "rates=100"), 2, "--set: rates: expected two whole numbers"),
        (("--load", "10", "--set", "rates=100-25"), 2, "the least first, as 25-100, found '100-25'"),
        (("--load", "10", "--set", f"rates=1-{10**20}"), 2, "--set: rates: expected two whole numbers from 1 to"),
        (("--load", "10", "--set", "rates=1-9000"), 2, "lower the largest rate (rates) or raise `slots`"),
        (("--load", "10", "--set", "truncate=0"), 2, "--set: truncate: input should be greater than 0"),
        (("--load", "10", "--set", "requsts=1"), 2, "--set: requsts: unknown key; did you mean 'requests'"),
        (("--load", "10", "--set", "k=many"), 2, "--set: k: "),
        (("--load", "10", "--set", "k"), 2, "expected NAME=VALUE, found 'k'"),
        (("--load", "10", "--network", "arpanet"), 3, "give nsfnet"),
        (("--trace", "nowhere.csv"), 3, "can't be read"),
        (("--trace", "nowhere.csv", "--set", "seeds=4"), 2, "--set seeds is for --load"),
        (("--trace", "nowhere.csv", "--set", "truncate=2"), 2, "--set truncate is for --load"),
        (("--load", "10", "--paths", "p.csv", "--set", "k=4"), 2, "leave out --paths"),
        (("--load", "-1"), 2, "'--load': Input should be greater than or equal to"),
        (("--load", "1e300"), 2, "'--load': Input should be less than or equal to 50000000"),
        (("--load", "10", "--set", "requests=99999999"), 2, "at most 50,000,000: lower requests, warm_up or seeds"),
    ],
)
def test_blocking_says_what_is_wrong(farpipe, options, code, says):
    run = farpipe("optical", "blocking", *options)
    assert run.returncode == code, run.stderr
    assert says in run.stderr


def test_a_fibre_shorter_than_the_great_circle_is_told(farpipe, tmp_path):
    nodes = [{"id": name, "pos": place} for name, place in (("a", (13.4, 52.5)), ("b", (11.6, 48.1)))]
    (tmp_path / "n.json").write_text(json.dumps({"nodes": nodes, "links": [{"source": "a", "target": "b", "km": 50}]}))
    run = farpipe("optical", "blocking", "--network", tmp_path / "n.json", "--load", "5", "--set", "seeds=1")
    assert "the worst a-b with 50 km of fibre for 505.6 km" in run.stderr


def test_random_traffic_needs_a_path_for_every_pair(farpipe, tmp_path):
    paths = tmp_path / "paths.csv"
    paths.write_text("src,dst,order,nodes,km\n1,2,0,1-2,1050\n")
    run = farpipe("optical", "blocking", "--load", "10", "--paths", paths)
    assert run.returncode == 3
    assert f"{paths}: random traffic goes between all pairs" in run.stderr
    assert "181 of them have no path here, the first 1 to 3" in run.stderr


@pytest.fixture
def small_step(tmp_path):
    path = tmp_path / "problem.json"
    pipeline_problem([0.02] * 3, [0.04] * 3, 4, ("1", "4", "10"), 256e6).save(path)
    return path


@pytest.mark.parametrize(
    "options", [("--set", "setup=1e9", "--method", "1f1b"), ("--set", "mean_holding=1e-12"), ("--load", "1e6")]
)
def test_a_background_without_end_is_refused_before_it_is_drawn(farpipe, small_step, options):
    run = farpipe("optical", "simulate", small_step, "--nodes", "1,4,10", *options)
    assert run.returncode == 2, run.stderr
    for name in ("at most 50,000,000", "load", "mean_holding", "setup"):
        assert name in run.stderr


@pytest.mark.slow
def test_a_training_over_light_paths_is_simulated(farpipe, small_step, tmp_path):
    picture, log = tmp_path / "light.png", tmp_path / "light.csv"
    run = farpipe("optical", "simulate", small_step, "--nodes", "1,4,10", "--plot", picture, "--events", log, "--json")
    found = json.loads(run.stdout)
    assert found["no_network_s"] < found["bound_s"] <= found["step_s"]
    assert len(found["steps"][0]) == 3
    assert picture.stat().st_size > 10_000
    rows = list(csv.DictReader(io.StringIO(log.read_text())))
    assert {row["owner"].split()[0] for row in rows} == {"message", "request"}
    assert all(float(row["from_s"]) < float(row["until_s"]) and int(row["slots"]) > 1 for row in rows)
    assert "s per step" in farpipe("optical", "simulate", small_step, "--nodes", "1,4,10", "--method", "1f1b").stdout


def test_the_frozen_coupled_check_by_command(farpipe, tmp_path):
    path, nodes = tmp_path / "problem.json", ("1", "4", "4", "10", "6", "14", "8", "12")
    times = [[figure * (1 + slope * s) for s in range(8)] for figure, slope in ((0.026, 0.0137), (0.052, 0.0071))]
    pipeline_problem(*times, 16, nodes, 512e6).save(path)
    where = (
        "--network",
        LINKS,
        "--set",
        "directed=true",
        "--set",
        f"paths={BY_KM}",
        "--set",
        "slots=70",
        "--set",
        "modulation=64qam",
    )
    traffic = (
        "--trace",
        TRACE,
        "--set",
        "steps=15",
        "--policy",
        "ksp-ff",
        "--method",
        "gpipe",
        "--nodes",
        ",".join(nodes),
    )
    values = ("trace_modulation=deeprmsa", "begin=50", "skipped=0", "setup=0", "release=0")
    how = [word for value in values for word in ("--set", value)]
    found = json.loads(farpipe("optical", "simulate", path, *where, *traffic, *how, "--json").stdout)
    assert round(sum(found["steps"][0]), 6) == 40.278631
    assert round(found["refused_ratio"] * 2880) == 45
    assert (found["background_requests"], found["background_accepted"]) == (1200, 1050)


def test_policies_are_compared_over_random_placements(farpipe, small_step):
    options = (
        "--set",
        "placements=3",
        "--policy",
        "ksp-ff,widen",
        "--method",
        "1f1b",
        "--set",
        "steps=1",
        "--network",
        "nsfnet",
    )
    found = json.loads(farpipe("optical", "compare", small_step, *options, "--json").stdout)
    assert found["placements"] == 3
    low, high = found["policies"][1]["change_interval"]
    assert low < found["policies"][1]["change"] < high
    together = farpipe("optical", "simulate", small_step, "--nodes", "a,a,a", *options[:2], "--json")
    assert json.loads(together.stdout)["mean_wait_s"] == 0


def test_the_table_of_policies_cuts_no_word_at_80_columns():
    figures = {
        "refused_ratio": 0.2375,
        "waited_ratio": 0.2375,
        "mean_wait_s": 0.009,
        "mean_units": 3.688,
        "harm": -0.001,
    }
    names = ("ksp-ff", "ksp-ff-fewer", "cd-cba", "widen", "earliest")
    changes = {"change": 0.002, "change_interval": (0.0, 0.004), "held_slots": 0.0009788}
    rows = [{"policy": name, "step_s": 1.83, **figures, **changes} for name in names]
    out = io.StringIO()
    Console(file=out, width=80).print(to_rich(_table(rows)))
    assert "…" not in out.getvalue()
    refused_and_waited = " +23.75 % +23.75 %"
    for name in names:
        assert re.search(rf"^  {name} +1.83 +\+0.2 % ± 0.2 %{refused_and_waited}", out.getvalue(), re.MULTILINE)


@pytest.mark.slow
def test_policies_are_compared(farpipe, small_step):
    options = ("--nodes", "1,4,10", "--policy", "ksp-ff,cd-cba,earliest", "--set", "seeds=2", "--set", "steps=1")
    found = json.loads(farpipe("optical", "compare", small_step, *options, "--json").stdout)
    assert [row["policy"] for row in found["policies"]] == ["ksp-ff", "cd-cba", "earliest"]
    assert found["policies"][0]["change"] == 0
    shown = farpipe("optical", "compare", small_step, *options).stdout
    assert "extra blocking, points" in " ".join(shown.split())
    for row in found["policies"]:
        assert 0 < row["background_accepted"] <= row["background_requests"]
        assert f"{row['background_accepted']:,.0f} of {row['background_requests']:,.0f}" in shown


def test_the_page_of_a_training_has_its_setting_and_its_figures(farpipe, small_step, tmp_path):
    where = ("--nodes", "1,4,10", "--method", "1f1b", "--load", "30", "--html", tmp_path / "page.html")
    shown = farpipe("optical", "simulate", small_step, *where).stdout
    page = (tmp_path / "page.html").read_text()
    assert shown.splitlines()[0][1:] in page
    assert "modulation gnpy; beside it Poisson requests of 4-20 slots, 30 Erlang, held 200 ms" in page
    assert re.search(r"[\d,]+ of [\d,]+", shown)[0] in page


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--nodes", "1,4"), 2, "a node for each of 3 ranks"),
        (("--nodes", "1,4", "--set", "placements=2"), 2, "a name for each of 3 ranks"),
        (("--nodes", "1,4,10", "--set", "paths=p.csv", "--set", "k=4"), 2, "leave out --set paths"),
        ((), 2, "nodes: missing; name the node of every rank or site"),
        (("--nodes", "1,4,99"), 3, "there is no node '99'"),
        (("--nodes", "zurich=1"), 2, "has no sites"),
        (("--nodes", "1,4,10", "--policy", "cd-cbaa"), 2, "did you mean 'cd-cba'"),
        (("--nodes", "1,4,10", "--trace", TRACE, "--set", "seeds=2"), 2, "--set seeds is for random traffic"),
        (("--nodes", "1,4,10", "--trace", TRACE, "--load", "9"), 2, "--load is for random traffic"),
        (("--nodes", "1,4,10", "--trace", TRACE, "--set", "rates=4-5"), 2, "--set rates is for random traffic"),
        (("--nodes", "1,4,10", "--trace", TRACE, "--set", "begin=1e7"), 3, "the last request of"),
        (("--set", "placements=2", "--set", "seeds=2"), 2, "--set seeds is for one placement"),
        (
            ("--nodes", "1,4,10", "--set", "rates=1-200"),
            2,
            "rates=1-200: the largest background request takes 201",
        ),
        (("--nodes", "1,4,10", "--set", "mean_holding=0"), 2, "--set: mean_holding: input should be greater than 0"),
        (("--nodes", "1,4,10", "--set", "trace_modulation=bpsk"), 2, "--set trace_modulation needs --trace"),
        (("--nodes", "1,4,10", "--set", "slots=2", "--load", "0", "--policy", "ksp-ff"), 4, "never finds 3 units"),
        (
            ("--nodes", "1,4,10", "--set", "slots=2", "--load", "0", "--policy", "ksp-ff", "--set", "units=1"),
            4,
            "1 unit of 75 Gbit/s in 2 slots: give",
        ),
    ],
)
def test_simulate_says_what_is_wrong(farpipe, small_step, options, code, says):
    run = farpipe("optical", "simulate", small_step, *options)
    assert run.returncode == code, run.stderr
    assert says in run.stderr


def test_no_step_is_faster_than_its_bound_however_many_units_are_asked_for(farpipe, small_step):
    for units in ("1", "18"):
        options = ("--nodes", "1,4,10", "--method", "1f1b", "--load", "0", "--set", f"units={units}")
        found = json.loads(farpipe("optical", "simulate", small_step, *options, "--json").stdout)
        assert found["no_network_s"] < found["bound_s"] <= found["step_s"]
    assert "accepted" not in farpipe("optical", "simulate", small_step, *options).stdout


def test_names_of_nodes_are_drawn_as_they_are(farpipe, small_step, tmp_path):
    (tmp_path / "n.csv").write_text("a,b,km\n[bold]x[/bold],y$^$,100\ny$^$,Zürich,120\n")
    where = (
        "--network",
        tmp_path / "n.csv",
        "--nodes",
        "[bold]x[/bold],y$^$,Zürich",
        "--method",
        "1f1b",
        "--set",
        "steps=1",
    )
    run = farpipe("optical", "simulate", small_step, *where, "--plot", tmp_path / "n.svg")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "n.svg").exists()


def test_without_a_background_only_the_paths_of_the_training_are_sought(farpipe, small_step, tmp_path):
    edges = "\n".join(f"{node},{(node + 1) % 230},10" for node in range(230))
    (tmp_path / "ring.csv").write_text(f"a,b,km\n{edges}\n")
    where = ("--network", tmp_path / "ring.csv", "--nodes", "1,4,10", "--method", "1f1b", "--set", "steps=1")
    assert farpipe("optical", "simulate", small_step, *where, "--load", "0").returncode == 0
    assert "the paths of all pairs of 230 nodes" in farpipe("optical", "simulate", small_step, *where).stderr


def test_random_traffic_beside_a_training_needs_a_path_for_every_pair(farpipe, small_step, tmp_path):
    rows = "".join(f"{a},{b},1,{a}-{b},{km}\n" for a, b, km in ((1, 2, 1050), (2, 1, 1050), (2, 4, 750), (4, 2, 750)))
    (tmp_path / "paths.csv").write_text(f"src,dst,order,nodes,km\n{rows}")
    options = ("--nodes", "1,2,4", "--method", "1f1b", "--set", "steps=1", "--set", f"paths={tmp_path / 'paths.csv'}")
    assert "178 of them have no path here" in farpipe("optical", "simulate", small_step, *options).stderr
    assert farpipe("optical", "simulate", small_step, *options, "--load", "0").returncode == 0


def test_a_trace_is_one_background(farpipe, small_step):
    options = (
        "--nodes",
        "1,4,10",
        "--trace",
        TRACE,
        "--policy",
        "ksp-ff,widen",
        "--set",
        "steps=1",
        "--set",
        "modulation=64qam",
    )
    shown = farpipe("optical", "compare", small_step, *options, "--method", "1f1b")
    assert "order 1f1b, 1 background;" in shown.stdout, shown.stderr
    assert "±" not in shown.stdout
    found = json.loads(farpipe("optical", "compare", small_step, *options, "--method", "1f1b", "--json").stdout)
    assert found["seeds"] == 1


def test_replicas_inside_sites_stay_off_the_light_paths(farpipe, tmp_path):
    job, plan, across = (tmp_path / name for name in ("job.toml", "plan.json", "across.json"))
    training = '[training]\nsequence_length = 64\nglobal_batch = 8\nprecision = "fp32"\n'
    pins = "[layout]\npipeline = 2\ndata = 2\nreplicas = {!r}\n"
    cluster = cluster_text().replace("num_devices = 1\n", "num_devices = 2\n")
    job.write_text(SMALL_MODEL + training + pins.format("inside") + cluster)
    assert farpipe("plan", job, "--output", plan).returncode == 0
    shown = farpipe("optical", "simulate", plan, "--nodes", "zurich=1,lugano=4", "--load", "0")
    assert "s per step" in shown.stdout, shown.stderr
    assert re.search(r"left out: \d+ collectives inside sites, which no light path carries; in the plan", shown.stderr)
    job.write_text(job.read_text().replace("'inside'", "'across'"))
    assert farpipe("plan", job, "--output", across).returncode == 0
    refused = farpipe("optical", "simulate", across, "--set", "placements=2")
    assert (refused.returncode, 'replicas = "inside"' in refused.stderr) == (3, True), refused.stderr


def test_a_site_that_is_none_is_named(farpipe, tmp_path):
    job = tmp_path / "job.toml"
    training = '[training]\nsequence_length = 64\nglobal_batch = 8\nprecision = "fp32"\n'
    job.write_text(SMALL_MODEL + training + "[layout]\npipeline = 2\ndata = 1\n" + cluster_text())
    refused = farpipe("optical", "simulate", job, "--nodes", "zurich=1,lugan=4")
    assert "there is no site 'lugan'; did you mean 'lugano'?" in " ".join(refused.stderr.split())


@pytest.mark.slow
def test_a_plan_runs_over_the_light_paths_that_were_simulated_for_it(farpipe, tmp_path):
    job, plan, light, run_dir = (tmp_path / name for name in ("job.toml", "plan.json", "light.json", "run"))
    pins = "[layout]\npipeline = 2\ndata = 1\n"
    training = '[training]\nsequence_length = 64\nglobal_batch = 8\nprecision = "fp32"\n'
    job.write_text(SMALL_MODEL + training + pins + cluster_text())
    assert farpipe("plan", job, "--output", plan).returncode == 0
    options = ("--nodes", "zurich=1,lugano=4", "--set", "steps=2", "--output", light)
    steps = json.loads(farpipe("optical", "simulate", plan, *options, "--json").stdout)["steps"][0]
    over_light = ("train", plan, "--light-paths", light, "--device", "sleep")
    run = farpipe(*over_light, "--steps", "3", "--run-dir", run_dir, "--json")
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["predicted_makespan_s"] for line in lines] == pytest.approx([*steps, steps[0]])
    assert min(steps) <= json.loads(run.stdout)["predicted_makespan_s"] <= max(steps)
    assert farpipe("report", run_dir).returncode == 0
    other = farpipe(*over_light, "--set", "schedule.method=gpipe", "--run-dir", tmp_path / "other")
    assert other.returncode == 3
    assert "its order is" in other.stderr
    without = farpipe(*over_light, "--set", "run.emulate=false", "--run-dir", tmp_path / "other")
    assert without.returncode == 2
    assert "is for emulated links" in without.stderr


@pytest.mark.parametrize(
    ("option", "text"), [("--network={}", "a,b,km\n1,2,100\n"), ("--set=modulation={}", "reach_km,bit_s_hz\ninf,1\n")]
)
def test_a_log_never_takes_the_place_of_a_file_that_is_read(farpipe, small_step, tmp_path, option, text):
    read = tmp_path / "read.csv"
    read.write_text(text)
    run = farpipe("optical", "simulate", small_step, "--nodes", "1,2,1", option.format(read), "--events", read)
    assert (run.returncode, read.read_text()) == (3, text)
    assert "this command reads it; write to another file" in run.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "nsfnet, 100 slots of 12.5 GHz, guard 1, modulation deeprmsa, policy ksp-ff, 50 Erlang"),
        (
            ("--slots", "80", "--policy", "best-fit", "--set", "shared=true"),
            "80 slots of 12.5 GHz, guard 1, one spectrum for both",
        ),
    ],
)
def test_blocking_says_what_its_figures_are_of(farpipe, options, words):
    asked = ("optical", "blocking", "--load", "50", "--set", "seeds=1", "--set", "requests=500", *options)
    assert words in farpipe(*asked).stdout
    data = json.loads(farpipe(*asked, "--json").stdout)
    assert data["setting"]["slots"] == (80 if options else 100)
