import json
import os
import queue
import time
from pathlib import Path
from statistics import median

import pytest

from farpipe.plan.measured import replaced
from farpipe.plan.replanning import Search
from farpipe.problem import Link, Problem
from farpipe.runtime.replan import LOG_NAME, LOWEST_PRIORITY, REPLAN, Replanning, SearchProcess
from farpipe.runtime.run import run
from farpipe.runtime.run_spec import LinkChange, RunSpec
from farpipe.runtime.train import train_rank
from farpipe.schedule import check
from farpipe.schedule.library import order
from farpipe.spec.replanning import ReplanSettings
from in_process import run_ranks
from runtime.test_replicas import make_run as make_replicated_run
from runtime.test_train import make_run
from two_sites import two_sites


class Proposer:
    """In the place of a Watch: proposes one order after a step, whatever is measured."""

    def __init__(self, schedule, after_step=0):
        self.proposals, self.swapped = queue.SimpleQueue(), queue.SimpleQueue()
        self._schedule, self._after_step = schedule, after_step

    def on_timeline(self, step, timeline):
        if step == self._after_step:
            self.proposals.put(self._schedule)

    def close(self):
        pass


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path


def losses(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_training_that_changes_its_order_learns_the_same(num_replicas, text_file, tmp_path, monkeypatch):
    if num_replicas == 1:
        plain = make_run(text_file, num_steps=8)
    else:
        plain = make_replicated_run(text_file, (0, 1), (("a", "b"),) * 2, zero1=True)
        plain = plain.model_copy(update={"num_steps": 8})
    other = order("zb-h1", plain.problem)
    (tmp_path / "plain").mkdir()
    run_ranks(2 * num_replicas, lambda peers: train_rank(plain, peers, tmp_path / "plain"))
    changing = plain.model_copy(update={"replan": ReplanSettings()})
    (tmp_path / "changing").mkdir()
    watch = Proposer(other, after_step=1)
    monkeypatch.setattr("farpipe.runtime.train.Watch", lambda run, run_dir: watch)
    run_ranks(2 * num_replicas, lambda peers: train_rank(changing, peers, tmp_path / "changing"))
    assert watch.swapped.get_nowait() < 7, "the order was taken"
    assert losses(tmp_path / "changing") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


class LateBox:
    """Peers whose box with new orders stays shut in the first steps, as if they were still on their way."""

    def __init__(self, peers, is_shut):
        self._peers, self.is_shut = peers, is_shut

    def __getattr__(self, name):
        return getattr(self._peers, name)

    def poll(self, name):
        return [] if self.is_shut and name == "new order" else self._peers.poll(name)


def test_all_ranks_take_an_order_after_the_same_step():
    """Even if it reaches one of them late."""
    problem = two_sites(num_ranks=4, num_microbatches=4)

    def work(peers):
        peers = LateBox(peers, is_shut=peers.rank == 2)
        watch = Proposer(None) if peers.rank == 0 else None
        if watch is not None:
            watch.proposals.put(order("gpipe", problem))
        replanning, taken = Replanning(peers, watch), []
        for step in range(10):
            peers.is_shut = peers.is_shut and step < 5
            orders = []
            replanning.give(step, lambda at, order, orders=orders: orders.append(order))
            told = peers.exchange(f"step {step}", b"".join(orders), waiting_for="the end of the step")
            schedule = replanning.take(step, {REPLAN} & {told[0]})
            taken += [(step, schedule.method)] if schedule is not None else []
        return taken

    results = run_ranks(4, work)
    assert results[0] == results[1] == results[2] == results[3]
    ((step, method),) = results[0]
    assert method == "gpipe"
    assert step > 5


def _spec(problem, schedule, **options):
    sites = ("a", "a", "b", "b")
    return RunSpec(problem=problem, schedule=schedule, sites=sites, num_steps=options.pop("num_steps", 8), **options)


def test_a_search_runs_with_the_lowest_priority_and_finds_an_order():
    problem = two_sites((0.02, 0.02, 0.02), (2, 2), num_ranks=4, num_microbatches=6)
    search = SearchProcess(Search(0, "a test", problem), 0.5)
    assert os.getpriority(os.PRIO_PROCESS, search._process.pid) == LOWEST_PRIORITY
    deadline = time.monotonic() + 60
    while not search.is_over():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = search.result()
    check(problem, found)
    assert not Path(search._folder.name).exists()


def test_a_search_that_takes_too_long_gives_nothing():
    problem = two_sites(num_ranks=4, num_microbatches=6)
    search = SearchProcess(Search(0, "a test", problem), 0.5)
    search._deadline_s = 0
    assert search.is_over()
    assert search.result() is None


def test_what_goes_wrong_in_watching_does_not_end_the_training(text_file, tmp_path, monkeypatch):
    changing = make_run(text_file, num_steps=4).model_copy(update={"replan": ReplanSettings()})

    def broken(self, step, timeline):
        raise OSError("no space left")

    monkeypatch.setattr("farpipe.plan.replanning.Replanner.observe", broken)
    run_ranks(2, lambda peers: train_rank(changing, peers, tmp_path))
    assert len(losses(tmp_path)) == 4
    (event,) = [json.loads(line) for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert event == {"step": 0, "event": "failed", "why": "OSError: no space left"}


def test_weather_is_for_emulated_links_of_the_run():
    problem = two_sites((0.02, 0.02, 0.02), (2, 2), num_ranks=4, num_microbatches=6)
    change = LinkChange(step=1, link="a>c", latency_s=0, bandwidth_bytes_per_s=1)
    with pytest.raises(ValueError, match="'a>c' is not an emulated link of the run"):
        _spec(problem, order("1f1b", problem), device="sleep", weather=(change,))


@pytest.mark.slow
def test_a_link_that_gets_worse_during_a_run_leads_to_a_better_order(tmp_path):
    """Over real processes: sleeping stages, an emulated link that changes, a search in a process of its own."""
    problem = _small_step(latency_s=0.01, rate=50e6)
    before = order("1f1b", problem)
    changes = tuple(LinkChange(step=5, link=name, latency_s=0.1, bandwidth_bytes_per_s=10e6) for name in problem.links)
    settings = ReplanSettings(search_s=1.0, watch_steps=3)
    spec = _spec(problem, before, num_steps=36, device="sleep", weather=changes, replan=settings)
    run(spec, tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / LOG_NAME).read_text().splitlines()]
    if events[-1]["event"] == "search":
        pytest.skip("the machine is so busy that the search, at the lowest priority, did not end during the run")
    swap = next(event for event in events if event["event"] == "swap" and event["step"] > 5)
    assert any(event["event"] == "search" and event["step"] < swap["step"] for event in events)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps_s = [line["makespan_s"] for line in lines]
    assert median(steps_s[swap["step"] + 1 :]) < 0.9 * median(steps_s[5 : swap["step"] + 1])


def _small_step(latency_s, rate):
    problem = two_sites((0.01, 0.01, 0.01), num_ranks=4, num_microbatches=8)
    link = Link(latency_s=latency_s, bandwidth_bytes_per_s=rate)
    size = {"bytes": 1e5}
    hops = tuple(
        hop
        and hop.model_copy(update={way: getattr(hop, way).model_copy(update=size) for way in ("forward", "backward")})
        for hop in problem.hops
    )
    found = replaced(problem, links={"a>b": link, "b>a": link}, hops=hops)
    assert isinstance(found, Problem)
    return found
