"""Records of actions and messages that are sampled: whole steps are left out, and what is left serves as before."""

import json
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.test_recorder import PROBLEM, RUN, SCHEDULE, make_recorder, played, post
from engine.test_train import make_run
from farpipe.core.simulate import simulate
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.spec.run_keys import ReplanSettings
from farpipe.engine.figures import step_report
from farpipe.engine.figures.metrics import read_metrics
from farpipe.engine.figures.step_report import StepReport, is_recorded, record_bytes, record_every
from farpipe.engine.train import train_rank
from in_process import run_ranks


def test_what_is_counted_is_what_is_sent():
    sent = sum(report.events.actions.nbytes + report.events.messages.nbytes for report in played())
    assert record_bytes(RUN) == sent
    assert record_every(RUN) == 1


def test_large_records_are_sampled(monkeypatch):
    monkeypatch.setattr(step_report, "RECORD_BYTES", record_bytes(RUN) / 3)
    assert record_every(RUN) == 3
    twice = RUN.with_plan(replicas=(("a", "b"),) * 2)
    assert record_every(twice) == 6


@given(st.integers(1, 50), st.integers(1, 300))
def test_of_so_many_steps_in_a_row_one_is_recorded_and_the_last_one_always(every, num_steps):
    recorded = [is_recorded(step, every, num_steps) for step in range(num_steps)]
    assert recorded[-1]
    assert all(any(recorded[first : first + every]) for first in range(num_steps))
    assert sum(recorded) <= num_steps / every + 1


def test_a_report_without_its_record_survives_the_way_to_rank_0():
    report = StepReport.unpack(played()[1].without_record().pack())
    assert (len(report.events.actions), len(report.events.messages), report.loss) == (0, 0, 2.5)
    assert len(report.pack()) < 200


def test_figures_are_of_the_recorded_steps_and_the_others_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(step_report, "RECORD_BYTES", record_bytes(RUN) / 2)
    recorder, peers = make_recorder(tmp_path, num_steps=9)
    for step, slower in enumerate([9, 9, 9, 2, 7, 3, 7, 2, 7]):
        reports = played(step, slower=slower)
        post(peers, reports if is_recorded(step, 2, 9) else [report.without_record() for report in reports])
        recorder.collect()
    summary = recorder.finish(9)
    lines = [*read_metrics(tmp_path / "metrics.jsonl")]
    assert [line["step"] for line in lines if line.get("is_recorded") is False] == [0, 2, 4, 6]
    assert all((line["makespan_s"] is None) == ("is_recorded" in line) for line in lines)
    assert all(line["loss"] == 2.5 for line in lines)
    expected = simulate(PROBLEM, SCHEDULE).makespan_s
    assert summary.num_steps == 9
    assert summary.timeline_step == 7
    assert summary.makespan_s == pytest.approx(2.5 * expected, abs=1e-8), "of 2, 3, 2 and 7"
    assert Timeline.load(tmp_path / "timeline.json").makespan_s == pytest.approx(2 * expected, abs=1e-8)


class Listener:
    """In the place of a Watch."""

    def __init__(self):
        self.first_order, self.heard = None, []
        self.proposals, self.swapped = SimpleQueue(), SimpleQueue()

    def on_timeline(self, step, timeline):
        self.heard.append((step, len(timeline.actions)))

    def close(self):
        pass


@pytest.mark.slow
def test_a_training_tells_re_planning_of_the_recorded_steps(text_file, tmp_path, monkeypatch):
    run = make_run(text_file, num_steps=7).model_copy(update={"replan": ReplanSettings()})
    monkeypatch.setattr(step_report, "RECORD_BYTES", record_bytes(run) / 3)
    watch = Listener()
    run_ranks(2, lambda peers: train_rank(run, peers, tmp_path, make_watch=lambda run, run_dir, step: watch))
    num_actions = sum(map(len, run.plan.schedule.ranks))
    assert watch.heard == [(2, num_actions), (5, num_actions), (6, num_actions)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["makespan_s"] is None] == [0, 1, 3, 4]
    assert all(line["loss"] is not None for line in lines)
