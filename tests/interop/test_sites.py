"""Sites from Slurm and SkyPilot, in the forms that their versions write."""

import json

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job
from farpipe.interop.settings import cluster_lines
from farpipe.interop.sites import read_sites
from interop.test_traces import JOB

NODE = """NodeName={name} Arch=x86_64 CoresPerSocket=48
   CPUAlloc=0 CPUTot=192 CPULoad=0.10
   AvailableFeatures=gpu:none ActiveFeatures=(null)
   Gres={gres}
   NodeAddr={name} NodeHostName={name} Version=23.11.4
   State={state} ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A
   Partitions=train,debug
   CfgTRES=cpu=192,mem=2000G,billing=192,gres/gpu=8

"""
H100, A100 = "gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", "gpu:a100-sxm4-80gb:4(S:0)"
STATES = ("IDLE", "MIXED", "ALLOCATED+PLANNED", "IDLE+DRAIN", "DOWN*")


def text_of(nodes):
    return "".join(NODE.format(name=name, gres=gres, state=state) for name, gres, state in nodes)


def one_line(nodes):
    return "\n".join(" ".join(record.split()) for record in text_of(nodes).split("\n\n"))


def scontrol_json(nodes):
    found = [
        {"name": name, "gres": gres, "state": state.split("+"), "partitions": ["a"]} for name, gres, state in nodes
    ]
    return json.dumps({"nodes": found, "meta": {"slurm": {"cluster": "alpha"}}})


def old_json(nodes):
    """As sinfo wrote it before 23.02: the state and its flags apart."""
    return json.dumps({"nodes": [old_node(*node) for node in nodes]})


def old_node(name, gres, state):
    state, *flags = state.lower().strip("*").split("+")
    return {"name": name, "gres": gres, "state": state, "state_flags": [flag.upper() for flag in flags]}


def sinfo_json(nodes):
    """A row for each partition, so that every node stands there twice."""
    rows = [
        {
            "node": {"state": state.strip("*").split("+")},
            "nodes": {"total": 1, "nodes": [name]},
            "gres": {"total": gres, "used": ""},
            "partition": {"name": partition},
        }
        for partition in ("train", "debug")
        for name, gres, state in nodes
    ]
    return json.dumps({"sinfo": rows, "meta": {"slurm": {"cluster": "alpha"}}})


FORMS = {"text": text_of, "one line": one_line, "scontrol": scontrol_json, "old": old_json, "sinfo": sinfo_json}


def write(tmp_path, text, name="alpha.txt"):
    path = tmp_path / name
    path.write_text(text)
    return path


def figures(sites):
    return [(one.name, one.device.value, one.num_devices.value, one.devices_per_machine.value) for one in sites]


@pytest.mark.parametrize("form", FORMS)
def test_nodes_that_are_up_are_one_site(form, tmp_path):
    nodes = [(f"n{index}", H100, state) for index, state in enumerate(STATES)] + [("login", "(null)", "IDLE")]
    found = read_sites(write(tmp_path, FORMS[form](nodes)), "b200")
    assert figures(found.sites) == [("alpha", "h100-sxm", 24, 8)]
    assert found.notes == ["alpha.txt: 2 nodes left out, which are down or drained"]


def test_kinds_of_devices_are_sites_of_their_own_and_unknown_ones_are_told(tmp_path):
    nodes = [("a", H100, "IDLE"), ("b", A100, "IDLE"), ("c", "gpu:4", "IDLE"), ("d", "gpu:gtx980:1", "IDLE")]
    found = read_sites(write(tmp_path, text_of(nodes)), "b200")
    assert figures(found.sites) == [
        ("alpha-nvidia_h100_80gb_hbm3-8", "h100-sxm", 8, 8),
        ("alpha-a100-sxm4-80gb-4", "a100-80gb", 4, 4),
        ("alpha-gpu-4", "b200", 4, 4),
    ]
    assert found.notes == ["alpha.txt: 1 nodes with 1 'gtx980', which is not in the catalogue"]
    assert "--site" in found.sites[2].device.origin


def test_groups_without_names_count_by_their_total(tmp_path):
    row = {"node": {"state": ["IDLE"]}, "nodes": {"total": 12, "nodes": []}, "gres": {"total": "gpu:H200:8"}}
    found = read_sites(write(tmp_path, json.dumps({"sinfo": [row]}), "beta.json"), "h100")
    assert figures(found.sites) == [("beta", "h200", 96, 8)]


@pytest.mark.parametrize("state", ["IDLE*", "IDLE+NOT_RESPONDING", "MIXED+NO_RESPOND+CLOUD"])
@pytest.mark.parametrize("form", ["text", "one line", "scontrol"])
def test_a_node_that_does_not_respond_is_left_out(form, state, tmp_path):
    nodes = [("a", H100, "IDLE"), ("b", H100, state)]
    assert figures(read_sites(write(tmp_path, FORMS[form](nodes)), "b200").sites) == [("alpha", "h100-sxm", 8, 8)]


def test_a_node_of_slurm_before_23_02_that_does_not_respond_is_left_out(tmp_path):
    """The state and its flags apart, as the fake report of mila-iqia/clockwork's tests has them."""
    lost = {"name": "b", "gres": H100, "state": "idle", "state_flags": ["NOT_RESPONDING"]}
    text = json.dumps({"nodes": [old_node("a", H100, "IDLE"), lost]})
    assert figures(read_sites(write(tmp_path, text), "b200").sites) == [("alpha", "h100-sxm", 8, 8)]


@pytest.mark.parametrize("kind", ["1g.10gb", "a100_3g.20gb", "nvidia_a100_80gb_pcie_1g.10gb"])
def test_parts_of_a_gpu_are_no_gpus(kind, tmp_path):
    found = read_sites(write(tmp_path, text_of([("a", H100, "IDLE"), ("b", f"gpu:{kind}:7", "IDLE")])), "b200")
    assert [site.num_devices.value for site in found.sites] == [8]
    assert kind in found.notes[0]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("nvidia_h100_pcie", "h100-pcie"),
        ("h100-80gb-pcie", "h100-pcie"),
        ("NVIDIA-H100-NVL", "h100-nvl"),
        ("H100-SXM5-80GB", "h100-sxm"),
        ("NVIDIA-H100-80GB-HBM3", "h100-sxm"),
        ("nvidia_h200_nvl", "h200-nvl"),
        ("nvidia_h200", "h200"),
        ("nvidia_a100_80gb_pcie", "a100-pcie-80gb"),
        ("nvidia_a100-pcie-40gb", "a100-pcie-40gb"),
        ("nvidia_a100-sxm4-40gb", "a100-40gb"),
        ("tesla_v100-sxm2-32gb", "v100-32gb"),
        ("nvidia_l40s", "l40s"),
        ("NVIDIA-GH200-480GB", "gh200"),
        ("nvidia_geforce_rtx_4090", "rtx-4090"),
        ("AMD_Instinct_MI300X_OAM", "mi300x"),
    ],
)
def test_a_driver_s_name_is_the_catalogue_s_device(kind, found, tmp_path):
    site = read_sites(write(tmp_path, text_of([("a", f"gpu:{kind}:4", "IDLE")])), "b200")
    assert (site.sites[0].device.value, site.notes) == (found, [])


@pytest.mark.parametrize(
    "kind",
    [
        *("nvidia_h20", "h800", "nvidia_a800-sxm4-80gb", "a100-sxm-64gb", "nvidia_h100_80gb_hbm2e", "h100-94gb"),
        *("tesla_v100-pcie-16gb", "nvidia_geforce_rtx_3090_ti", "nvidia_geforce_rtx_4090_d", "nvidia_l40", "mi300a"),
        *("nvidia_gh200_144g_hbm3e", "nvidia_rtx_6000_ada_generation", "h200-pcie", "nvidia_h100_80gb_hbm3-shared"),
    ],
)
def test_a_device_that_only_resembles_one_of_the_catalogue_is_told(kind, tmp_path):
    found = read_sites(write(tmp_path, text_of([("a", H100, "IDLE"), ("b", f"gpu:{kind}:4", "IDLE")])), "b200")
    assert [site.device.value for site in found.sites] == ["h100-sxm"]
    assert found.notes == [f"alpha.txt: 1 nodes with 4 {kind!r}, which is not in the catalogue"]


@pytest.mark.parametrize("kind", ["a100", "h100", "v100", "H200"])
def test_a_name_of_several_devices_is_told_to_be_a_guess(kind, tmp_path):
    found = read_sites(write(tmp_path, text_of([("a", f"gpu:{kind}:4", "IDLE")])), "b200")
    assert f"{kind!r} does not tell its memory and form: taken as {found.sites[0].device.value}" in found.notes[0]


@pytest.mark.parametrize(("kind", "found"), [("A100", "a100-40gb"), ("A100-80GB", "a100-80gb"), ("H100", "h100-sxm")])
def test_skypilot_s_names_are_its_own(kind, found, tmp_path):
    text = f"resources: {{accelerators: '{kind}:8'}}\nrun: x"
    assert read_sites(write(tmp_path, text, "x.yaml"), "b200").sites[0].device.value == found


def test_resources_that_are_called_like_gpus_are_none(tmp_path):
    gres = f"vgpu:4,gpu_mem:80,{H100},shard:h100:32"
    assert figures(read_sites(write(tmp_path, text_of([("a", gres, "IDLE")])), "b200").sites) == [
        ("alpha", "h100-sxm", 8, 8)
    ]


SKY = """name: west
num_nodes: 4
resources:
  infra: aws/us-west-2
  accelerators: H100:8
run: python train.py
---
num_nodes: 2
resources: {infra: gcp/us-central1, accelerators: {A100-80GB: 8}}
"""


def test_tasks_of_skypilot_are_sites_that_a_job_can_have(tmp_path):
    sites = read_sites(write(tmp_path, SKY, "tasks.yaml"), "h100").sites
    assert figures(sites) == [("west", "h100-sxm", 32, 8), ("gcp-us-central1", "a100-80gb", 16, 8)]
    lines = cluster_lines(sites, {"latency": ("7 ms", "ping")})
    job = parse_job(JOB.partition("[layout]")[0] + "\n".join(lines))
    assert [site.num_devices for site in job.cluster.sites] == [32, 16]
    assert job.cluster.link("gcp-us-central1", "west").latency_s == pytest.approx(7e-3)


@pytest.mark.parametrize(("asked", "each"), [("0.5", 1), (0.25, 1), ("2", 2), ("", 1), (None, 1)])
def test_a_part_of_a_gpu_counts_as_one_as_in_lists_of_jobs(asked, each, tmp_path):
    wanted = f"{{H100: {'null' if asked is None else asked or 'null'}}}"
    text = f"num_nodes: 2\nresources: {{accelerators: {wanted}}}\n"
    site = read_sites(write(tmp_path, text, "x.yaml"), "b200").sites[0]
    assert (site.num_devices.value, site.devices_per_machine.value) == (2 * each, each)
    assert ("part of one" in site.num_devices.origin) is (asked in ("0.5", 0.25))


@pytest.mark.parametrize("asked", ["0", "-1", "some", "[1]", "1e9", ".nan"])
def test_a_number_of_gpus_that_is_none_is_refused(asked, tmp_path):
    with pytest.raises(InputError, match=r"x\.yaml: resources"):
        read_sites(write(tmp_path, f"resources: {{accelerators: {{H100: {asked}}}}}\n", "x.yaml"), "b200")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.json", '{"nodes": [{"id": 1}], "links": []}'),
        ("x.json", '{"nodes": 7, "sinfo": 3}'),
        ("x.json", '{"sinfo": [{"a": 1}, 3]}'),
        ("x.yaml", "resources: {limits: {nvidia.com/gpu: 8}}"),
        ("x.yaml", "resources: {requests: {cpu: 1}}\nreplicaCount: 2"),
    ],
)
def test_one_key_makes_no_machines(name, text, tmp_path):
    assert read_sites(write(tmp_path, text, name), "h100") is None


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (text_of([("a", H100, "DOWN*")]), "x.txt", "no node that is up has GPUs of the catalogue.*1 nodes left out"),
        (text_of([("a", "(null)", "IDLE")]), "x.txt", "no node that is up has GPUs"),
        ('{"sinfo": [{"nodes": {"total": 4}, "gres": "gpu:a100:4"}]}', "x.json", "x.json: sinfo: expected groups with"),
        ("resources: {accelerators: {H100: 8, A100: 8}}", "x.yaml", "expected one kind such as H100:8"),
        ("resources: {any_of: [{accelerators: H100}]}", "x.yaml", "several choices"),
        ("resources: {cpus: 4}", "x.yaml", "expected one kind such as H100:8, found None"),
        ("resources: {accelerators: 'tpu-v6e:8'}", "x.yaml", "'tpu-v6e' is not in the catalogue"),
    ],
)
def test_what_gives_no_site_is_refused(text, name, words, tmp_path):
    with pytest.raises(InputError, match=words):
        read_sites(write(tmp_path, text, name), "h100")


@pytest.mark.parametrize(
    ("text", "name"), [("--num-layers 3", "a.sh"), ('{"model_type": "llama"}', "a.json"), ("a: 1", "a.yaml")]
)
def test_other_files_are_none(text, name, tmp_path):
    assert read_sites(write(tmp_path, text, name), "h100") is None
