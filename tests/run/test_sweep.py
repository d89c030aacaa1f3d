"""Sweeps in processes and on Ray: kept, resumed, the same wherever they are played."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farpipe.errors import InputError, RunError
from farpipe.plan.sweep import Axis, grid
from farpipe.run.sweep import here, on_ray, read_store, run_sweep
from farpipe.strict import parse_toml
from job_files import MODEL_TO_SWEEP

JOB = f"""
{MODEL_TO_SWEEP}[[cluster.sites]]
name = "a"
device = "a100-80gb"
num_devices = 1
"""
BATCHES = "training.global_batch"


def points(*batches):
    return grid(parse_toml(JOB, "job.toml"), [Axis(BATCHES, batches)])


def ignore(done, number):
    """Progress that nobody watches."""


class Counting:
    """A player that notes how many points it was given, and may stop early."""

    def __init__(self, stop_after=None):
        self.given, self.stop_after = [], stop_after

    def __call__(self, asked):
        self.given.append(len(asked))
        for number, found in enumerate(here(1)(asked)):
            if number == self.stop_after:
                raise KeyboardInterrupt
            yield found


def test_what_is_kept_is_not_played_again(tmp_path):
    store, player = tmp_path / "sweep.jsonl", Counting()
    first = run_sweep(points(8, 16), store, player, ignore)
    again = run_sweep(points(8, 16, 32), store, player, ignore)
    assert player.given == [2, 1]
    assert again[:2] == first
    assert run_sweep(points(16), store, player, ignore)[0].arms == first[1].arms


def test_a_sweep_that_was_cut_goes_on_where_it_was(tmp_path):
    store = tmp_path / "sweep.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_sweep(points(8, 16, 32), store, Counting(stop_after=2), ignore)
    player = Counting()
    assert run_sweep(points(8, 16, 32), store, player, ignore) == run_sweep(points(8, 16, 32), None, here(1), ignore)
    assert player.given == [1]


def test_a_line_that_was_cut_is_played_again_and_spoils_no_other(tmp_path):
    store = tmp_path / "sweep.jsonl"
    run_sweep(points(8, 16), store, here(1), ignore)
    store.write_text(store.read_text()[:-20])
    player = Counting()
    run_sweep(points(8, 16), store, player, ignore)
    assert player.given == [1]
    assert len(read_store(store)) == 2


@pytest.mark.parametrize("text", ["hello\n", '{"format": "farpipe/plan/1"}\n', "[]\n"])
def test_a_file_that_is_something_else_is_left_alone(tmp_path, text):
    store = tmp_path / "sweep.jsonl"
    store.write_text(text)
    with pytest.raises(InputError, match="no sweep of farpipe"):
        run_sweep(points(8), store, here(1), ignore)
    assert store.read_text() == text


def test_progress_is_told_from_what_is_known_to_the_end(tmp_path):
    told = []
    run_sweep(points(8, 16), tmp_path / "s.jsonl", here(1), lambda done, number: told.append((done, number)))
    assert told == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.slow
def test_several_processes_find_what_one_finds():
    asked = points(8, 16, 32)
    assert run_sweep(asked, None, here(2), ignore) == run_sweep(asked, None, here(1), ignore)


@pytest.mark.slow
def test_an_impossible_point_in_a_process_is_told_as_here():
    with pytest.raises(InputError, match=r"training.global_batch"):
        run_sweep(points(8, "many"), None, here(2), ignore)


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    batches = ",".join(str(8 * n) for n in range(1, 200))
    command = [sys.executable, "-m", "farpipe", "sweep", "job.toml", "--over", f"{BATCHES}={batches}", "--jobs", "2"]
    run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True)
    store, end = tmp_path / "sweep.jsonl", time.monotonic() + 60
    while (not store.exists() or len(store.read_text().splitlines()) < 2) and time.monotonic() < end:
        time.sleep(0.2)
    run.send_signal(signal.SIGKILL)
    run.wait(10)
    while _members(run.pid) and time.monotonic() < end:
        time.sleep(0.2)
    assert not _members(run.pid)
    assert len(read_store(store)) >= 1


def _members(session):
    """Processes of the session that are no zombies; multiprocessing's resource tracker ends by itself."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(folder.name)
    return found


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"farpipe\[ray\]"):
        list(on_ray("auto")(points(8)))


@pytest.fixture
def two_nodes():
    """A Ray cluster of two nodes with one CPU each on this machine; its address."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes(timeout=60)
    yield cluster
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_of_two_nodes_finds_what_one_process_finds(two_nodes, tmp_path):
    asked, store = points(8, 16, 32, 64), tmp_path / "sweep.jsonl"
    found = run_sweep(asked, store, on_ray(two_nodes.address), ignore)
    assert found == run_sweep(asked, None, here(1), ignore)
    assert len(read_store(store)) == 4
    assert json.loads(store.read_text().splitlines()[0])["format"] == "farpipe/sweep/1"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_node_that_is_lost_costs_time_but_no_point(two_nodes):
    player, asked = on_ray(two_nodes.address), points(8, 16, 32, 64, 128, 256)
    lost = next(iter(two_nodes.worker_nodes))
    found = []
    for number, result in player(asked):
        if not found:
            two_nodes.remove_node(lost, allow_graceful=False)
        found.append((number, result))
    assert [result for _, result in sorted(found, key=lambda pair: pair[0])] == [r for _, r in here(1)(asked)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_impossible_point_on_ray_is_told_as_here(two_nodes):
    with pytest.raises(InputError, match=r"training.global_batch"):
        list(on_ray(two_nodes.address)(points("many")))


@pytest.mark.filterwarnings("ignore")
def test_a_cluster_that_is_not_there_is_told_soon():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with pytest.raises(RunError, match="no Ray cluster"):
        list(on_ray("127.0.0.1:1")(points(8)))
