"""Real trainings started, watched, stopped and gone on with by the service's loop, through local processes."""

import subprocess
import sys
import time

import pytest

from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.engine.figures.metrics import read_metrics
from farpipe.fleet.events import JobCancelled, JobSubmitted, Tick
from farpipe.fleet.job import FleetJob
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import PlannerQuotes, StopCosts
from farpipe.fleet.requests import kind_of
from farpipe.fleet.state import first_state
from farpipe.service.launcher import Key
from farpipe.service.reconcile import Reconciler
from farpipe.service.submission import submitted_job
from job_files import SMALL_MODEL
from service_sites import here, kill_rank

pytestmark = pytest.mark.timeout(900)

SITES = ("zurich", "lugano")
CLUSTER = Cluster(
    sites=tuple(preset_site(name, "cpu", 2) for name in SITES),
    links=tuple(
        SiteLink(source=a, target=b, latency_s=0.001, bandwidth_bytes_per_s=1e9) for a in SITES for b in SITES if a != b
    ),
)
JOB = (
    SMALL_MODEL
    + """
[training]
sequence_length = 16
global_batch = 8
microbatch_size = 2
precision = "fp32"
num_steps = {num_steps}
checkpoint_every_steps = {every}
checkpoint_every_minutes = 0
[layout]
pipeline = 2
[[cluster.sites]]
name = "anywhere"
device = "cpu"
num_devices = 2
"""
)
LIMIT_S = 240.0


class Service:
    """The core, a clock and the loop, as a service runs them; its log is left out."""

    def __init__(self, root, documents):
        self.root, self.documents = root, documents
        stops = StopCosts(restart_s=5.0, stop_s=10.0, max_failures=2, first_pause_s=0.0)
        self.state = first_state(CLUSTER, POLICIES["fcfs"], PlannerQuotes(CLUSTER), stops)
        self.done, self.closed = [], []
        self.restart()

    def restart(self):
        """A service that knows nothing but its state and what lies on the disk."""
        launcher = here(self.root)
        self.reconciler = Reconciler(launcher, self.root, CLUSTER, self.documents, leave_s=30.0)

    def give(self, *events):
        self.state, commands = self.state.handle(*events)
        assert not any(self.state.verdicts), self.state.verdicts
        self.done += self.state.done
        self.closed += self.state.closed
        return commands

    def now_s(self):
        return max(self.state.now_s, time.time())

    def submit(self, name, num_steps, every=0):
        self.documents[name] = JOB.format(num_steps=num_steps, every=every)
        now_s = self.now_s()
        kind = kind_of(submitted_job(self.documents[name]))
        self.give(JobSubmitted(now_s, FleetJob(name, kind, now_s, num_steps, 2, 2)))
        assert name in self.state.jobs, self.state.done

    def until(self, is_reached):
        limit_s = time.monotonic() + LIMIT_S
        while not is_reached():
            assert time.monotonic() < limit_s, (self.done, self.logs())
            self.give(*self.reconciler.step(self.state, self.now_s()), Tick(self.now_s()))
            time.sleep(0.2)

    def logs(self):
        return [path.read_text() for path in [*self.root.glob("*/*/log"), *self.root.glob("*/*/out*")]]

    def has(self, what):
        return what in [one.what for one in self.done]


@pytest.fixture
def service(tmp_path):
    made = Service(tmp_path / "runs", {})
    yield made
    for key in made.reconciler._attempts():
        made.reconciler.launcher.stop(key, 5.0)
    limit_s = time.monotonic() + 30.0
    while any(one.state == "alive" for one in made.reconciler.launcher.look(made.reconciler._attempts()).values()):
        assert time.monotonic() < limit_s, "an attempt does not end"
        time.sleep(0.2)


def steps(service, key):
    """Steps that the attempt has done, as its metrics say."""
    path = service.reconciler.folder(key) / "run" / "metrics.jsonl"
    return [line["step"] for line in read_metrics(path) if "loss" in line]


def begun(service):
    return sorted({path.parent.name for path in service.root.glob("*/*/begun-*")})


@pytest.mark.slow
@pytest.mark.nightly
def test_a_submitted_job_is_trained_by_two_ranks_and_ends(service):
    service.submit("j", 4)
    service.until(lambda: service.closed)
    assert [one.what for one in service.done][:3] == ["submit", "start", "run"]
    assert service.has("finish")
    (ended,) = service.closed
    assert (ended.num_done, ended.attempt, len(ended.spent.device_s)) == (4.0, 1, 1)
    assert steps(service, Key("j", 1)) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_killed_training_goes_on_from_its_checkpoint_though_the_service_was_away(service):
    """Its second attempt does not begin anew, the reason of the first one's end is known, and nothing begins twice."""
    service.submit("j", 60, every=2)
    service.until(lambda: service.state.jobs["j"].num_stored > 0)
    kill_rank(service.reconciler.folder(Key("j", 1)), 1)
    service.restart()
    service.until(lambda: service.has("fail"))
    service.restart()
    assert "rank 1 was killed by SIGKILL" in service.state.jobs["j"].last_failure
    stored = service.state.jobs["j"].num_done
    assert 0 < stored < 60
    service.until(lambda: service.closed)
    assert service.has("finish")
    assert steps(service, Key("j", 2)) == list(range(int(stored), 60))
    assert begun(service) == ["1", "2"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_cancelled_job_leaves_and_a_wrong_one_says_why_it_ended(service):
    service.submit("j", 100_000)
    service.until(lambda: service.has("run"))
    service.give(JobCancelled(service.now_s(), "j"))
    assert service.state.jobs["j"].phase == "stopping"
    service.restart()
    service.submit("wrong", 5)
    service.documents["wrong"] = service.documents["wrong"].replace("vocab_size = 256", "vocab_size = 250")
    service.until(lambda: len(service.closed) == 2)
    ends = {one.name: one for one in service.done if one.phase is None}
    assert ends["j"].what == "cancel"
    assert service.reconciler.launcher.look([Key("j", 1)])[Key("j", 1)].exit_code == 75
    assert ends["wrong"].what == "fail"
    assert "after 2 failures in a row: exit code 3: " in ends["wrong"].why
    assert "vocab_size" in ends["wrong"].why


def test_an_attempt_begins_once_however_often_it_is_started(tmp_path):
    launcher, key = here(tmp_path), Key("j", 1)
    folder = tmp_path / "j" / "1"
    folder.mkdir(parents=True)
    assert launcher.look([key])[key].state == "absent"
    (folder / "order.json").write_text("{}")
    for _ in range(3):
        launcher.start(key, folder, {"zurich": 2})
    limit_s = time.monotonic() + LIMIT_S
    while launcher.look([key])[key].state in ("absent", "alive"):
        assert time.monotonic() < limit_s
        time.sleep(0.1)
    (end,) = launcher.look([key]).values()
    assert (end.state, end.exit_code) == ("ended", 3)
    assert "order.json: format: expected 'farpipe/fleet-order/1'" in end.why
    launcher.start(key, folder, {"zurich": 2})
    time.sleep(1.0)
    assert launcher.look([key])[key] == end
    assert (launcher.read(key, "order.json", 1), launcher.read(key, "absent", 0)) == (b"}", b"")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_fleet_s_demo_ends_as_its_docstring_says():
    done = subprocess.run([sys.executable, "recipes/fleet_demo.py"], capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit by bit: amber, birch, cedar, dogwood" in done.stdout
