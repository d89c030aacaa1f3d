import pytest

from farpipe.core.errors import InfeasibleError
from farpipe.core.step import Rank
from farpipe.engine.launch import host_memory
from farpipe.engine.launch.host_memory import expect_memory
from trainings import make_run


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 64 GiB free and this process in a control group of its own; its folder."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {64 << 20} kB\n")
    own = tmp_path / "cgroup" / "pods" / "mine"
    own.mkdir(parents=True)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/pods/mine\n")
    return own


def run_of(num_gib):
    """Two ranks that hold so much together."""
    run = make_run("text")
    ranks = tuple(Rank(static_bytes=num_gib * 2**30 / 2) for _ in run.plan.problem.ranks)
    return run.with_plan(problem=run.plan.problem.model_copy(update={"ranks": ranks}))


def limit(folder, limit_gib, used_gib, cache_gib=0):
    (folder / "memory.max").write_text("max" if limit_gib is None else str(limit_gib << 30))
    (folder / "memory.current").write_text(str(used_gib << 30))
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache_gib << 30}\nactive_file 0\n")


def test_without_a_limit_the_machine_counts(machine):
    limit(machine, None, 1)
    expect_memory(run_of(60))
    with pytest.raises(InfeasibleError, match="take 70 GiB, and 64 GiB are free; train a smaller model"):
        expect_memory(run_of(70))


def test_the_limit_of_a_container_counts_and_is_named(machine):
    limit(machine, 16, 4)
    expect_memory(run_of(11))
    with pytest.raises(InfeasibleError, match=r"13 GiB, and 12 GiB are free under the limit in .*mine.memory\.max"):
        expect_memory(run_of(13))


def test_the_limit_of_a_group_around_it_counts_too(machine):
    limit(machine, 32, 0)
    limit(machine.parent, 8, 0)
    with pytest.raises(InfeasibleError, match=r"8 GiB are free under the limit in .*pods.memory\.max"):
        expect_memory(run_of(9))


def test_page_cache_can_be_had_back(machine):
    limit(machine, 16, 15, cache_gib=10)
    expect_memory(run_of(10))


def test_a_limit_of_the_first_version_of_control_groups_counts(machine, tmp_path):
    (tmp_path / "own").write_text("5:cpu:/x\n3:memory:/docker\n")
    own = tmp_path / "cgroup" / "memory" / "docker"
    own.mkdir(parents=True)
    (own / "memory.limit_in_bytes").write_text(str(4 << 30))
    (own / "memory.usage_in_bytes").write_text(str(1 << 30))
    with pytest.raises(InfeasibleError, match="3 GiB are free"):
        expect_memory(run_of(4))
