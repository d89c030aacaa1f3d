"""Reading what others write: jobs, series, fleets."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.fleet.fleet_traces import RawJob, acme_like, at_load, offered_load
from farpipe.cli.app import app
from farpipe.core.errors import InputError, UsageError
from farpipe.core.spec import load_model
from farpipe.core.spec.links import links_between, read_matrix
from farpipe.fleet.events import LinkChanged, Price, PriceChanged
from farpipe.fleet.job import FleetJob, Kind, timed_kind
from farpipe.fleet.play import play, quotes_of
from farpipe.fleet.requests import model_of
from farpipe.fleet.scenario import load_scenario
from farpipe.fleet.series import read_series
from farpipe.fleet.traces import COLUMNS, read_jobs
from farpipe.testing.policies import SimpleQuotes

HEADER = ",".join(COLUMNS[:10])
GOOD = "a,0,llama-3-8b,4096,64,100,8,16,lab,"
START = datetime(2024, 1, 1, tzinfo=UTC)


def test_jobs_survive_a_round_trip(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text(f"{HEADER}\n{GOOD}\nb,5.5,llama-3.2-1b,2048,8,7,1,1,,900\n")
    jobs = read_jobs(path)
    assert [job.name for job in jobs] == ["a", "b"]
    assert (jobs[0].deadline_s, jobs[1].deadline_s, jobs[1].tenant) == (None, 900.0, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jobb,submit_s\n", "unknown column 'jobb'; did you mean 'job'"),
        ("job,submit_s\n", "column 'model' is missing"),
        (f"{HEADER}\n", "there is no job in it"),
        (f"{HEADER}\n{GOOD}\n{GOOD}\n", "line 3: there is already a job 'a'"),
        (f"{HEADER}\na,-1,llama-3-8b,4096,64,100,8,16,,\n", "submit_s: expected seconds"),
        (f"{HEADER}\na,nan,llama-3-8b,4096,64,100,8,16,,\n", "submit_s"),
        (f"{HEADER}\na,0,llama-3-9b,4096,64,100,8,16,,\n", "model: .*did you mean"),
        (f"{HEADER}\na,0,llama-3-8b,4096,64,0,8,16,,\n", "num_steps: expected 1 to 1,000,000,000, found 0"),
        (f"{HEADER}\na,0,llama-3-8b,4096,64,1000000000001,8,16,,\n", "num_steps: expected 1 to 1,000,000,000"),
        (f"{HEADER}\na,0,llama-3-8b,4096,64,1,32,16,,\n", "min_devices 32 is more than"),
        (f"{HEADER}\na,0,llama-3-8b,4096\n", "line 2: expected 10 columns, found 4"),
        (f"{HEADER}\n{GOOD},\n", "line 2: expected 10 columns, found 11"),
        (f"{HEADER},model\n{GOOD},x\n", "line 1: column 'model' appears twice"),
        (f"{HEADER}\na,9,llama-3-8b,4096,64,1,8,16,,8\n", "deadline_s 8 is before submit_s 9"),
        (f"{HEADER}\n,0,llama-3-8b,4096,64,1,8,16,,\n", "a name of its own"),
    ],
)
def test_what_is_wrong_with_a_trace_is_named(tmp_path, text, message):
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_jobs(path)


def test_a_trace_may_be_json(tmp_path):
    path, table = tmp_path / "jobs.json", tmp_path / "jobs.csv"
    table.write_text(f"{HEADER}\n{GOOD}\nb,5.5,llama-3.2-1b,2048,8,7,1,1,,900\n")
    keys = COLUMNS[:8]
    rows = [
        dict(zip(keys, ("a", 0, "llama-3-8b", 4096, 64, 100, 8, 16), strict=True)) | {"tenant": "lab"},
        dict(zip(keys, ("b", 5.5, "llama-3.2-1b", 2048, 8, 7, 1, 1), strict=True)) | {"deadline_s": 900},
    ]
    path.write_text(json.dumps(rows))
    assert read_jobs(path) == read_jobs(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": "x"}, r"jobs\[0\]: unknown key 'modle'; did you mean 'model'"),
        ({"num_steps": None}, r"jobs\[0\]: num_steps: empty, and llama-3-8b is no job.toml"),
        ({"num_steps": 1.5}, "num_steps: expected a whole number"),
        ({"num_steps": True}, "num_steps: expected text or a number"),
        ({"deadline_s": [1]}, "deadline_s: expected seconds"),
        ({"submit_s": -1}, "submit_s: expected seconds"),
    ],
)
def test_what_is_wrong_with_a_json_trace_is_named(tmp_path, change, message):
    path = tmp_path / "jobs.json"
    row = dict(zip(COLUMNS[:8], ("a", 0, "llama-3-8b", 4096, 64, 100, 8, 16), strict=True))
    path.write_text(json.dumps([row | change]))
    with pytest.raises(InputError, match=message):
        read_jobs(path)
    path.write_text('{"jobs": []}')
    with pytest.raises(InputError, match="expected a list of jobs, found dict"):
        read_jobs(path)


TIMED = "job,submit_s,duration_s,devices,tenant\n"


def test_a_job_may_be_known_by_its_duration_and_its_times_be_of_the_calendar(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text(f"{TIMED}a,2024-01-01T01:00:00+01:00,100.5,8,lab\nb,2024-01-01 00:00:05,3600,4,\n")
    jobs = read_jobs(path, START)
    assert [(job.submit_s, job.num_steps, job.min_devices, job.max_devices) for job in jobs] == [
        (0.0, 101, 8, 8),
        (5.0, 3600, 4, 4),
    ]
    without_outage = fleet(tmp_path, FLEET.replace("from_s = 100\nto_s = 200", "from_s = 90000\nto_s = 90001"))
    assert {record.job.name: record.jct_s for record in play(without_outage, jobs, "fcfs").records} == {
        "a": pytest.approx(101 + 120),  # the restart of [stops]
        "b": pytest.approx(3600 + 120),
    }


def test_a_job_of_known_duration_is_quicker_on_more_devices_and_never_over_two_sites(tmp_path):
    quotes = quotes_of(fleet(tmp_path, FLEET))
    assert quotes.placement(timed_kind(8), (("a", 16),), {}).step_s == 0.5
    assert quotes.placement(timed_kind(8), (("a", 8), ("b", 8)), {"a>b": 1e9, "b>a": 1e9}) is None
    (tmp_path / "jobs.csv").write_text(f"{TIMED}wide,0,100,20,\n")
    (record,) = play(fleet(tmp_path, FLEET), read_jobs(tmp_path / "jobs.csv"), "farpipe").records
    assert "20 devices are more than any site has" in record.refused
    assert "min_devices 16 would do" in record.refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job,submit_s,duration_s\n", "column 'devices' is missing; expected job,submit_s,duration_s,devices"),
        (f"{TIMED}a,0,-5,8,\n", "duration_s: expected seconds"),
        (f"{TIMED}a,0,1e10,8,\n", "duration_s: expected seconds from 0 to 1e\\+09, found '1e10'"),
        (f"{TIMED}a,0,5,0,\n", "devices: expected 1 to 1,000"),
        (f"{TIMED}a,2023-12-31T00:00:00,5,8,\n", r"submit_s: .* is before \[clock\] start"),
        (f"{TIMED}a,2024-13-01,5,8,\n", "submit_s: expected a time"),
        ("job,submit_s,duration_s,devices,model\na,0,5,8,llama-3-8b\n", "model: leave it empty where duration_s"),
        ("job,submit_s,duration_s,devices,min_devices\na,0,5,8,9\n", "min_devices 9 is more than max_devices 8"),
    ],
)
def test_what_is_wrong_with_a_timed_job_is_named(tmp_path, text, message):
    (tmp_path / "jobs.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        read_jobs(tmp_path / "jobs.csv", START)


def test_a_trace_of_the_benchmarks_is_stretched_to_a_load():
    raw = acme_like(500, seed=1, mean_gap_s=600.0)
    assert offered_load(at_load(raw, 384, 0.9), 384) == pytest.approx(0.9)
    assert acme_like(500, seed=1, mean_gap_s=600.0) == raw
    assert {job.num_devices for job in raw} <= {8 << k for k in range(8)}
    assert isinstance(raw[0], RawJob)


def series(tmp_path, text):
    path = tmp_path / "prices.csv"
    path.write_text(text)
    return path


def test_negative_prices_are_real_and_short_gaps_go_on(tmp_path):
    text = "utc,X\n2024-01-01T00:00:00,5\n2024-01-01T01:00:00,-80.5\n2024-01-01T02:00:00,\n2024-01-01T05:00:00,7\n"
    path = series(tmp_path, text)
    assert read_series(path, "X", START, negative=True) == [(0.0, 5.0), (3600.0, -80.5), (18000.0, 7.0)]
    with pytest.raises(InputError, match="carbon"):
        read_series(path, "X", START, negative=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,X\n", "the first column is 'utc'"),
        ("utc,Y\n2024-01-01T00:00:00,5\n", "no column 'X'"),
        ("utc,X\n2024-01-01T01:00:00,5\n2024-01-01T00:00:00,5\n", "is not after"),
        ("utc,X\n2024-03-01T00:00:00,5\n", "no figure for the start"),
        ("utc,X\n2024-01-01T00:00:00,5\n2024-02-01T00:00:00,5\n", "nothing for 31.0 days"),
        ("utc,X\nyesterday,5\n", "expected a time"),
        ("utc,X\n2024-01-01T00:00:00,5,6\n", "line 2: expected 2 columns, found 3"),
        ("utc,X,X\n2024-01-01T00:00:00,5,6\n", "line 1: column 'X' appears twice"),
        ("utc,X\n2024-01-01T00:00:00,inf\n", "no price"),
    ],
)
def test_what_is_wrong_with_a_series_is_named(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read_series(series(tmp_path, text), "X", START, negative=True)


MATRIX = "src_region,dst_region,throughput_gbit_s\np,q,2\nq,p,4\n"
RTT = "src_region,dst_region,avg_rtt_ms\np,q,30\n"


def test_matrices_become_directed_links(tmp_path):
    rates, rtt = series(tmp_path, MATRIX), tmp_path / "rtt.csv"
    rtt.write_text(RTT)
    rates.write_text(MATRIX + "p,q,4\np,q,0\n")
    gbit, ms = read_matrix(rates, "throughput_gbit_s"), read_matrix(rtt, "avg_rtt_ms")
    one, other = links_between({"a": "p", "b": "q"}, gbit, ms)
    assert (one.name, one.bandwidth_bytes_per_s, one.latency_s) == ("a>b", 2.5e8, 0.015)
    assert (other.name, other.bandwidth_bytes_per_s) == ("b>a", 5e8)
    assert [link.name for link in links_between({"a": "p", "b": "q"}, {("p", "q"): 1.0}, ms)] == ["a>b"]
    with pytest.raises(InputError, match="no region 'x'"):
        links_between({"a": "p", "b": "x"}, gbit, ms)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("src_region,dst_region,throughput_gbit_s\n", "no row"),
        ("src_region,throughput_gbit_s\n", "expected a column 'dst_region'"),
        (MATRIX + "q,q,fast\n", "expected a number"),
        (MATRIX + "q,q,-1\n", "a number from 0"),
    ],
)
def test_what_is_wrong_with_a_matrix_is_named(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read_matrix(series(tmp_path, text), "throughput_gbit_s")


MODEL = "[model]\nnum_layers = 8\nhidden = 1024\nnum_heads = 16\nffn_hidden = 4096\nvocab_size = 32000\n"
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}


def test_a_job_s_model_may_be_a_file_beside_the_trace(tmp_path):
    (tmp_path / "own.toml").write_text(MODEL)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rows = [f"{name},0,{name},512,8,10,1,8,," for name in ("own.toml", "config.json", str(tmp_path / "own.toml"))]
    (tmp_path / "jobs.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    jobs = read_jobs(tmp_path / "jobs.csv")
    assert {model_of(job.kind).num_params for job in jobs} == {load_model(tmp_path / "own.toml").num_params}
    assert len({job.kind for job in jobs}) == 2  # the same file under two names is one kind


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.toml", None, "line 2: model: .*absent.toml: can't be read"),
        ("own.toml", "[training]\n", "no table"),
        ("own.toml", MODEL.replace("hidden", "hiden", 1), "model.hiden: unknown key; did you mean 'hidden'"),
        ("own.json", "[]", "expected an object"),
        ("own.json", '{"model_type": "bert"}', "'bert' is not supported"),
    ],
)
def test_what_is_wrong_with_a_model_s_file_is_named(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    (tmp_path / "jobs.csv").write_text(f"{HEADER}\nj,0,{name},512,8,10,1,8,,\n")
    with pytest.raises(InputError, match=message):
        read_jobs(tmp_path / "jobs.csv")


FLEET = """
[clock]
start = "2024-01-01T00:00:00"
[[sites]]
name = "a"
device = "a100-80gb"
num_devices = 16
pue = 1.1
rent_usd_per_device_hour = 2.0
electricity = { file = "prices.csv", column = "X" }
carbon = 300
[[sites]]
name = "b"
device = "a100-80gb"
num_devices = 8
electricity = 40.0
[[links]]
between = ["a", "b"]
latency = "20 ms"
bandwidth = "10 Gbit/s"
egress_usd_per_gb = 0.02
[[outages]]
site = "b"
from_s = 100
to_s = 200
[policy]
fairness = 0.0
"""


def fleet(tmp_path, text):
    series(tmp_path, "utc,X\n2024-01-01T00:00:00,5\n2024-01-01T01:00:00,-8\n")
    (tmp_path / "c.csv").write_text("utc,X\n2024-01-01T00:00:00,100\n2024-01-01T00:30:00,150\n")
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return load_scenario(path)


def test_tenants_have_shares_and_are_listed_once(tmp_path):
    tenants = '[[tenants]]\nname = "vision"\nshare = 2\n[[tenants]]\nname = "{name}"\n'
    assert fleet(tmp_path, FLEET + tenants.format(name="speech")).tenant_shares == {"vision": 2.0, "speech": 1.0}
    with pytest.raises(InputError, match="tenants: 'vision' is listed twice"):
        fleet(tmp_path, FLEET + tenants.format(name="vision"))


def test_a_fleet_file_becomes_a_scenario(tmp_path):
    found = fleet(tmp_path, FLEET)
    assert found.cluster.num_devices == 24
    assert found.cluster.site("a").prices.pue == 1.1
    assert [type(event).__name__ for event in found.events].count("PriceChanged") == 2
    assert found.events[0].prices["b"].usd_per_mwh == 40.0
    assert found.policy_parameters == {"fairness": 0.0}
    assert found.idle_power_w["a"] == pytest.approx(80.0)


@pytest.mark.parametrize("start", ["2024-01-01T00:00:00", "2024-01-01T01:00:00+01:00", "2024-01-01"])
def test_the_clock_may_start_at_a_date_time_of_toml(tmp_path, start):
    found = fleet(tmp_path, FLEET.replace('"2024-01-01T00:00:00"', start))
    assert found.start == START


def test_parameters_of_the_policy_are_of_their_kind(tmp_path):
    text = FLEET.replace("fairness = 0.0", 'preempts = 0\ngrows = true\norder = "arrival"\nmoves_per_event = 3')
    found = fleet(tmp_path, text).policy_parameters
    assert found == {"preempts": False, "grows": True, "order": "arrival", "moves_per_event": 3}
    assert found["preempts"] is False


def test_a_link_may_go_down(tmp_path):
    change = '[[link_changes]]\nlink = "a>b"\nat_s = 10\nbandwidth = "0 Gbit/s"\n'
    assert LinkChanged(10.0, "a>b", 0.0) in fleet(tmp_path, FLEET + change).events


def test_a_series_that_ends_before_the_jobs_is_named(tmp_path):
    """Its last figure goes on for a week at most; less than that the command tells."""
    scenario = fleet(tmp_path, FLEET)
    late = FleetJob("late", Kind("llama-3.2-1b", 2048, 8), 9 * 86400.0, 1, 8, 8)
    with pytest.raises(InputError, match=r"a: electricity: ends after 0.0 days, the last job comes after 9.0"):
        play(scenario, [late], "fcfs", quotes=SimpleQuotes())
    (tmp_path / "jobs.csv").write_text(f"{HEADER}\na,400000,llama-3.2-1b,2048,8,7,8,8,,\n")
    files = [str(tmp_path / "fleet.toml"), "--jobs", str(tmp_path / "jobs.csv")]
    found = CliRunner().invoke(app, ["fleet", "simulate", *files, "--policy", "fcfs"])
    assert "a: electricity: its last figure is also used for the 110 hours after it" in found.stderr
    same = str(tmp_path / "same.svg")
    with pytest.raises(UsageError, match=r"same.svg: two results can't be written to one file"):
        CliRunner().invoke(app, ["fleet", "simulate", *files, "--plot", same, "--events", same], catch_exceptions=False)


def test_carbon_goes_on_by_the_hour_where_electricity_has_one_price(tmp_path):
    found = fleet(
        tmp_path, FLEET.replace("electricity = 40.0", 'electricity = 40.0\ncarbon = { file = "c.csv", column = "X" }')
    )
    prices = [
        (event.time_s, event.prices["b"])
        for event in found.events
        if isinstance(event, PriceChanged) and "b" in event.prices
    ]
    assert prices == [(0.0, Price(40.0, 100.0)), (1800.0, Price(40.0, 150.0))]


def test_a_written_link_goes_before_that_of_the_matrices(tmp_path):
    (tmp_path / "m.csv").write_text("src,dst,throughput_gbit_s,avg_rtt_ms\na,b,1,9\nb,a,1,9\n")
    text = FLEET.replace('between = ["a", "b"]', 'from = "a"\nto = "b"')
    found = fleet(tmp_path, text + '[matrices]\nthroughput = "m.csv"\nrtt = "m.csv"\n')
    assert {link.name: link.bandwidth_bytes_per_s for link in found.cluster.links} == {"a>b": 1.25e9, "b>a": 1.25e8}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('site = "b"', 'site = "c"', r"outages\[0\]\.site: no site 'c'"),
        ("to_s = 200", "to_s = 50", r"outages\[0\]: ends at 50 s, but begins at 100 s; give a to_s after from_s"),
        ('column = "X"', 'column = "Z"', "no column 'Z'"),
        ('start = "2024-01-01T00:00:00"', 'start = "soon"', "clock.start"),
        ("num_devices = 16", "num_device = 16", "num_device: unknown key"),
        ("pue = 1.1", "pue = 0.5", "pue"),
        ("fairness = 0.0", "fairness = nan", r"policy.fairness: expected a finite number, found nan \(line"),
        ("fairness = 0.0", "fairness = -1", "policy.fairness: must be at least 0"),
        ("fairness = 0.0", "preempts = 2", "policy.preempts: .*found 2"),
        ("fairness = 0.0", "moves_per_event = 1.5", "policy.moves_per_event"),
        ("fairness = 0.0", 'order = "size"', "policy.order: .*'size'"),
        ("fairness = 0.0", "fairnes = 1", "policy.fairnes: unknown key; did you mean 'fairness'"),
        ('start = "2024-01-01T00:00:00"', "start = 12:00:00", "clock.start: .*found 12:00:00 "),
        ('name = "b"', 'name = "a"', r"sites\[1\].name: there is already a site called 'a' \(line 13\)"),
        ('["a", "b"]', '["a", "c"]', r"links\[0\]: there is no site 'c'"),
    ],
)
def test_what_is_wrong_with_a_fleet_is_named(tmp_path, old, new, message):
    assert old in FLEET
    with pytest.raises(InputError, match=message):
        fleet(tmp_path, FLEET.replace(old, new))


RECIPES = Path(__file__).parents[2] / "recipes" / "fleet"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_of_a_fleet_loads(path):
    assert load_scenario(path).cluster.num_devices


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.csv")), ids=lambda path: path.stem)
def test_every_trace_of_the_recipes_loads(path):
    assert read_jobs(path)
