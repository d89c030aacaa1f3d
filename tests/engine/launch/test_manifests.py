"""Manifests for SkyPilot and Kubernetes: their tables, and the agents that their scripts start, played with bash."""

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from engine.launch.test_machines import placed
from farpipe.engine.launch.machines import machines_of
from farpipe.engine.launch.manifests import CLAIM, IMAGE, jobsets, skypilot_group

DEVICES = {"west": "h100-sxm", "east": "a100-80gb"}


def machines(*sites):
    return machines_of(placed(*(sites or ("west", "west", "west", "east")), num_replicas=4), {"west": 8, "east": 8})


def documents(tmp_path, devices=DEVICES, of=()):
    yaml = pytest.importorskip("yaml")
    return [*yaml.safe_load_all(skypilot_group(machines(*of), tmp_path / "run", 3, devices))]


def expect_agents(scripts, environments, tmp_path):
    """Every node of every script starts its agent of torchrun; `environments` has each script's nodes."""
    (tmp_path / "torchrun").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    told = []
    for script, nodes in zip(scripts, environments, strict=True):
        for node in nodes:
            given = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "10.0.0.1"} | node
            done = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True, check=True)
            told.append(dict(pairwise(done.stdout.split())))
    assert [(c["--nnodes"], c["--node-rank"], c["--nproc-per-node"]) for c in told] == [
        ("3", "0", "8"),
        ("3", "1", "4"),
        ("3", "2", "4"),
    ]
    assert {c["--master-addr"] for c in told} == {"10.0.0.1"}
    assert [c["--host"] for c in told] == ["10.0.0.1", "10.0.0.2", "10.0.1.1"]
    assert {c["-m"] for c in told} == {"farpipe.engine.launch.rank_main"}
    assert [c["--certs"] for c in told] == ["certs/west", "certs/west", "certs/east"]


def test_a_job_group_has_a_task_for_every_site(tmp_path):
    header, west, east = documents(tmp_path)
    assert header == {"name": "farpipe", "execution": "parallel", "inter_connection": False}
    assert (west["name"], west["num_nodes"], west["resources"]["accelerators"]) == ("west", 2, "H100:8")
    assert (east["name"], east["num_nodes"], east["resources"]["accelerators"]) == ("east", 1, "A100-80GB:4")
    assert west["envs"] == {"MASTER_ADDR": None}
    assert west["file_mounts"] == {str(tmp_path / "run"): str(tmp_path / "run"), f"{tmp_path}/certs/west": "certs/west"}
    ips = [["10.0.0.1", "10.0.0.2"], ["10.0.1.1"]]
    nodes = [
        [{"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "\n".join(found)} for rank in range(len(found))]
        for found in ips
    ]
    expect_agents([west["run"], east["run"]], nodes, tmp_path)


def test_a_site_that_is_visited_again_is_a_task_of_its_own(tmp_path):
    tasks = documents(tmp_path, of=("west", "east", "west"))[1:]
    assert [task["name"] for task in tasks] == ["west", "east", "west-2"]


def test_devices_are_left_out_on_a_cpu_and_have_skypilot_s_names(tmp_path):
    assert "accelerators" not in documents(tmp_path, {})[1]["resources"]
    for device, name in {
        "rtx-4090": "RTX4090",
        "v100-32gb": "V100-32GB",
        "v100-16gb": "V100",
        "mi300x": "MI300X",
    }.items():
        assert documents(tmp_path, {"west": device})[1]["resources"]["accelerators"] == f"{name}:8"


def test_a_relative_run_directory_is_found_from_where_pods_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in jobsets(machines(), Path("runs/one"), 3, with_gpus=False).values():
        assert f"farpipe.engine.launch.rank_main {tmp_path}/runs/one " in text


def test_a_job_set_has_a_pod_for_every_machine(tmp_path):
    found = jobsets(machines(), tmp_path / "run", 3, with_gpus=True)
    assert [*found] == ["west.jobset.json", "east.jobset.json"]
    west, east = (json.loads(text) for text in found.values())
    assert (west["apiVersion"], west["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    jobs = [one["spec"]["replicatedJobs"][0]["template"]["spec"] for one in (west, east)]
    assert [(job["completions"], job["parallelism"], job["completionMode"]) for job in jobs] == [
        (2, 2, "Indexed"),
        (1, 1, "Indexed"),
    ]
    pods = [job["template"]["spec"] for job in jobs]
    assert [pod["containers"][0]["resources"]["limits"] for pod in pods] == [
        {"nvidia.com/gpu": 8},
        {"nvidia.com/gpu": 4},
    ]
    assert pods[0]["containers"][0]["image"] == f"{IMAGE}-cuda"
    assert pods[0]["volumes"][0]["persistentVolumeClaim"]["claimName"] == CLAIM
    assert pods[0]["containers"][0]["volumeMounts"][0]["mountPath"] == str(tmp_path)
    scripts = [pod["containers"][0]["command"][2] for pod in pods]
    nodes = [[{"JOB_COMPLETION_INDEX": "0", "POD_IP": "10.0.0.1"}, {"JOB_COMPLETION_INDEX": "1", "POD_IP": "10.0.0.2"}],
             [{"JOB_COMPLETION_INDEX": "0", "POD_IP": "10.0.1.1"}]]  # fmt: skip
    expect_agents(scripts, nodes, tmp_path)
    plain = json.loads(jobsets(machines(), tmp_path / "run", 3, with_gpus=False)["west.jobset.json"])
    assert (
        "resources" not in plain["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    )
