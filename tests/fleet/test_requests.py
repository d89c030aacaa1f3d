"""The submitted job is the quoted job: what its file says about its speed is in its quote."""

import json

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster, load_job, preset_site
from farpipe.fleet.documents import event_data, event_of
from farpipe.fleet.events import JobSubmitted
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.requests import kind_of, model_of, request_of
from farpipe.fleet.state import first_state
from farpipe.fleet.traces import read_jobs

JOB = """
[model]
preset = "llama-3.2-1b"
[training]
sequence_length = 2048
global_batch = 64
num_steps = 77
{more}
[[cluster.sites]]
name = "somewhere"
device = "h100"
num_devices = 2
"""
HEADER = "job,submit_s,model,sequence_length,global_batch,num_steps,min_devices,max_devices"
CLUSTER = Cluster(sites=(preset_site("a", "a100-80gb", 8),))
QUOTES = PlannerQuotes(CLUSTER)


def job_of(folder, more="", tables=""):
    path = folder / "job.toml"
    path.write_text(JOB.format(more=more) + tables)
    return path


def step(kind, num_devices=8):
    return QUOTES.placement(kind, (("a", num_devices),), {})


def test_a_job_s_own_settings_are_in_its_quote(tmp_path):
    plain = kind_of(load_job(job_of(tmp_path)))
    assert (plain.model, plain.sequence_length, plain.global_batch) == ("llama-3.2-1b", 2048, 64)
    assert step(plain).step_s == pytest.approx(step(Kind("llama-3.2-1b", 2048, 64)).step_s)
    exact = kind_of(load_job(job_of(tmp_path, 'precision = "fp32"\nmicrobatch_size = 1')))
    placed = step(exact)
    assert request_of(exact).training.precision == "fp32"
    assert placed.layout.microbatch_size == 1
    assert placed.step_s > 2 * step(plain).step_s, "fp32 without tensor cores"
    assert QUOTES.state_bytes(exact) / QUOTES.state_bytes(plain) == pytest.approx(12 / 14)
    pinned = kind_of(load_job(job_of(tmp_path, tables="[layout]\npipeline = 4\n")))
    assert step(pinned).layout.pipeline == 4


def test_jobs_that_differ_in_what_takes_no_time_share_their_quotes(tmp_path):
    kinds = [kind_of(load_job(job_of(tmp_path, more))) for more in ("", "learning_rate = 1e-3\nseed = 5")]
    assert kinds[0] == kinds[1]


def test_packing_is_in_the_quote(tmp_path):
    kind = kind_of(load_job(job_of(tmp_path, tables='[data]\npacking = "fixed"\n')))
    assert request_of(kind).data.packing == "fixed"


def test_a_trace_s_job_file_counts_whole_and_a_row_may_replace_its_sizes(tmp_path):
    job_of(tmp_path, "microbatch_size = 2")
    (tmp_path / "jobs.csv").write_text(f"{HEADER}\none,0,job.toml,,,,1,8\nother,0,job.toml,1024,8,5,1,8\n")
    one, other = read_jobs(tmp_path / "jobs.csv")
    assert (one.num_steps, one.kind.sequence_length, one.kind.global_batch) == (77, 2048, 64)
    assert (other.num_steps, other.kind.sequence_length, other.kind.global_batch) == (5, 1024, 8)
    assert {request_of(job.kind).training.microbatch_size for job in (one, other)} == {2}
    rows = [{"job": "j", "submit_s": 0, "model": "job.toml", "min_devices": 1, "max_devices": 8}]
    (tmp_path / "jobs.json").write_text(json.dumps(rows))
    assert read_jobs(tmp_path / "jobs.json")[0].num_steps == 77


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("j,0,llama-3.2-1b,,64,5,1,8", "does not say sequence_length and global_batch"),
        ("j,0,llama-3.2-1b,2048,64,,1,8", "num_steps: empty, and llama-3.2-1b is no job.toml"),
        ("j,0,job.toml,,7,5,1,8", "2 does not divide global_batch 7"),
    ],
)
def test_what_a_row_leaves_open_is_named(tmp_path, row, says):
    job_of(tmp_path, "microbatch_size = 2")
    (tmp_path / "jobs.csv").write_text(f"{HEADER}\n{row}\n")
    with pytest.raises(InputError, match=says):
        read_jobs(tmp_path / "jobs.csv")


def test_sites_are_the_fleet_s_choice(tmp_path):
    with pytest.raises(InputError, match="the fleet chooses the sites"):
        kind_of(load_job(job_of(tmp_path, tables='[layout]\nsites = ["somewhere"]\n')))


def test_a_kind_needs_no_file_once_it_is_made(tmp_path):
    """A log that is read on another machine, or after the file has changed, has the same model."""
    path = tmp_path / "own.toml"
    path.write_text("[model]\nnum_layers = 8\nhidden = 1024\nnum_heads = 16\nffn_hidden = 4096\nvocab_size = 32000\n")
    (tmp_path / "jobs.csv").write_text(f"{HEADER}\nj,0,own.toml,512,8,10,1,8\n")
    (job,) = read_jobs(tmp_path / "jobs.csv")
    path.unlink()
    again = event_of(json.loads(json.dumps(event_data(JobSubmitted(0.0, job))))).job
    assert (again, again.kind.model, str(tmp_path) in again.kind.request) == (job, "own.toml", False)
    assert model_of(again.kind).hidden == 1024


def test_a_job_that_no_device_can_do_is_refused():
    kind = Kind("llama-3.2-1b", 2048, 64, request='{"model":{},"training":{"precision":"fp7"}}')
    state = first_state(CLUSTER, POLICIES["fcfs"], QUOTES)
    after, commands = state.handle(JobSubmitted(0.0, FleetJob("j", kind, 0.0, 10, 8, 8)))
    assert (commands, after.jobs) == ([], {})
    assert "llama-3.2-1b" in after.verdicts[0]
