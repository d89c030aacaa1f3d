import dataclasses
import json
import math
import re
import resource
import socket
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from farpipe.core.errors import InputError, RunError
from farpipe.core.simulate import simulate
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.spec import MetricsSettings
from farpipe.core.step import Hop, Link, Problem, Rank, Schedule, Stage, Transfer
from farpipe.engine.executor.executor import StepEvents, message_table
from farpipe.engine.figures.metrics import Summary, num_skipped_steps, summarise
from farpipe.engine.figures.recorder import Recorder
from farpipe.engine.figures.sinks import Prometheus, gauge_name
from farpipe.engine.figures.step_report import Assembler, StepReport, step_metrics
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.run_spec import RunSpec
from in_process import InProcessPeers, Switchboard
from proxies import free_port

MS = 1_000_000

PROBLEM = Problem(
    num_microbatches=2,
    ranks=(Rank(), Rank()),
    stages=tuple(Stage(rank=r, forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.01) for r in range(2)),
    links={
        "a>b": Link(latency_s=0.005, bandwidth_bytes_per_s=1e6),
        "b>a": Link(latency_s=0.007, bandwidth_bytes_per_s=1e6),
    },
    hops=(Hop(forward=Transfer(link="a>b", bytes=(1000, 2000)), backward=Transfer(link="b>a", bytes=3000)),),
)
SCHEDULE = Schedule.from_text(["0F0 0F1 0B0 0I1 0W1", "1F0 1B0 1F1 1B1"], 2)
RUN = RunSpec.bare(problem=PROBLEM, schedule=SCHEDULE, sites=("a", "b"), num_steps=1, device="sleep")


def played(step=0, skew_ns=(0, 0), slower=1.0):
    """The reports of two ranks that did exactly what the simulator says, seen on clocks that differ by `skew_ns`."""
    predicted = simulate(PROBLEM, SCHEDULE)
    stamp = lambda seconds, rank: round(seconds * slower * 1e9) + 5 * MS + skew_ns[rank]  # noqa: E731
    reports = []
    for rank in range(2):
        actions = [(a["start_s"], a["end_s"]) for a in predicted.actions if a["rank"] == rank]
        arrived = sorted((m for m in predicted.messages if m["target"] == rank), key=lambda m: m["arrival_s"])
        messages = [
            (
                *(stamp(m[name], int(m["source"])) for name in ("ready_s", "start_s", "end_s")),
                stamp(m["arrival_s"], rank),
                int(m["bytes"]),
            )
            for m in arrived
        ]
        table = np.array([[stamp(t, rank) for t in row] for row in actions], np.int64)
        events = StepEvents(table, message_table(messages))
        loss = 2.5 if rank == 1 else math.nan
        reports.append(StepReport(step, skew_ns[rank], 100 * MS + skew_ns[rank], loss, 1.5, events, message_table([])))
    return reports


def test_reports_survive_the_way_to_rank_0():
    further = {"pause_ns": 7, "evaluation_loss": 3.5, "cpu_share": 0.5, "rss_bytes": 8, "cuda_peak_bytes": 9}
    report = dataclasses.replace(played()[1], **further, link_bytes=np.array([5, 6]))
    found = StepReport.unpack(report.pack())
    assert {name: getattr(found, name) for name in further} == further
    assert found.link_bytes.tolist() == [5, 6]
    assert (found.step, found.begin_ns, found.end_ns, found.loss, found.grad_norm) == (0, 0, 100 * MS, 2.5, 1.5)
    assert np.array_equal(found.events.actions, report.events.actions)
    assert np.array_equal(found.events.messages, report.events.messages)


@pytest.mark.parametrize("skew_ns", [(0, 0), (0, 987_654_321), (0, -3_000_000_000)])
def test_a_run_that_does_what_was_predicted_is_measured_as_predicted(skew_ns):
    predicted = simulate(PROBLEM, SCHEDULE)
    measured = Assembler(RUN).timeline(played(skew_ns=skew_ns), skew_ns)
    assert measured.source == "measured"
    assert measured.makespan_s == pytest.approx(predicted.makespan_s, abs=1e-8)
    assert measured.bubble_ratio == pytest.approx(predicted.bubble_ratio, abs=1e-6)
    assert measured.exposed_s == pytest.approx(predicted.exposed_s, abs=1e-8)
    assert measured.link_bytes() == predicted.link_bytes() == {"a>b": 3000, "b>a": 6000}
    for name in ("rank", "stage", "kind", "microbatch"):
        assert np.array_equal(measured.actions[name], predicted.actions[name])
    key = ["kind", "stage", "microbatch"]
    assert np.array_equal(np.sort(measured.messages, order=key)[key], np.sort(predicted.messages, order=key)[key])


def test_a_step_has_the_cpu_share_of_the_rank_that_had_it_least():
    first, second = played()
    reports = [dataclasses.replace(first, cpu_share=0.9), dataclasses.replace(second, cpu_share=0.4)]
    assert step_metrics(None, reports, tokens=1)["cpu_share"] == 0.4
    assert step_metrics(None, [first, second], tokens=1)["cpu_share"] is None  # nobody computed on a CPU


def later(report, by_ns):
    """The same, somewhat later."""
    actions, messages = report.events.actions + by_ns, report.events.messages.copy()
    messages[:, :4] += by_ns
    return dataclasses.replace(report, events=StepEvents(actions, messages))


def test_replicas_make_one_timeline_with_what_the_last_one_did_and_what_all_sent():
    run = RUN.with_plan(replicas=(("a", "b"),) * 2)
    skew_ns = (0, 987_654_321)
    first, second = played(skew_ns=skew_ns)
    reports = [first, later(first, 4 * MS), second, later(second, 4 * MS)]
    offsets_ns = [skew_ns[0], skew_ns[0], skew_ns[1], skew_ns[1]]
    predicted, measured = simulate(PROBLEM, SCHEDULE), Assembler(run).timeline(reports, offsets_ns)
    assert measured.actions["start_s"] == pytest.approx(predicted.actions["start_s"] + 0.004, abs=1e-8)
    assert measured.link_bytes() == {"a>b": 6000, "b>a": 12000}
    assert measured.exposed_s == pytest.approx(predicted.exposed_s, abs=1e-8)
    key = ["kind", "stage", "microbatch"]
    ours, theirs = (np.sort(timeline.messages, order=key) for timeline in (measured, predicted))
    took = (ours["end_s"] - ours["start_s"]) / (theirs["end_s"] - theirs["start_s"])
    assert took == pytest.approx(np.full(len(took), 1.0)), "it was ready when the link took it"
    assert step_metrics(measured, reports, tokens=50)["loss"] == 5.0, "of both"


def test_a_straggler_among_replicas_keeps_its_durations():
    """One replica takes four times as long for its last action and begins it earlier than the other."""
    run = RUN.with_plan(replicas=(("a", "b"),) * 2)
    first, second = played()
    slow, late = first.events.actions.copy(), later(first, 4 * MS)
    begin, end = first.events.actions[-1]
    slow[-1] = begin, end + 3 * (end - begin) + 4 * MS
    straggler = dataclasses.replace(first, events=StepEvents(slow, first.events.messages))
    measured = Assembler(run).timeline([straggler, late, second, second], (0,) * 4)
    row = measured.actions[measured.actions["rank"] == 0][-1]
    assert row["end_s"] - row["start_s"] == pytest.approx((slow[-1, 1] - begin) * 1e-9)


def test_one_line_of_metrics():
    reports = played()
    line = step_metrics(Assembler(RUN).timeline(reports, (0, 0)), reports, tokens=50)
    predicted = simulate(PROBLEM, SCHEDULE)
    assert line["loss"] == 2.5
    assert line["grad_norm"] == 1.5
    assert line["step_s"] == pytest.approx(0.1)
    assert line["tokens_per_s"] == pytest.approx(500)
    assert line["exposed_inter_site_s"] == pytest.approx(predicted.exposed_s[:, 0].mean(), abs=1e-8)
    assert line["exposed_inter_site_max_s"] == pytest.approx(predicted.exposed_s[:, 0].max(), abs=1e-8)
    assert line["exposed_intra_site_s"] == 0
    assert json.loads(json.dumps(line)) == line


def make_recorder(folder, num_steps=5):
    run = RunSpec.bare(problem=PROBLEM, schedule=SCHEDULE, sites=("a", "b"), num_steps=num_steps, device="sleep")
    board = Switchboard(2)
    return Recorder(run, folder, InProcessPeers(board, 0)), [InProcessPeers(board, rank) for rank in range(2)]


def post(peers, reports):
    for rank, report in reversed([*enumerate(reports)]):
        peers[rank].post(0, "step reports", report.pack())


def test_the_timeline_is_that_of_the_median_step(tmp_path):
    recorder, peers = make_recorder(tmp_path)
    for step, slower in enumerate([9, 9, 3, 1, 2]):
        post(peers, played(step, slower=slower))
        recorder.collect()
    summary = recorder.finish(5)
    expected = 2 * simulate(PROBLEM, SCHEDULE).makespan_s
    assert summary.num_skipped_steps == 2
    assert summary.timeline_step == 4
    assert summary.makespan_s == pytest.approx(expected, abs=1e-8)
    assert Timeline.load(tmp_path / "timeline.json").makespan_s == pytest.approx(expected, abs=1e-8)


def test_steps_are_written_while_the_run_goes_on(tmp_path):
    recorder, peers = make_recorder(tmp_path)
    post(peers, played(0))
    post(peers, played(1)[1:])
    recorder.collect()
    recorder.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0], "step 1 lacks the report of a rank"
    assert not (tmp_path / "summary.json").exists()


def test_orders_of_steps_that_are_written_are_forgotten(tmp_path):
    """A run of months may change its order often."""
    recorder, peers = make_recorder(tmp_path, num_steps=40)
    for step in range(40):
        recorder.order_from(step, SCHEDULE)
        post(peers, played(step))
        recorder.collect()
    assert recorder.finish(40).num_steps == 40
    assert len(recorder._writer.eras) == 1


def test_sinks_are_closed_when_the_metrics_can_not_be_written(tmp_path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    run = RUN.model_copy(update={"metrics": MetricsSettings(prometheus_port=port)})
    with pytest.raises(InputError, match="not a line of metrics"):
        Recorder(run, tmp_path, InProcessPeers(Switchboard(2), 0))
    socket.create_server(("127.0.0.1", port)).close()


def test_the_dashboard_asks_for_what_the_endpoint_has(tmp_path):
    """Every metric of recipes/grafana.json is one that lines of a run, with a link event, give the endpoint."""
    pytest.importorskip("prometheus_client")
    board = json.loads((Path(__file__).parents[2] / "recipes" / "grafana.json").read_text())
    wanted = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"farpipe_\w+", target["expr"])
    }
    recorder, peers = make_recorder(tmp_path)
    post(peers, played(0))
    recorder.collect()
    recorder.close()
    [line] = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    sink = Prometheus("127.0.0.1", 0, "tiny")
    try:
        sink.write(line | {"link_events": [{"kind": "outage", "link": "a>b"}] * 2})
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    finally:
        sink.close()
    assert 'farpipe_link_events_total{kind="outage",link="a>b",run="tiny"} 2.0' in text
    assert 'farpipe_link_events_total{kind="reconnection",link="a>b",run="tiny"} 0.0' in text, "there before the first"
    missing = wanted - set(re.findall(r"^(farpipe_\w+)\{", text, re.MULTILINE))
    assert not missing - {gauge_name(name) for name in OPTIONAL}, missing


OPTIONAL = ("evaluation_loss", "model_flops_utilisation")
"""Figures of runs that evaluate, and of devices with a known peak."""


class PeersAfterAnOutage(InProcessPeers):
    """Nothing arrives in the first second after the first look."""

    begin_s = None

    def poll(self, name):
        self.begin_s = self.begin_s or time.monotonic()
        return super().poll(name) if self.paused_s() == 1.0 else []

    def paused_s(self):
        return min(1.0, time.monotonic() - (self.begin_s or time.monotonic()))


@pytest.mark.slow
@pytest.mark.parametrize("is_outage", [True, False])
def test_an_outage_at_the_end_does_not_count_in_the_wait_for_the_last_reports(is_outage, tmp_path):
    run = RUN.model_copy(update={"transport": TransportSettings(timeout_s=0.3)})
    board = Switchboard(2)
    recorder = Recorder(run, tmp_path, (PeersAfterAnOutage if is_outage else InProcessPeers)(board, 0))
    reports = played()
    if is_outage:
        post([InProcessPeers(board, rank) for rank in range(2)], reports)
        assert recorder.finish(1).num_steps == 1
        return
    with pytest.raises(RunError, match=r"waited 0\.3 s for 2 reports on steps"):
        recorder.finish(1)
    recorder.close()


@contextmanager
def files_no_larger_than(num_bytes):
    """As on a full disk, writes end short or fail (EFBIG for ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 100, 600])
def test_a_full_disk_ends_the_run_and_leaves_whole_lines(room, tmp_path):
    recorder, peers = make_recorder(tmp_path)
    for step in range(5):
        post(peers, played(step))
    with files_no_larger_than(room), pytest.raises(RunError, match=r"metrics\.jsonl: can't be written"):
        recorder.finish(5)
    recorder.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(room // 500)]
    assert not (tmp_path / "summary.json").exists()


def test_warm_up_is_three_steps_but_never_more_than_half():
    assert [num_skipped_steps(n) for n in (1, 2, 5, 6, 100)] == [0, 1, 2, 3, 3]


def test_a_summary_survives_its_file(tmp_path):
    reports = played()
    line = step_metrics(Assembler(RUN).timeline(reports, (0, 0)), reports, tokens=50)
    summary = summarise([line | {"attempt": 0, "model_flops_utilisation": None}] * 4, 2)
    summary.save(tmp_path / "summary.json")
    assert Summary.load(tmp_path / "summary.json") == summary
    (tmp_path / "summary.json").write_text('{"format": "farpipe/summary/1", "num_steps": 3}')
    with pytest.raises(InputError, match="not a summary of this version"):
        Summary.load(tmp_path / "summary.json")
