import json
from pathlib import Path

import pytest

from farpipe.cli.profile import _num_processes
from farpipe.spec import load_job

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("recipe", "device", "num_cores", "expected"),
    [("two_sites.toml", "cpu", 2, 2), ("two_sites.toml", "cpu", 64, 16), ("two_sites.toml", "cuda", 64, 1)],
)
def test_as_many_processes_measure_as_would_train_here(monkeypatch, recipe, device, num_cores, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_cores)))
    assert _num_processes(load_job(RECIPES / recipe), device) == expected


JOB = """
[model]
num_layers = 4
hidden = 256
num_heads = 4
ffn_hidden = 1024
vocab_size = 1000
[training]
sequence_length = 128
global_batch = 8
microbatch_size = 2
precision = "fp32"
[layout]
tensor = 2
[[cluster.sites]]
name = "a"
device = "a100-40gb"
num_devices = 4
"""
LAYERS = {str(number): [1e-3, 2e-3, 1e-4] for number in range(6)}
IMPORT = ("profile", "job.toml", "--import", "sailor")


@pytest.fixture
def sailor(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    tables = {"GPT": {"A100-40": {"2": {"1": LAYERS, "2": {key: [x / 2 for x in row] for key, row in LAYERS.items()}}}}}
    (tmp_path / "theirs.json").write_text(json.dumps(tables))
    (tmp_path / "lists.json").write_text(json.dumps({"GPT": {"A100-40": [1, 2]}}))


def test_the_table_of_the_job_s_tensor_degree_becomes_a_profile_and_a_plan(farpipe, tmp_path, sailor):
    run = farpipe(*IMPORT, "--file", "theirs.json", "--table", "GPT/A100-40")
    assert run.returncode == 0, run.stderr
    data = json.loads((tmp_path / "profile.json").read_text())
    assert (data["tensor"], data["layer"]["forward_s"]) == (2, pytest.approx(5e-4))
    plan = farpipe("plan", "job.toml", "--profile", "profile.json", "--no-arms", "--json")
    assert json.loads(plan.stdout)["layout"]["tensor"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((*IMPORT, "--table", "GPT/A100-40"), 2, "name the file of Sailor's profiler with --file"),
        ((*IMPORT, "--file", "theirs.json"), 2, "--table: expected MODEL/DEVICE"),
        ((*IMPORT, "--file", "theirs.json", "--table", "GPT/A100-4"), 3, "did you mean 'A100-40'"),
        ((*IMPORT, "--file", "lists.json", "--table", "GPT/A100-40"), 3, "expected tables by microbatch size"),
        ((*IMPORT, "--file", "nowhere.json", "--table", "GPT/A100-40"), 3, "nowhere.json: can't be read"),
        ((*IMPORT, "--file", "theirs.json", "--processes", "2"), 2, "--processes is for measuring"),
        (("profile", "job.toml", "--table", "GPT/A100-40"), 2, "--table is for tables of others: add --import sailor"),
    ],
)
def test_what_is_wrong_with_an_import_is_told(farpipe, sailor, arguments, code, message):
    run = farpipe(*arguments)
    assert (run.returncode, message in run.stderr) == (code, True), run.stderr
