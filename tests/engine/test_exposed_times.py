"""Waits for links inside a site and between sites are told apart in what is measured, rank by rank."""

import math

import numpy as np
import pytest

from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.simulate.timeline import MESSAGE_KINDS
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.engine.executor.executor import StepEvents, instructions, message_table, received
from farpipe.engine.figures.step_report import Assembler, StepReport, step_metrics
from farpipe.engine.run_spec import RunSpec

PROBLEM = Problem(
    num_microbatches=3,
    ranks=(Rank(),) * 3,
    stages=tuple(Stage(rank=r, forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.01) for r in range(3)),
    links={
        "a:0>a:1": Link(latency_s=0.004, bandwidth_bytes_per_s=1e6),
        "a:1>a:0": Link(latency_s=0.003, bandwidth_bytes_per_s=1e6),
        "a>b": Link(latency_s=0.011, bandwidth_bytes_per_s=1e6),
        "b>a": Link(latency_s=0.013, bandwidth_bytes_per_s=1e6),
    },
    hops=(
        Hop(forward=Transfer(link="a:0>a:1", bytes=1000), backward=Transfer(link="a:1>a:0", bytes=2000)),
        Hop(forward=Transfer(link="a>b", bytes=3000), backward=Transfer(link="b>a", bytes=4000)),
    ),
)
SCHEDULE = order("1f1b", PROBLEM)
RUN = RunSpec.bare(problem=PROBLEM, schedule=SCHEDULE, sites=("a", "a", "b"), num_steps=1, device="sleep")


def report_of(rank, predicted):
    """Of a rank that did what the simulator says; its messages are in the order in which its actions need them."""
    actions = [(a["start_s"], a["end_s"]) for a in predicted.actions if a["rank"] == rank]
    known = {(int(m["kind"]), int(m["stage"]), int(m["microbatch"])): m for m in predicted.messages}
    needed = [
        known[MESSAGE_KINDS.index(item.direction), item.producer, item.action.microbatch]
        for item in received(instructions(SCHEDULE, rank), rank)
    ]
    times = [[round(m[name] * 1e9) for name in ("ready_s", "start_s", "end_s", "arrival_s")] for m in needed]
    messages = message_table([(*row, int(m["bytes"])) for row, m in zip(times, needed, strict=True)])
    events = StepEvents(np.array([[round(t * 1e9) for t in row] for row in actions], np.int64), messages)
    return StepReport(0, 0, 10**9, math.nan, 1.0, events, message_table([]))


def test_measured_waits_are_the_simulators_inside_and_between_sites():
    predicted = simulate(PROBLEM, SCHEDULE)
    assert (predicted.exposed_s.sum(axis=0) > 0.01).all(), "both kinds of waits are there"
    reports = [report_of(rank, predicted) for rank in range(3)]
    measured = Assembler(RUN).timeline(reports, (0, 0, 0))
    assert measured.exposed_s == pytest.approx(predicted.exposed_s, abs=1e-8)
    line = step_metrics(measured, reports, tokens=1)
    for column, where in enumerate(("inter", "intra")):
        assert line[f"exposed_{where}_site_s"] == pytest.approx(predicted.exposed_s[:, column].mean(), abs=1e-8)
        assert line[f"exposed_{where}_site_max_s"] == pytest.approx(predicted.exposed_s[:, column].max(), abs=1e-8)
    assert measured.link_bytes() == {"a:0>a:1": 3000, "a:1>a:0": 6000, "a>b": 9000, "b>a": 12000}
