"""``farpipe prepare``: the directory of a run, and the commands for each site."""

import json
import os
import re
import shlex
import shutil
import subprocess
from itertools import pairwise

import pytest

from farpipe.core.errors import InputError, UsageError
from farpipe.core.spec import parse_job
from farpipe.engine.launch.directory import choose_run_dir
from farpipe.engine.launch.machines import hostfile, machines_of, read_hostfile, sbatch_scripts, torchrun_commands
from farpipe.engine.launch.run import run
from farpipe.engine.replicas.places import Places
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.transport.security import authority
from farpipe.engine.transport.security.tls import TlsFiles
from farpipe.planning import Plan
from job_files import cluster_text
from trainings import make_run


def commands(spec, max_restarts=0, devices_per_machine=None, hosts=None):
    """The arguments of every torchrun that is shown, by option."""
    machines = machines_of(spec, devices_per_machine or {}, hosts)
    text = torchrun_commands(machines, "runs/x", max_restarts).replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines() if line.strip().startswith("torchrun")]
    return [dict(pairwise(words)) for words in lines]


def placed(*sites, num_replicas=1):
    spec = make_run("text", placement=tuple(range(len(sites))))
    return spec.with_plan(sites=sites, replicas=(sites,) * num_replicas)


def test_every_site_gets_its_command():
    found = commands(placed("west", "west", "east"), max_restarts=3)
    assert [(c["--nnodes"], c["--node-rank"], c["--nproc-per-node"]) for c in found] == [
        ("2", "0", "2"),
        ("2", "1", "1"),
    ]
    assert [c["--host"] for c in found] == ["ADDRESS_OF_west", "ADDRESS_OF_east"]
    assert [c["--certs"] for c in found] == ["certs/west", "certs/east"]
    assert {c["--master-addr"] for c in found} == {"ADDRESS_OF_west"}
    assert {c["--max-restarts"] for c in found} == {"3"}


def test_each_site_finds_its_certificate_where_its_command_looks(tmp_path):
    authority.init(tmp_path / "certs")
    for command, site in zip(commands(placed("west", "far east")), ("west", "far east"), strict=True):
        authority.issue(tmp_path / "certs", site)
        shutil.copytree(tmp_path / command["--certs"], tmp_path / "machines" / site / command["--certs"])
        assert TlsFiles.find(tmp_path / "machines" / site / command["--certs"], site).key.is_file()


def test_replicas_are_processes_of_their_site():
    spec = placed("west", "east", num_replicas=2)
    assert isinstance(spec.places, Places)
    assert [c["--nproc-per-node"] for c in commands(spec)] == ["2", "2"]


def test_a_site_that_is_visited_twice_has_two_agents():
    assert [c["--host"] for c in commands(placed("a", "b", "a"))] == ["ADDRESS_OF_a", "ADDRESS_OF_b", "ADDRESS_OF_a"]


def test_every_machine_of_a_site_gets_its_command():
    spec = placed("west", "west", "east", num_replicas=8)
    found = commands(spec, devices_per_machine={"west": 8, "east": 8})
    assert [(c["--nnodes"], c["--node-rank"], c["--nproc-per-node"]) for c in found] == [
        ("3", str(node), "8") for node in range(3)
    ]
    assert [c["--host"] for c in found] == ["ADDRESS_OF_west_0", "ADDRESS_OF_west_1", "ADDRESS_OF_east"]
    assert {c["--master-addr"] for c in found} == {"ADDRESS_OF_west_0"}


def test_the_last_machine_of_a_site_may_have_fewer_processes():
    found = commands(placed("west", "west", "west", num_replicas=4), devices_per_machine={"west": 8})
    assert [c["--nproc-per-node"] for c in found] == ["8", "4"]


HOSTS = """# the machines
10.0.0.1 site=west
10.0.0.2 site=west slots=1  # the small one
10.0.1.1 site=east slots=8
"""


def test_a_hostfile_fills_addresses_in(tmp_path):
    (tmp_path / "hosts").write_text(HOSTS)
    hosts = read_hostfile(tmp_path / "hosts")
    found = commands(placed("west", "west", "west", "east"), devices_per_machine={"west": 2, "east": 1}, hosts=hosts)
    assert [(c["--host"], c["--nproc-per-node"]) for c in found] == [
        ("10.0.0.1", "2"),
        ("10.0.0.2", "1"),
        ("10.0.1.1", "1"),
    ]
    assert {c["--master-addr"] for c in found} == {"10.0.0.1"}


def test_a_hostfile_that_is_written_can_be_read(tmp_path):
    spec = placed("west", "west", "east", num_replicas=8)
    machines = machines_of(spec, {"west": 8, "east": 4})
    (tmp_path / "hosts").write_text(hostfile(machines))
    again = machines_of(spec, {}, read_hostfile(tmp_path / "hosts"))
    assert [(m.site, m.number, m.num_processes, m.address) for m in again] == [
        (m.site, m.number, m.num_processes, m.address) for m in machines
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("10.0.0.1", r"line 2: expected ADDRESS site=NAME"),
        ("10.0.0.1 sites=west", r"line 2: unknown word 'sites'; did you mean 'site'"),
        ("10.0.0.1 site=west slots=many", r"line 2: slots: expected a number of processes, found 'many'"),
    ],
)
def test_a_wrong_line_of_a_hostfile_is_named(line, words, tmp_path):
    (tmp_path / "hosts").write_text(f"# machines\n{line}\n")
    with pytest.raises(InputError, match=words):
        read_hostfile(tmp_path / "hosts")


def test_too_few_machines_in_a_hostfile_are_said(tmp_path):
    (tmp_path / "hosts").write_text(HOSTS)
    with pytest.raises(InputError, match="site 'east' needs more than the 1 machines"):
        commands(placed("east", "east", num_replicas=8), hosts=read_hostfile(tmp_path / "hosts"))


def test_a_slurm_script_starts_the_agents_of_its_site(tmp_path):
    """Run with commands in the place of srun and torchrun, one process per node as Slurm starts them."""
    spec = placed("west", "west", "west", "east", num_replicas=4)
    machines = machines_of(spec, {"west": 8, "east": 8})
    scripts = sbatch_scripts(machines, tmp_path / "run", 3, with_gpus=True)
    assert [*scripts] == ["west.sbatch", "east.sbatch"]
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--signal=TERM@180"):
        assert f"#SBATCH {line}" in scripts["west.sbatch"]
    for name, body in {
        "srun": 'shift; for SLURM_NODEID in $(seq 0 $((NODES - 1))); do export SLURM_NODEID; "$@"; done',
        "torchrun": 'echo "$@"',
        "hostname": "echo 10.0.0.7 10.1.0.7",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    told = []
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "10.0.0.1"}
    for text, nodes in zip(scripts.values(), ("2", "1"), strict=True):
        done = subprocess.run(
            ["bash", "-c", text], env=environment | {"NODES": nodes}, capture_output=True, text=True, check=True
        )
        told += [dict(pairwise(line.split())) for line in done.stdout.splitlines()]
    assert [(c["--nnodes"], c["--node-rank"], c["--nproc-per-node"]) for c in told] == [
        ("3", "0", "8"),
        ("3", "1", "4"),
        ("3", "2", "4"),
    ]
    assert {c["--master-addr"] for c in told} == {"10.0.0.1"}
    assert {c["--host"] for c in told} == {"10.0.0.7"}
    del environment["MASTER_ADDR"]
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "set it to the address of the first machine at west" in done.stderr


JOB = f"""
[model]
preset = "tiny"
[training]
sequence_length = 64
global_batch = 8
num_steps = 2
precision = "fp32"
{cluster_text("a", "b", latency="1 ms", bandwidth="1 Gbit/s")}
"""


def test_gpus_need_a_text_and_others_are_told_of_it(farpipe, tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    done = farpipe("prepare", "job.toml", "--device", "cuda")
    assert done.returncode == 3
    assert "data.source: needed to train on GPUs" in done.stderr
    (tmp_path / "job.toml").write_text(JOB + '[data]\nsource = "stdlib"\n')
    done = farpipe("prepare", "job.toml", "--device", "cuda", "--format", "sbatch")
    assert done.returncode == 0, done.stderr
    assert "training text: the source code of Python's standard library" in done.stderr
    assert re.search("Plan for tiny over (a > b|b > a)", done.stdout)
    assert "sends everything over TCP" in done.stdout
    assert "sbatch runs/last/a.sbatch" in done.stdout
    assert (tmp_path / "runs/last/hostfile").exists()


@pytest.mark.parametrize(
    ("form", "files", "command"),
    [
        ("skypilot", ["skypilot.yaml"], "sky jobs launch"),
        ("jobset", ["a.jobset.json", "b.jobset.json"], "kubectl apply"),
    ],
)
def test_manifests_are_written_into_the_run_directory(form, files, command, farpipe, tmp_path):
    (tmp_path / "job.toml").write_text(JOB + '[data]\nsource = "stdlib"\n')
    done = farpipe("prepare", "job.toml", "--device", "cuda", "--format", form)
    assert done.returncode == 0, done.stderr
    for name in files:
        assert f"runs/last/{name}" in done.stdout
        assert (tmp_path / "runs/last" / name).is_file()
    assert command in done.stdout


def make_checkpoint(folder):
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({}))


def test_a_run_goes_on_in_its_own_directory_unless_another_is_named(tmp_path):
    make_checkpoint(tmp_path / "run" / "checkpoints" / "step-3")
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    place = choose_run_dir(None, tmp_path / "run")
    assert (place.run_dir, place.resume, place.in_place) == (tmp_path / "run", None, True)
    place = choose_run_dir(tmp_path / "other", tmp_path / "run")
    assert (place.run_dir, place.resume, place.in_place) == (tmp_path / "other", str(tmp_path / "run"), False)
    one = tmp_path / "run" / "checkpoints" / "step-3"
    assert choose_run_dir(tmp_path / "other", one).resume == str(one)


def test_what_can_not_be_gone_on_from_is_refused(tmp_path):
    one = tmp_path / "run" / "checkpoints" / "step-3"
    make_checkpoint(one)
    with pytest.raises(UsageError, match="give --run-dir another directory"):
        choose_run_dir(None, one)
    with pytest.raises(InputError, match=r"no complete checkpoint in .*nowhere.checkpoints"):
        choose_run_dir(None, tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"has the metrics\.jsonl of an earlier run"):
        choose_run_dir(tmp_path / "other", tmp_path / "run")


def test_a_rehearsal_does_not_go_on_from_a_checkpoint(farpipe, tmp_path):
    done = farpipe("train", "job.toml", "--device", "sleep", "--resume", tmp_path)
    assert done.returncode == 2
    assert "a rehearsal trains nothing" in done.stderr


def test_metrics_of_the_job_are_those_of_the_run(farpipe, tmp_path):
    text = JOB + '[data]\nsource = "stdlib"\n[metrics]\nlog_every_steps = 3\nprometheus_port = 0\n'
    (tmp_path / "job.toml").write_text(text)
    assert farpipe("prepare", "job.toml").returncode == 0
    spec = RunSpec.load(tmp_path / "runs/last/run.json")
    assert (spec.metrics.log_every_steps, spec.metrics.prometheus_port, spec.metrics.tensorboard) == (3, 0, False)
    plan = Plan.load(tmp_path / "runs/last/plan.json")
    assert parse_job(plan.job.model_copy(update={"text": ""}).to_toml()).metrics == spec.metrics


@pytest.mark.parametrize(
    "content",
    [
        {"job.toml": "mine"},
        {"plan.json": "{}", "notes.txt": "mine"},
        {"checkpoints/step-5/model.pt": "another program's"},
        {"run.json": '{"another": "program"}'},
        {"logs/rank-0.log": "x", "report.html": "y", "trace.json": "z", "more": ""},
    ],
    ids=lambda content: next(iter(content)),
)
@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_folder_that_is_no_run_is_left_alone(command, content, farpipe, tmp_path):
    for name, text in content.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    done = farpipe(command, "job.toml", "--device", "sleep", "--run-dir", tmp_path / "mine")
    assert done.returncode == 3
    first = min(content).partition("/")[0]
    assert f"mine: is no run (there is no run.json of farpipe's), but has {first}" in done.stderr
    paths = [path for path in (tmp_path / "mine").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "mine")): path.read_text() for path in paths} == content


def test_a_folder_of_a_run_without_results_or_with_nothing_to_see_is_taken(farpipe, tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "new" / "lost+found").mkdir(parents=True)
    (tmp_path / "new" / ".lock").touch()
    for _ in range(2):
        done = farpipe("prepare", "job.toml", "--device", "sleep", "--run-dir", tmp_path / "new")
        assert done.returncode == 0, done.stderr


def test_a_hostfile_that_was_filled_in_is_kept(farpipe, tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    words = ("prepare", "job.toml", "--device", "sleep", "--run-dir", tmp_path / "new")
    assert farpipe(*words).returncode == 0
    assert not (tmp_path / "new" / "hostfile.previous").exists()
    (tmp_path / "new" / "hostfile").write_text("10.0.0.1 site=west\n")
    done = farpipe(*words)
    assert "hostfile: written again; the earlier one is now" in done.stderr
    assert (tmp_path / "new" / "hostfile.previous").read_text() == "10.0.0.1 site=west\n"


def test_a_run_from_python_leaves_a_folder_that_is_no_run_alone(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(InputError, match="is no run"):
        run(make_run(tmp_path / "mine", num_steps=1), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
