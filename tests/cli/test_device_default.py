"""The device of a run is that of the sites, unless it is said; a CPU in a GPU's place only by saying so."""

import json

import pytest
import torch

from farpipe import planning
from farpipe.core.spec import parse_job
from farpipe.engine.launch.runs import run_spec_of
from job_files import SMALL_MODEL, cluster_text

TRAINING = '\n[training]\nsequence_length = 32\nglobal_batch = 4\nnum_steps = 2\nprecision = "fp32"\n'
TRAINING += '[data]\nsource = "stdlib"\n[layout]\ntensor = 1\n'
OWN = '{ preset = "cpu", name = "NAME" }'


def job_on(*devices):
    text = SMALL_MODEL + TRAINING + cluster_text(device="DEVICE", num_devices=(1, 1))
    for device in devices:
        written = device if device.startswith("{") else f'"{device}"'
        text = text.replace('"DEVICE"', written, 1)
    return text


def device_of_run(tmp_path, name="run"):
    return json.loads((tmp_path / name / "run.json").read_text())["device"]


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", "cpu"),
        ("h100", "cuda"),
        ("v100-16gb", "cuda"),
        ("mi300x", "cuda"),
        (OWN.replace("NAME", "cpu-core-fast"), "cpu"),
        (OWN.replace("NAME", "our-gpu"), "cuda"),
    ],
)
@pytest.mark.parametrize("source", ["job.toml", "plan.json"])
def test_a_run_computes_on_what_its_sites_have(farpipe, tmp_path, device, expected, source):
    job = job_on(device, device)
    (tmp_path / "job.toml").write_text(job)
    plan = planning.plan(parse_job(job))
    plan.save(tmp_path / "plan.json")
    done = farpipe("prepare", source, "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert device_of_run(tmp_path) == expected == run_spec_of(plan, num_steps=1).device
    assert farpipe("prepare", source, "--run-dir", "said", "--device", "cpu").returncode == 0
    assert device_of_run(tmp_path, "said") == "cpu"


@pytest.mark.parametrize("form", ["sbatch", "skypilot", "jobset"])
def test_manifests_ask_for_the_gpus_of_the_sites(farpipe, tmp_path, form):
    (tmp_path / "job.toml").write_text(job_on("h100", "h100"))
    assert farpipe("prepare", "job.toml", "--run-dir", "run", "--format", form).returncode == 0
    written = "".join(path.read_text() for path in (tmp_path / "run").iterdir() if path.suffix != ".toml")
    assert any(word in written for word in ("--gpus-per-node=1", "accelerators: H100", "nvidia.com/gpu"))


def test_sites_of_both_kinds_need_a_word(farpipe, tmp_path):
    (tmp_path / "job.toml").write_text(job_on("h100", "cpu"))
    done = farpipe("prepare", "job.toml", "--run-dir", "run")
    assert (done.returncode, (tmp_path / "run").exists()) == (3, False)
    assert "zurich has h100-sxm, lugano has cpu: say --device cuda or --device cpu" in " ".join(done.stderr.split())
    assert farpipe("prepare", "job.toml", "--run-dir", "run", "--device", "cpu").returncode == 0


@pytest.mark.parametrize(
    "words", [("train", "job.toml"), ("train", "plan.json"), ("train", "job.toml", "--device", "cuda")]
)
def test_a_job_for_gpus_does_not_train_on_a_cpu_unasked(farpipe, tmp_path, without_gpu, words):
    (tmp_path / "job.toml").write_text(job_on("h100", "h100"))
    planning.plan(parse_job(job_on("h100", "h100"))).save(tmp_path / "plan.json")
    done = farpipe(*words)
    assert (done.returncode, (tmp_path / "runs").exists()) == (3, False)
    assert "this machine has no GPU that torch can use: rehearse here with --device cpu" in done.stderr


def test_a_cpu_is_not_measured_in_the_name_of_a_gpu(farpipe, tmp_path, without_gpu):
    (tmp_path / "job.toml").write_text(job_on("h100", "h100"))
    done = farpipe("profile", "job.toml")
    assert (done.returncode, (tmp_path / "profile.json").exists()) == (3, False)
    assert "a profile of h100-sxm is measured on a GPU" in done.stderr
