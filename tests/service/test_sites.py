"""Launchers for real: processes, Slurm and ssh run small trainings, and what happens to them is told."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from farpipe.core.errors import InputError, RunError
from farpipe.fleet.events import SiteBack, SiteLost
from farpipe.fleet.scenario import load_scenario
from farpipe.service.door import Door
from farpipe.service.folder import is_locked
from farpipe.service.kubernetes import Kubernetes
from farpipe.service.launcher import Key
from farpipe.service.launchers import launcher_of
from farpipe.service.ray import Ray
from farpipe.service.share import SiteRules
from farpipe.service.sites import SitesLauncher, Ssh
from farpipe.service.slurm import Slurm
from farpipe.testing import check_launcher
from service_sites import SITES, RayCluster, Sshd, here, kill_rank, orders, slurm_cluster, until
from services import FLEET, Spawned, job_toml

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
J1, J2 = Key("j", 1), Key("j", 2)
FAULTY = str(Path(__file__).parents[2] / "benchmarks/fleet/faulty_service.py")


def start(launcher, key, sites=SITES, num_steps=100_000, every=0, resume=None):
    launcher.start(key, *orders(launcher.root, sites, every)(key, num_steps, resume))


def look(launcher, key):
    return launcher.look([key])[key]


def trains(launcher, key, num_lines=1):
    assert look(launcher, key).state in ("absent", "alive", "unknown"), look(launcher, key)
    return launcher.read(key, "run/metrics.jsonl", 0).count(b"\n") >= num_lines


def ended(launcher, key):
    found = look(launcher, key)
    return found if found.state not in ("absent", "alive", "unknown") else None


@pytest.fixture
def stopping():
    """Launchers and keys of which nothing is left after the test."""
    made = []
    yield made
    for launcher, key in made:
        launcher.stop(key, 1.0)
        until(lambda one=launcher, of=key: look(one, of).state != "alive", 60)


@pytest.mark.nightly
def test_processes_of_sites_keep_to_what_the_loop_relies_on(tmp_path):
    check_launcher(here(tmp_path), orders(tmp_path, SITES))


def test_the_end_names_the_rank_that_failed_first_its_site_and_its_signal(tmp_path, stopping):
    launcher = here(tmp_path)
    stopping.append((launcher, J1))
    start(launcher, J1)
    until(lambda: trains(launcher, J1))
    sites = json.loads((tmp_path / "j/1/shares.json").read_text())["sites"]
    site = next(name for name, ranks in sites.items() if 1 in ranks[0])
    kill_rank(tmp_path / "j/1", 1)
    found = until(lambda: ended(launcher, J1))
    assert found.exit_code == 6
    assert found.why.startswith(f"{site}: rank 1 was killed by SIGKILL")
    end = json.loads(launcher.read(J1, f"end-{site}.json", 0))
    assert (end["rank"], end["signal"], end["is_victim"], end["site"]) == (1, "SIGKILL", False, site)


@pytest.mark.nightly
def test_a_cut_site_trains_on_and_leaves_at_a_checkpoint_when_nobody_has_wanted_it_for_long(tmp_path, stopping):
    """And another site begins from the checkpoint, which the operator's command has brought."""
    cut = []

    def door(site, **rules):
        answer = Door(site=site, root=tmp_path, rules=SiteRules(**rules)).answer

        def ask(request):
            if site in cut:
                raise RunError("no route to host")
            return answer(request)

        return ask

    away = tmp_path / "away"
    fetch = f'test "$FROM_SITE>$TO_SITE" = "zurich>lugano" && cp -r {away}/. "$CHECKPOINT"'
    doors = {"zurich": door("zurich", orphan_after_s=4.0), "lugano": door("lugano", fetch=fetch)}
    launcher = SitesLauncher(tmp_path, doors, emulates=True)
    stopping += [(launcher, J1), (launcher, J2)]
    start(launcher, J1, ["zurich"])
    until(lambda: trains(launcher, J1))
    cut.append("zurich")
    found = look(launcher, J1)
    assert (found.state, "no route to host" in found.why) == ("unknown", True)
    assert [*launcher.silent] == ["zurich"]
    until((tmp_path / "j/1/end-zurich.json").exists, 60)
    cut.clear()
    found = until(lambda: ended(launcher, J1))
    assert (found.exit_code, len(found.stored), launcher.silent) == (75, 1, {})
    checkpoint = tmp_path / f"j/1/run/checkpoints/step-{found.stored[0]}"
    shutil.move(checkpoint, away)
    start(launcher, J2, ["lugano"], found.stored[0] + 2, resume=str(checkpoint))
    assert until(lambda: ended(launcher, J2)).exit_code == 0
    lines = launcher.read(J2, "run/metrics.jsonl", 0).splitlines()
    assert [json.loads(line)["step"] for line in lines] == [found.stored[0], found.stored[0] + 1]


def test_a_silent_site_is_lost_and_back_once_also_over_a_restart_and_what_others_lost_stays_lost(tmp_path):
    cut = {"zurich"}

    def ask(request):
        if cut:
            raise RunError("no route to host")
        return []

    up = {"zurich": True, "lugano": False}
    launcher = SitesLauncher(tmp_path, {"zurich": ask, "lugano": lambda request: []})
    launcher.look([])
    assert [*launcher.silent] == ["zurich"]
    assert launcher.site_events(up, 5.0) == [], "not yet"
    launcher.lost_after_s = 0.0
    assert launcher.site_events(up, 5.0) == [SiteLost(5.0, "zurich")]
    up["zurich"] = False
    assert launcher.site_events(up, 6.0) == []
    cut.clear()
    launcher = SitesLauncher(tmp_path, launcher.doors)
    launcher.look([])
    assert launcher.site_events(up, 7.0) == [SiteBack(7.0, "zurich")]
    assert launcher.site_events(up, 8.0) == []


def test_a_door_does_only_what_it_is_for(tmp_path):
    door = Door(site="zurich", root=tmp_path)
    for request in ({"do": "run", "key": "j/1"}, {"do": "read", "key": "../j/1", "file": "x", "offset": 0}, {}):
        with pytest.raises(InputError):
            door.answer(request)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if not shutil.which("slurmctld") or not shutil.which("munged") or os.geteuid():
        pytest.skip("needs root, slurmctld, slurmd and munge")
    with slurm_cluster() as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(made.conf))
        yield made


def at_slurm(root):
    doors = {site: Door(site=site, root=root, slurm=Slurm(partition=site, time_limit="0:30:00")) for site in SITES}
    return SitesLauncher(root, {site: door.answer for site, door in doors.items()})


@pytest.mark.nightly
def test_slurm_keeps_to_what_the_loop_relies_on(slurm, tmp_path):
    check_launcher(at_slurm(tmp_path), orders(tmp_path, SITES))


def test_slurm_runs_one_job_though_its_answer_was_lost_and_says_which_rank_was_killed(slurm, tmp_path, stopping):
    launcher = at_slurm(tmp_path)
    stopping.append((launcher, J1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slurm, "_submit", losing(Slurm._submit))
        start(launcher, J1)
        until(lambda: look(launcher, J1).state == "alive" and launcher.silent, 120)
    assert not [*tmp_path.glob("j/1/job-*")], "the answers were lost"
    until(lambda: trains(at_slurm(tmp_path), J1))
    names = [line.split("|") for line in slurm.ask("squeue", "-h", "-o", "%j|%P").splitlines()]
    assert sorted(names) == [["farpipe-j.1.lugano", "lugano"], ["farpipe-j.1.zurich", "zurich"]]
    kill_rank(tmp_path / "j/1", 1)
    found = until(lambda: ended(launcher, J1))
    assert "rank 1 was killed by SIGKILL" in found.why
    assert found.why.partition(":")[0] in SITES


def losing(submit, only=None):
    """A submission whose caller dies before it hears the answer."""

    def lost(self, *given, **named):
        answer = submit(self, *given, **named)
        if only is None or given[0] == only:
            raise RunError("killed before the answer")
        return answer

    return lost


@pytest.mark.nightly
def test_a_slurmd_that_dies_and_comes_back_leaves_one_live_attempt(slurm, tmp_path, stopping):
    launcher = at_slurm(tmp_path)
    stopping.append((launcher, J1))
    start(launcher, J1, ["zurich"])
    until(lambda: trains(launcher, J1))
    slurmd = slurm.daemons["s1"]
    slurmd.kill()
    slurmd.wait()
    for process in Path("/proc").glob("[0-9]*"):  # the steps' daemons too, as when a node goes down
        words = (process / "cmdline").read_bytes() if process.exists() else b""
        if words.startswith(b"slurmstepd: ["):
            os.kill(int(process.name), signal.SIGKILL)
    until(lambda: "down" in slurm.ask("sinfo", "-h", "-p", "zurich", "-o", "%T"), 60)
    slurm.run("s1", "slurmd", "-D", "-N", "s1")
    until(lambda: slurm.ask("sinfo", "-h", "-p", "zurich", "-o", "%T").strip() == "idle", 60)
    start(launcher, J1, ["zurich"])
    time.sleep(2)
    alive, queue = is_locked(tmp_path / "j/1/lock-zurich"), slurm.ask("squeue", "-h", "-o", "%j").split()
    assert (look(launcher, J1).state, alive) in [("alive", True), ("ended", False), ("vanished", False)]
    assert queue == [], "and nothing is submitted again"
    launcher.stop(J1, 30.0)
    until(lambda: ended(launcher, J1))


def test_a_job_that_slurm_refuses_ends_with_its_words(slurm, tmp_path):
    door = Door(site="zurich", root=tmp_path, slurm=Slurm(partition="nowhere"))
    launcher = SitesLauncher(tmp_path, {"zurich": door.answer})
    start(launcher, J1, ["zurich"])
    found = until(lambda: ended(launcher, J1), 120)
    assert found.exit_code == 3
    assert "sbatch: " in found.why
    assert "partition" in found.why


@pytest.fixture(scope="module")
def ray():
    program = os.environ.get("FARPIPE_TEST_RAY") or shutil.which("ray")
    if not program:
        pytest.skip("no `ray` beside, nor in FARPIPE_TEST_RAY: pip install 'ray[default]' in an environment of its own")
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        yield RayCluster(program, root, stack)


def at_ray(cluster, root):
    doors = {
        site: Door(site=site, root=root, ray=Ray(address=cluster.url, labels={"farpipe.io/site": site}))
        for site in SITES
    }
    return SitesLauncher(root, {site: door.answer for site, door in doors.items()})


@pytest.mark.nightly
def test_ray_keeps_to_what_the_loop_relies_on(ray, tmp_path):
    check_launcher(at_ray(ray, tmp_path), orders(tmp_path, SITES))


@pytest.mark.nightly
def test_ray_runs_one_job_though_its_answer_was_lost_and_says_which_rank_was_killed(ray, tmp_path, stopping):
    launcher = at_ray(ray, tmp_path)
    stopping.append((launcher, J1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ray, "ask", losing(Ray.ask, only="POST"))
        start(launcher, J1)
        until(lambda: look(launcher, J1).state == "alive" and launcher.silent, 120)
    assert not [*tmp_path.glob("j/1/job-*")], "the answers were lost"
    until(lambda: trains(at_ray(ray, tmp_path), J1))
    assert [len(ray.jobs(f"{tmp_path}/j/1 {site} ")) for site in SITES] == [1, 1]
    kill_rank(tmp_path / "j/1", 1)
    found = until(lambda: ended(launcher, J1))
    assert "rank 1 was killed by SIGKILL" in found.why
    assert found.why.partition(":")[0] in SITES


@pytest.mark.nightly
def test_what_ray_can_t_run_says_why_and_what_waits_is_stopped(ray, tmp_path, stopping):
    wrong = Ray(address=ray.url, labels={"farpipe.io/site": "zurich"}, python="/nowhere/python")
    launcher = SitesLauncher(tmp_path, {"zurich": Door(site="zurich", root=tmp_path, ray=wrong).answer})
    start(launcher, J1, ["zurich"])
    found = until(lambda: ended(launcher, J1), 120)
    assert (found.state, "/nowhere/python" in found.why) == ("vanished", True), found
    away = Ray(address=ray.url, labels={"farpipe.io/site": "bern"})
    launcher = SitesLauncher(tmp_path, {"zurich": Door(site="zurich", root=tmp_path, ray=away).answer})
    start(launcher, J2, ["zurich"])
    until(lambda: look(launcher, J2) and (tmp_path / "j/2/job-zurich").exists(), 60)
    launcher.stop(J2, 1.0)
    assert until(lambda: ended(launcher, J2), 60).why == "stopped before it began"


@pytest.mark.nightly
def test_a_service_killed_between_ray_s_answer_and_its_own_note_runs_one_job_and_names_the_killed_rank(ray, tmp_path):
    """`farpipe fleet serve` with two sites of a Ray; what is seen of them is the API's."""
    fleet = FLEET
    for site in SITES:
        table = f'[sites.ray]\naddress = "{ray.url}"\nlabels = {{ "farpipe.io/site" = "{site}" }}\n'
        whole = f'name = "{site}"\ndevice = "cpu"\nnum_devices = 2\n'
        fleet = fleet.replace(whole, whole + table)
    env = {"FAULT": "1", "POINT": "after begin"}
    service = Spawned(tmp_path / "fleet", program=(FAULTY,), env=env, fleet=fleet)
    try:
        assert service.until_ready()
        with (asking := service.operator()).http:
            assert asking.submit("j", job_toml(100_000)).is_success
        until(service.has_died, 120)
        assert "dies at 'after begin'" in service.log.read_text()
        service.env |= {"FAULT": "0"}
        service.start()
        assert service.until_ready()
        with (ask := service.operator()).http:
            until(lambda: ask("GET", "jobs/j").json()["num_done"] > 1, 240)
            (place,) = ask("GET", "jobs/j").json()["devices"]
            assert len(ray.jobs(f"{tmp_path}/fleet/runs/j/1 {place} ")) == 1
            kill_rank(tmp_path / "fleet/runs/j/1", 1)
            why = until(lambda: ask("GET", "jobs/j/attempts").json()[0]["why"], 120)
            assert f"{place}: rank 1 was killed by SIGKILL" in why
            assert ask("POST", "jobs/j/cancel").is_success
            until(lambda: ask("GET", "jobs/j").json()["phase"] == "ended", 240)
    finally:
        service.kill()


@pytest.fixture
def behind_ssh(tmp_path):
    if not Path("/usr/sbin/sshd").exists() or os.geteuid() or subprocess.run(["ip", "netns"], check=False).returncode:
        pytest.skip("needs root, sshd and network namespaces")
    with ExitStack() as stack:
        yield {
            site: Sshd(site, number, tmp_path / "runs", tmp_path / site, stack) for number, site in enumerate(SITES, 1)
        }


@pytest.mark.nightly
def test_a_site_behind_ssh_trains_on_while_its_link_is_down(behind_ssh, tmp_path, stopping):
    ways = {site: Ssh(destination=one.host, config=str(one.config)) for site, one in behind_ssh.items()}
    (tmp_path / "runs").mkdir()
    launcher = SitesLauncher(tmp_path / "runs", {site: way.ask for site, way in ways.items()})
    stopping += [(launcher, J1), (launcher, J2)]
    start(launcher, J1, ["zurich"])
    until(lambda: trains(launcher, J1))
    behind_ssh["zurich"].link("down")
    until(lambda: look(launcher, J1).state == "unknown", 60)
    before = (tmp_path / "runs/j/1/run/metrics.jsonl").read_bytes().count(b"\n")
    time.sleep(LINK_DOWN_S)
    assert (tmp_path / "runs/j/1/run/metrics.jsonl").read_bytes().count(b"\n") > before
    assert look(launcher, J1).state == "unknown"
    behind_ssh["zurich"].link("up")
    until(lambda: look(launcher, J1).state == "alive", 60)
    launcher.stop(J1, 30.0)
    assert until(lambda: ended(launcher, J1)).exit_code == 75
    known = behind_ssh["lugano"].folder / "known"
    known.write_text(known.read_text().replace("AAAA", "AAAB"))
    with pytest.raises(RunError, match="Host key verification failed"):
        ways["lugano"].ask({"do": "look", "keys": [], "num_machines": []})


LINK_DOWN_S = float(os.environ.get("FARPIPE_TEST_LINK_DOWN_S", "10"))


REACHED = """
launcher = "sites"
[clock]
start = "2026-11-30"
[[sites]]
name = "zurich"
device = "cpu"
num_devices = 2
[sites.slurm]
partition = "long"
account = "p7"
time_limit = "1-00:00:00"
[[sites]]
name = "lugano"
device = "cpu"
num_devices = 2
[sites.ssh]
destination = "farpipe@lugano"
[[sites]]
name = "bern"
device = "cpu"
num_devices = 2
[sites.ray]
address = "https://ray.bern"
labels = { "farpipe.io/site" = "bern" }
[[sites]]
name = "basel"
device = "cpu"
num_devices = 2
[sites.kubernetes]
address = "https://basel:6443"
queue = "fleet"
"""


def test_a_fleet_s_file_says_how_each_site_is_reached(tmp_path):
    (tmp_path / "fleet.toml").write_text(REACHED)
    scenario = load_scenario(tmp_path / "fleet.toml")
    launcher = launcher_of(scenario.launcher, tmp_path, scenario.launching)
    assert isinstance(launcher, SitesLauncher)
    assert launcher.doors["zurich"].__self__.slurm == Slurm(partition="long", account="p7", time_limit="1-00:00:00")
    doors = {site: launcher.doors[site].__self__ for site in ("bern", "basel")}
    assert doors["bern"].ray == Ray(address="https://ray.bern", labels={"farpipe.io/site": "bern"})
    assert doors["basel"].kubernetes == Kubernetes(address="https://basel:6443", queue="fleet")
    assert launcher.doors["lugano"].__self__ == Ssh(destination="farpipe@lugano")
    assert launcher_of("sites", tmp_path, {"zurich": {}}).emulates
    for name, tables in (
        ("slurms", {}),
        ("sites", {"a": {"slurm": {"partitoin": "x"}}}),
        ("sites", {"a": {"slurm": {}, "ray": {"address": "https://x"}}}),
        ("sites", {"a": {"slurm": {}, "ssh": {"destination": "x"}}}),
    ):
        with pytest.raises(InputError, match=r"slurm|SITE.toml"):
            launcher_of(name, tmp_path, tables)
