import contextlib
import gc
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import pytest

from engine.test_replicas import make_run as make_replicated_run
from engine.test_train import make_run
from farpipe.core.schedule import check
from farpipe.core.schedule.library import order
from farpipe.core.spec.run_keys import ReplanSettings
from farpipe.core.step import Link, Problem
from farpipe.engine import train
from farpipe.engine.control.beside import LOWEST_PRIORITY
from farpipe.engine.control.measured import replaced
from farpipe.engine.control.replanning import Replanner, SearchRequest
from farpipe.engine.control.watch import LOG_NAME, STATE_NAME, ReplanWatch, Searcher
from farpipe.engine.executor.commands import REPLAN, OrderSwitch
from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import LinkChange
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.train import train_rank
from in_process import run_ranks
from rank_processes import child_of, processes_of
from two_sites import two_sites

pytestmark = pytest.mark.slow  # starts processes


class Proposer:
    """In the place of a Watch: proposes one order after a step, whatever is measured."""

    def __init__(self, schedule, after_step=0):
        self.first_order, self.proposals, self.swapped = None, queue.SimpleQueue(), queue.SimpleQueue()
        self._schedule, self._after_step = schedule, after_step

    def on_timeline(self, step, timeline):
        if step == self._after_step:
            self.proposals.put(self._schedule)

    def close(self):
        pass


def losses(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_training_that_changes_its_order_learns_the_same(num_replicas, text_file, tmp_path):
    if num_replicas == 1:
        plain = make_run(text_file, num_steps=8)
    else:
        plain = make_replicated_run(text_file, (0, 1), (("a", "b"),) * 2, zero1=True)
        plain = plain.model_copy(update={"num_steps": 8})
    other = order("zb-h1", plain.plan.problem)
    (tmp_path / "plain").mkdir()
    run_ranks(2 * num_replicas, lambda peers: train_rank(plain, peers, tmp_path / "plain"))
    changing = plain.model_copy(update={"replan": ReplanSettings()})
    (tmp_path / "changing").mkdir()
    watch = Proposer(other, after_step=1)
    run_ranks(
        2 * num_replicas,
        lambda peers: train_rank(changing, peers, tmp_path / "changing", make_watch=lambda run, run_dir, step: watch),
    )
    assert watch.swapped.get_nowait() < 7, "the order was taken"
    assert losses(tmp_path / "changing") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_all_ranks_take_an_order_after_the_same_step():
    """Whenever it is proposed, for nobody but rank 0 knows of it before."""
    problem = two_sites(num_ranks=4, num_microbatches=4)

    def work(peers):
        watch = Proposer(order("gpipe", problem), after_step=3) if peers.rank == 0 else None
        replanning, taken = OrderSwitch(peers, watch), []
        assert replanning.first() is None
        for step in range(8):
            if watch is not None:
                watch.on_timeline(step, None)
            orders = []
            replanning.before_exchange(step, lambda at, order, orders=orders: orders.append(order))
            told = peers.exchange(f"step {step}", b"".join(orders), waiting_for="the end of the step")
            schedule = replanning.after_exchange(step, {REPLAN} & {told[0]})
            taken += [(step, schedule.method)] if schedule is not None else []
        return taken

    assert run_ranks(4, work) == [[(3, "gpipe")]] * 4


def test_a_later_attempt_begins_with_the_order_of_before(text_file, tmp_path, monkeypatch):
    plain = make_run(text_file, num_steps=4).model_copy(update={"replan": ReplanSettings()})
    known, began = Replanner(plain.plan.problem, plain.plan.schedule, plain.replan), []
    known.schedule = order("zb-h1", plain.plan.problem)
    (tmp_path / STATE_NAME).write_text(known.to_json())
    executor_of = train._Loop._executor_of

    def told(loop, schedule):
        began.append(schedule.method)
        return executor_of(loop, schedule)

    monkeypatch.setattr(train._Loop, "_executor_of", told)
    run_ranks(2, lambda peers: train_rank(plain, peers, tmp_path, make_watch=ReplanWatch))
    assert sorted(began) == sorted([plain.plan.schedule.method, "zb-h1"] * 2), "on both ranks"
    (event,) = [json.loads(line) for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert event == {"step": 0, "event": "go on", "why": "with the order of before", "method": "zb-h1"}
    (tmp_path / "alone").mkdir()
    run_ranks(2, lambda peers: train_rank(make_run(text_file, num_steps=4), peers, tmp_path / "alone"))
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@pytest.mark.parametrize("text", ["", "{}", '{"format": "farpipe/replan/1", "plan": "another"}'])
def test_a_state_of_another_run_or_none_is_passed_over(text, text_file, tmp_path):
    plain = make_run(text_file, num_steps=4).model_copy(update={"replan": ReplanSettings()})
    (tmp_path / STATE_NAME).write_text(text)
    watch = ReplanWatch(plain, tmp_path)
    watch.close()
    assert watch.first_order is None
    (event,) = [json.loads(line) for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert (event["event"], event["method"]) == ("go on", plain.plan.schedule.method)
    assert event["why"].startswith("with the plan's order: ")
    again = ReplanWatch(plain, tmp_path)
    again.close()
    assert again.first_order is None, "which it has written itself"


def _spec(problem, schedule, **options):
    sites = ("a", "a", "b", "b")
    return RunSpec.bare(
        problem=problem, schedule=schedule, sites=sites, num_steps=options.pop("num_steps", 8), **options
    )


@pytest.fixture
def searcher():
    searcher = Searcher()
    yield searcher
    searcher.close()


PROBLEM = two_sites((0.02, 0.02, 0.02), (2, 2), num_ranks=4, num_microbatches=6)
SEARCH = SearchRequest(0, "a test", PROBLEM, (PROBLEM,))


def last_answer(searcher):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (answer := searcher.answer(1.0)) is not None and answer.is_last:
            return answer
    pytest.fail("no answer")


def test_a_search_runs_with_the_lowest_priority_and_finds_an_order(searcher):
    searcher.ask(SEARCH, 0.5)
    check(PROBLEM, last_answer(searcher).schedule)
    assert os.getpriority(os.PRIO_PROCESS, child_of(searcher.process)) == LOWEST_PRIORITY
    assert searcher.answer() is None, "nothing was asked"
    process = searcher.process
    searcher.ask(SEARCH, 0.5)
    check(PROBLEM, last_answer(searcher).schedule)
    assert searcher.process is process, "it was kept"


def test_a_new_question_gives_the_old_one_up(searcher):
    searcher.ask(SEARCH, 60)
    process = searcher.process
    searcher.ask(SEARCH, 0.5)
    assert process.exit_code is not None
    check(PROBLEM, last_answer(searcher).schedule)


def test_a_search_that_takes_too_long_gives_nothing(searcher, monkeypatch):
    monkeypatch.setattr("farpipe.engine.control.watch.LATE_S", -10.0)
    os.kill(child_of(searcher.process), signal.SIGSTOP)
    searcher.ask(SEARCH, 0.5)
    assert searcher.answer() == (None, True)
    assert searcher.process.wait(60)
    assert searcher.process.exit_code in (-signal.SIGTERM, -signal.SIGKILL)


def test_a_process_that_dies_gives_nothing_and_is_replaced(searcher):
    searcher.ask(SEARCH, 60)
    os.kill(child_of(searcher.process), signal.SIGKILL)
    assert last_answer(searcher).schedule is None
    searcher.ask(SEARCH, 0.5)
    check(PROBLEM, last_answer(searcher).schedule)


def threads_and_files():
    """Threads and open files of this process, without those of earlier tests that wait to be collected."""
    gc.collect()
    return {*threading.enumerate()}, {
        (path.name, path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()
    }


def test_nothing_is_left_of_a_search():
    threads, files = threads_and_files()
    searcher = Searcher()
    searcher.ask(SEARCH, 60)
    searcher.close()
    assert searcher.process.exit_code in (-signal.SIGTERM, -signal.SIGKILL)
    threads_now, files_now = threads_and_files()
    assert not threads_now - threads
    assert not files_now - files


LEFT_BEHIND = """
import os, signal, sys
from farpipe.engine.control.replanning import SearchRequest
from farpipe.core.step import Problem
from farpipe.engine.control.watch import Searcher
searcher, problem = Searcher(), Problem.from_json(sys.stdin.read(), "stdin")
searcher.ask(SearchRequest(0, "a test", problem, (problem,)), 0.5)
while searcher.answer(1.0) is None:
    pass
child = int(open(f"/proc/{searcher.process.pid}/task/{searcher.process.pid}/children").read())
os.kill(child, signal.SIGSTOP)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_search_ends_with_a_rank_that_is_killed():
    """The process is stopped, so as not to come to an end by itself."""
    command = [sys.executable, "-c", LEFT_BEHIND]
    script = subprocess.run(
        command, input=PROBLEM.to_json(), stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert script.returncode == -signal.SIGKILL
    try:
        searcher = os.pidfd_open(int(script.stdout))
    except ProcessLookupError:
        return
    has_ended, _, _ = select.select([searcher], [], [], 10)
    os.close(searcher)
    if not has_ended:
        os.kill(int(script.stdout), signal.SIGKILL)
        pytest.fail("it is left behind")


def test_what_goes_wrong_in_watching_does_not_end_the_training(text_file, tmp_path, monkeypatch):
    changing = make_run(text_file, num_steps=4).model_copy(update={"replan": ReplanSettings()})

    def broken(self, step, timeline):
        raise OSError("no space left")

    monkeypatch.setattr("farpipe.engine.control.replanning.Replanner.observe", broken)
    run_ranks(2, lambda peers: train_rank(changing, peers, tmp_path, make_watch=ReplanWatch))
    assert len(losses(tmp_path)) == 4
    (event,) = [json.loads(line) for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert event == {"step": 0, "event": "failed", "why": "OSError: no space left"}


def test_changes_are_for_links_between_sites_of_the_run():
    problem = two_sites((0.02, 0.02, 0.02), (2, 2), num_ranks=4, num_microbatches=6)
    change = LinkChange(step=1, link="a>c", latency_s=0, bandwidth_bytes_per_s=1)
    with pytest.raises(ValueError, match="'a>c' is no link between sites of the run"):
        _spec(problem, order("1f1b", problem), device="sleep", link_changes=(change,))


@pytest.mark.slow
@pytest.mark.alone
def test_a_link_on_which_replicas_take_turns_is_measured_as_well(tmp_path):
    """Each replica alone would see the others' messages as a slower link."""
    problem = _small_step(latency_s=0.01, rate=50e6)
    links = {name: link.model_copy(update={"num_staggered": 2}) for name, link in problem.links.items()}
    problem = replaced(problem, links=links)
    changes = tuple(LinkChange(step=0, link=name, latency_s=0.04, bandwidth_bytes_per_s=5e6) for name in links)
    settings = ReplanSettings(settle_steps=0, gain=0.9)
    replicas = (("a", "a", "b", "b"),) * 2
    options = {"num_steps": 4, "device": "sleep", "link_changes": changes, "replan": settings, "replicas": replicas}
    run(_spec(problem, order("eager", problem), **options), tmp_path / "run")
    state = json.loads((tmp_path / "run" / STATE_NAME).read_text())
    for link in state["believed"]["links"].values():
        assert link["latency_s"] == pytest.approx(0.04, abs=0.01)
        assert link["bandwidth_bytes_per_s"] == pytest.approx(5e6, rel=0.15)


@pytest.mark.slow
@pytest.mark.alone
def test_a_link_that_gets_worse_during_a_run_leads_to_a_better_order(tmp_path):
    """Over real processes: sleeping stages, an emulated link that changes, a search in a process of its own."""
    problem = _small_step(latency_s=0.01, rate=50e6)
    before = order("1f1b", problem)
    changes = tuple(LinkChange(step=5, link=name, latency_s=0.1, bandwidth_bytes_per_s=10e6) for name in problem.links)
    settings = ReplanSettings(search_s=1.0, watch_steps=3)
    spec = _spec(problem, before, num_steps=MANY_STEPS, device="sleep", link_changes=changes, replan=settings)
    with contextlib.suppress(SeenEnoughError):
        run(spec, tmp_path / "run", on_step=until_swapped(tmp_path / "run", after_step=5, further_steps=12))
    events = [json.loads(line) for line in (tmp_path / "run" / LOG_NAME).read_text().splitlines()]
    swap = next(event for event in events if event["event"] == "swap" and event["step"] > 5)
    assert any(event["event"] == "search" and event["step"] < swap["step"] for event in events)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps_s = [line["makespan_s"] for line in lines]
    assert median(steps_s[swap["step"] + 1 :]) < 0.9 * median(steps_s[5 : swap["step"] + 1])


@pytest.mark.slow
def test_after_a_kill_the_run_goes_on_with_the_order_it_had(tmp_path):
    problem, run_dir = _small_step(latency_s=0.01, rate=50e6), tmp_path / "run"
    changes = tuple(LinkChange(step=0, link=name, latency_s=0.1, bandwidth_bytes_per_s=10e6) for name in problem.links)
    settings = ReplanSettings(settle_steps=0, search_s=1.0)
    spec = _spec(
        problem, order("1f1b", problem), num_steps=MANY_STEPS, device="sleep", link_changes=changes, replan=settings
    )
    killed = []

    def kill_after_the_swap(line):
        log = (run_dir / LOG_NAME).read_text() if (run_dir / LOG_NAME).exists() else ""
        if not killed and '"swap"' in log:
            killed.append(processes_of(run_dir)[3])
            os.kill(killed[0], signal.SIGKILL)
        if '"go on"' in log:
            raise SeenEnoughError

    with contextlib.suppress(SeenEnoughError):
        run(spec, run_dir, max_restarts=1, on_step=kill_after_the_swap)
    events = [json.loads(line) for line in (run_dir / LOG_NAME).read_text().splitlines()]
    swap = next(event for event in events if event["event"] == "swap")
    (on,) = [event for event in events if event["event"] == "go on"]
    assert (on["why"], on["method"]) == ("with the order of before", swap["method"])


class SeenEnoughError(Exception):
    """A run whose steps are there for a search to end in is stopped."""


MANY_STEPS = 500
"""More than any search needs, whatever else the machine does: one that does not end is a failure, not an excuse."""


def until_swapped(run_dir, after_step, further_steps):
    """The action of every step: end the run so many steps after an order was taken that was looked for late enough."""

    def on_step(line):
        log = (run_dir / LOG_NAME).read_text().splitlines() if (run_dir / LOG_NAME).exists() else []
        swaps = [e["step"] for e in map(json.loads, log) if e["event"] == "swap" and e["step"] > after_step]
        if swaps and line["step"] > swaps[0] + further_steps:
            raise SeenEnoughError

    return on_step


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
