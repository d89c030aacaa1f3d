"""`--set KEY=VALUE`: a job with other values than its file has."""

import json

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import load_job
from job_files import SMALL_MODEL, cluster_text

JOB = SMALL_MODEL + '[training]\nsequence_length = 64\nglobal_batch = 16\nprecision = "fp32"\n' + cluster_text()


@pytest.fixture(autouse=True)
def job_file(tmp_path):
    """The job, in the folder of the commands."""
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ("training.global_batch=8", ("plan", "job.toml", "-o", "p.json", "--no-strategies")),
        ("cluster.links.latency=80 ms", ("schedule", "job.toml", "--method", "gpipe")),
    ],
    ids=["plan", "schedule"],
)
def test_a_key_of_the_job_is_changed_as_in_its_file(farpipe, given, command):
    plain, changed = (farpipe(*command, "--json", *more) for more in ((), ("--set", given)))
    assert (plain.returncode, changed.returncode) == (0, 0), changed.stderr
    assert json.loads(plain.stdout) != json.loads(changed.stdout)


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ("training.global_batsh=8", 3, "with --set training.global_batsh: training.global_batsh"),
        ("training.global_batch.size=8", 3, "with --set training.global_batch.size: training.global_batch is a value"),
        ("cluster.links.9.latency=1 ms", 3, "cluster.links has entries 0 to"),
        ("training", 2, "expected NAME=VALUE"),
    ],
)
def test_what_the_file_could_not_say_is_refused(farpipe, given, code, words):
    done = farpipe("plan", "job.toml", "--set", given)
    assert (done.returncode, words in " ".join(done.stderr.split())) == (code, True), done.stderr


def test_a_plan_has_no_key_to_change(farpipe):
    assert farpipe("plan", "job.toml", "--no-strategies").returncode == 0
    done = farpipe("compare", "plan.json", "--set", "training.global_batch=8")
    assert (done.returncode, "--set changes a job, and plan.json is none" in done.stderr) == (2, True)


def test_a_plan_leaves_the_keys_of_a_run_and_the_order_open(farpipe, tmp_path):
    assert farpipe("plan", "job.toml", "--no-strategies", "--set", "data.source=stdlib").returncode == 0
    keys = ("--set", "run.max_restarts=3", "--set", "run.outage_s=5", "--set", "schedule.method=gpipe")
    done = farpipe("prepare", "plan.json", "--device", "cpu", "--run-dir", "new", *keys)
    assert "--max-restarts 3" in done.stdout, done.stderr
    run = json.loads((tmp_path / "new" / "run.json").read_text())
    assert (run["transport"]["outage_s"], run["device"]) == (5.0, "cpu")
    plan = json.loads((tmp_path / "new" / "plan.json").read_text())
    assert (plan["schedule"]["method"], plan["job"]["run"]["max_restarts"]) == ("gpipe", 3)
    again = farpipe("prepare", "plan.json", "--device", "cpu", "--run-dir", "new", *keys, "--set", "run.outage_s=6")
    assert "new: was prepared before, with another plan or other settings; the earlier one is now" in again.stderr
    assert json.loads((tmp_path / "new" / "run.previous.json").read_text()) == run
    for key, code, words in (
        ("training.global_batch=8", 2, "--set training.global_batch: the plan has this decided; give the job"),
        ("run.outages=5", 3, "--set: run.outages: unknown key"),
        ("run.outage_s=0", 3, "--set: run.outage_s: must be more than 0"),
    ):
        refused = farpipe("prepare", "plan.json", "--run-dir", "other", "--set", key)
        assert (refused.returncode, words in refused.stderr) == (code, True), refused.stderr


def test_the_same_from_python(job_file):
    changed = load_job(job_file, {"cluster.links.latency": "30 ms", "schedule.method": "gpipe", "training.seed": None})
    assert {link.latency_s for link in changed.cluster.links} == {0.03}
    assert changed.schedule == "gpipe"
    assert load_job(changed, {"schedule.method": "1f1b"}).schedule == "1f1b"
    with pytest.raises(InputError, match=r"job.toml with schedule.methode: schedule.methode"):
        load_job(job_file, {"schedule.methode": "gpipe"})
