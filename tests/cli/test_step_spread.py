"""Commands about steps that differ: links that lose packets."""

import json

import pytest

from job_files import cluster_text

JOB = """
[model]
preset = "gpt3-1.3b"
[training]
sequence_length = 2048
global_batch = 16
microbatch_size = 1
recompute = "none"
[layout]
pipeline = 4
data = 1
tensor = 1
sites = ["zurich", "lugano"]
"""


def write_job(folder, link=""):
    """A pipeline over two sites; `link` is more of the table of their link."""
    text = cluster_text(device="h100", num_devices=(2, 2), latency="20 ms", bandwidth="1 Gbit/s")
    path = folder / "job.toml"
    path.write_text(f"{JOB}{text}{link}\n")
    return path.name


def spread(data):
    return [data[f"step_{name}_s"] for name in ("mean", "p50", "p90")]


@pytest.mark.slow
def test_a_plan_over_lossy_links_shows_its_steps_as_a_distribution(farpipe, tmp_path):
    job = write_job(tmp_path, "loss = 0.01")
    planned = farpipe("plan", job, "--json", "--no-strategies")
    assert planned.returncode == 0, planned.stderr
    data = json.loads(planned.stdout)
    assert data["step_s"] == data["step_mean_s"] == data["prediction"]["spread"]["mean_s"]
    assert data["step_p50_s"] < data["step_p90_s"]
    assert spread(json.loads(farpipe("simulate", "plan.json", "--json").stdout)) == spread(data)
    assert "nine of ten within" in farpipe("simulate", "plan.json").stdout
    assert "nine of ten within" in farpipe("plan", job, "--no-strategies").stdout
