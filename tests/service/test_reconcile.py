"""The service's loop against a launcher without processes: what it starts, stops and reports, and after restarts."""

import json
import random

import pytest

from farpipe.core.spec import Cluster, preset_site
from farpipe.fleet.events import JobCancelled, JobFailed, JobStopped, JobSubmitted, SiteBack, SiteLost, Tick
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.state import first_state
from farpipe.service.launcher import Key, Seen
from farpipe.service.order import Order
from farpipe.service.reconcile import Reconciler
from farpipe.testing.policies import SimpleQuotes

CLUSTER = Cluster(sites=tuple(preset_site(name, "a100-80gb", 8) for name in "ab"))
STOPS = StopCosts(stop_s=30.0, first_pause_s=0.0)


class Attempts:
    """A launcher whose attempts do what the test says."""

    def __init__(self):
        self.seen, self.metrics, self.started, self.told = {}, {}, [], []

    def start(self, key, folder, where):
        order = Order.load(folder / "order.json")
        self.started.append((key, order.num_steps, dict(where)))
        self.seen.setdefault(key, Seen("alive"))

    def look(self, keys):
        return {key: self.seen.get(key, Seen("absent")) for key in keys}

    def site_events(self, up, now_s):
        return []

    def stop(self, key, leave_s):
        self.told.append(key)

    def read(self, key, file, offset):
        return self.metrics.get(key, b"")[offset:]

    def work(self, key, *steps):
        lines = [{"step": step, "attempt": 0, "step_s": 2.0, "loss": 1.0} for step in steps]
        self.metrics[key] = self.metrics.get(key, b"") + b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Service:
    def __init__(self, root):
        self.root, self.launcher = root, Attempts()
        self.state, self.now_s, self.done = first_state(CLUSTER, POLICIES["fcfs"], SimpleQuotes(), STOPS), 0.0, []
        self.restart()

    def restart(self):
        self.reconciler = Reconciler(self.launcher, self.root, CLUSTER, {"j": "job", "k": "job"})

    def give(self, *events):
        self.state, _ = self.state.handle(*events)
        assert not any(self.state.verdicts)
        self.done += self.state.done

    def step(self):
        self.now_s += 1.0
        events = self.reconciler.step(self.state, self.now_s)
        self.give(*events, Tick(self.now_s))
        return events

    def submit(self, name="j"):
        self.give(JobSubmitted(self.now_s, FleetJob(name, Kind("llama-3-8b", 512, 64), self.now_s, 100, 8, 8)))


@pytest.fixture
def service(tmp_path):
    made = Service(tmp_path / "runs")
    made.submit()
    return made


J1, J2, K1 = Key("j", 1), Key("j", 2), Key("k", 1)


def test_what_the_state_wants_is_started_once_over_restarts(service):
    service.step()
    assert service.launcher.started == [(J1, 100, {"a": 8})]
    for _ in range(3):
        service.restart()
        assert service.step() == []
    assert len(service.launcher.started) == 1


def test_steps_are_reported_once_and_start_the_job_and_a_restart_repeats_nothing(service):
    service.step()
    service.launcher.work(J1, 0, 1, 2)
    assert [type(event).__name__ for event in service.step()] == ["JobStarted", "StepReported"]
    assert (service.state.jobs["j"].phase, service.state.jobs["j"].num_reported) == ("running", 3.0)
    assert service.step() == []
    service.launcher.work(J1, 3)
    service.launcher.metrics[J1] += b'{"step": 4, "step_s"'
    (report,) = service.step()
    assert (report.num_steps, report.step_s) == (4.0, 2.0), "a line that is not whole waits"
    before = service.state.jobs["j"].num_reported
    service.restart()
    service.step()
    assert service.state.jobs["j"].num_reported == before


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (Seen("ended", 6, "rank 1 is lost"), "exit code 6: rank 1 is lost"),
        (Seen("ended", -9), "ended by SIGKILL"),
        (Seen("vanished"), "nothing of it runs any more, and it did not say how it ended"),
    ],
)
def test_an_end_that_is_not_a_good_one_is_a_failure_with_its_reason(service, seen, why):
    service.step()
    service.launcher.work(J1, 0)
    service.step()
    service.launcher.seen[J1] = seen
    assert service.step() == [JobFailed(service.now_s, "j", 1, why)]
    service.step()
    assert [key for key, _, _ in service.launcher.started] == [J1, J2]


def test_a_job_that_ends_well_has_ended(service):
    service.step()
    service.launcher.work(J1, *range(100))
    service.launcher.seen[J1] = Seen("ended", 0)
    assert [type(event).__name__ for event in service.step()] == ["JobStarted", "StepReported", "JobEnded"]
    assert "j" in service.state.ended


def test_a_cancelled_job_is_stopped_and_leaves_when_nothing_of_it_runs(service):
    service.step()
    service.launcher.work(J1, 0)
    service.step()
    service.give(JobCancelled(service.now_s, "j"))
    assert service.step() == []
    assert J1 in service.launcher.told
    service.launcher.seen[J1] = Seen("ended", 75)
    assert service.step() == [JobStopped(service.now_s, "j", 1)]
    assert "j" in service.state.ended


def test_nothing_starts_while_an_old_attempt_of_a_lost_site_lives(service):
    """Site a comes back with its old attempt alive: it is stopped first."""
    service.step()
    service.launcher.work(J1, 0)
    service.step()
    service.give(SiteLost(service.now_s, "a"))
    service.give(SiteBack(service.now_s, "a"))
    assert service.state.jobs["j"].attempt == 2
    service.step()
    assert service.launcher.told == [J1]
    service.submit("k")
    service.step()
    assert [key for key, _, _ in service.launcher.started] == [J1], "nor anybody else on its devices"
    service.launcher.seen[J1] = Seen("ended", 75)
    service.step()
    assert {key for key, _, _ in service.launcher.started} == {J1, J2, K1}


def test_a_start_that_is_given_up_before_it_began_is_barred(service):
    service.step()
    del service.launcher.seen[J1]
    service.give(JobCancelled(service.now_s, "j"))
    assert service.step() == [JobStopped(service.now_s, "j", 1)]
    assert service.launcher.told == [J1]


def test_a_name_that_is_a_path_ends_without_touching_a_file(service, tmp_path):
    service.submit("../../k")
    service.step()
    (gone,) = [one for one in service.done if one.what == "fail"]
    assert gone.why == "its name '../../k' is no name of a directory"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["j"]


def test_an_order_is_read_as_it_was_written(service):
    order = Order.of(service.state, CLUSTER, "j", "job", None)
    assert Order.from_json(order.to_json()) == order
    assert [site.name for site in order.part.sites] == ["a"]


def die_often(service):
    """200 passes in which the service, attempts and sites come and go."""
    draw = random.Random(7)
    for turn in range(200):
        if draw.random() < 0.3:
            service.restart()
        living = [key for key, seen in service.launcher.seen.items() if seen.state == "alive"]
        for key in living:
            if draw.random() < 0.2:
                service.launcher.work(key, turn // 2)
            if key in service.launcher.told or draw.random() < 0.02:
                service.launcher.seen[key] = Seen("ended", draw.choice([75, 6, -9]))
        if draw.random() < 0.05:
            site = draw.choice("ab")
            service.give(SiteLost(service.now_s, site))
            service.give(SiteBack(service.now_s, site))
        service.step()
        alive = [key for key, seen in service.launcher.seen.items() if seen.state == "alive"]
        assert len(alive) <= 1, alive
    started = [key for key, _, _ in service.launcher.started]
    assert len(started) == len(set(started)) > 5


def test_random_deaths_of_the_service_start_nothing_twice(service):
    die_often(service)


def test_an_old_attempt_of_a_returned_site_that_is_left_alive_is_found(service, monkeypatch):
    """The bug is seeded: the loop does not wait for what nobody wants."""
    monkeypatch.setattr(Reconciler, "_stop_unwanted", lambda self, seen: True)
    with pytest.raises(AssertionError):
        die_often(service)
