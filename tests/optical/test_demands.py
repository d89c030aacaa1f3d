"""Policies, orders chosen with the network, and fair comparisons."""

from dataclasses import replace

import numpy as np
import pytest

from farpipe.core.errors import InputError, UsageError
from farpipe.core.schedule import peak_memory_bytes
from farpipe.core.schedule.library import order
from farpipe.optical import Grid, PoissonTraffic, find_network, k_shortest
from farpipe.optical.confidence import mean_interval, paired_change, t_975
from farpipe.optical.demands import (
    TRANSFER_POLICIES,
    Cba,
    Fixed,
    communication_bound,
    find_transfer_policy,
    first_microbatch,
)
from farpipe.optical.joint_order import joint_order
from farpipe.optical.shared_network import NetworkPlayer
from farpipe.optical.study import LightScenario, bound_s, compare_policies, no_network_s, run_once
from farpipe.optical.transfers import LightTraining, nominal_problem
from farpipe.report.light import _LATE, LightText, _draw_pipeline, draw_light, write_light_page
from farpipe.report.pyplot import load_pyplot
from farpipe.report.tables import TableView
from optical_data import pipeline_problem

NODES = ("1", "4", "4", "10")
NSFNET = find_network("nsfnet", shared=True)
KM4 = k_shortest(NSFNET, k=4)
SCENARIO = LightScenario(KM4, KM4, Grid(80), PoissonTraffic(60.0, 0.2, 4, 20))


def training_of(name, num_microbatches=8):
    problem = pipeline_problem([0.026] * 4, [0.052] * 4, num_microbatches, NODES, 512e6)
    nominal = nominal_problem(problem, NODES, KM4, 450.0)
    return LightTraining(nominal, order(name, nominal), NODES)


@pytest.mark.parametrize(("setup_s", "load"), [(0.0, 150.0), (0.05, 150.0), (0.05, 0.0)])
def test_only_messages_that_waited_for_spectrum_are_drawn_as_waiting(setup_s, load):
    """Setting up a light path takes time for every message; that is no wait for spectrum."""
    background = PoissonTraffic(load, 0.2, 4, 20) if load else None
    policy, training = Cba(start=6), training_of("1f1b")
    shared = replace(SCENARIO, background=background).shared(1, load or 1.0)
    player = NetworkPlayer(shared, training, replace(policy.rule, setup_s=setup_s), begin_s=2.0)
    step = player.step(policy.demands(training, None))
    axis = load_pyplot().subplots()[1]
    _draw_pipeline(axis, step, 0.0, step.makespan_s)
    red = sum(line.get_color() == _LATE for line in axis.lines)
    assert red == round(step.waited_ratio * step.num_sent) == int(step.waited.sum())
    assert red < step.num_sent
    assert (red > 0) == (load > 0)


@pytest.mark.parametrize("name", TRANSFER_POLICIES)
def test_every_policy_plays_and_never_beats_the_bound_of_its_order(name):
    training = training_of("1f1b")
    run = run_once(SCENARIO, training, TRANSFER_POLICIES[name], 0, num_steps=2, skipped=1)
    assert run.step_s >= bound_s(SCENARIO, training) - 1e-9
    figures = run.figures()
    assert 1 <= figures["mean_units"] <= 6
    assert 0 <= figures["refused_ratio"] <= 1
    assert figures["held_slots"] > 0


def test_bounds_are_in_order():
    training = training_of("1f1b")
    assert no_network_s(training) == pytest.approx((8 + 3) * 0.078)
    assert no_network_s(training) < bound_s(SCENARIO, training) < bound_s(SCENARIO, training, units=1)


def test_cba_labels_what_the_pipeline_waited_for():
    training = training_of("1f1b")
    alone = replace(SCENARIO, background=None)
    step = NetworkPlayer(alone.shared(0, 1.0), training, Fixed(1).rule).step(Fixed(1).demands(training, None))
    bound = communication_bound(step)
    assert (bound | ~first_microbatch(training)).all()  # microbatch 0 always
    assert bound.sum() > first_microbatch(training).sum()
    demands = Cba(start=2, more=2).demands(training, step)
    last = step.demands.want
    assert (demands.want[bound] == last[bound] + 2).all()
    assert (demands.want[~bound] == last[~bound]).all()
    assert (demands.priority[bound] == 0).all()


def test_cba_asks_for_fewer_where_it_was_refused():
    training = training_of("1f1b")
    policy = Cba(start=6)
    coupled = NetworkPlayer(SCENARIO.shared(1, 60.0), training, policy.rule, begin_s=2.0)
    step = coupled.step(policy.demands(training, None))
    assert step.num_refused > 0
    refused = step.out.refused
    assert (policy.demands(training, step).want[refused] == step.demands.want[refused] - 1).all()


def test_the_joint_order_is_no_slower_than_1f1b():
    problem = pipeline_problem([0.026] * 4, [0.052] * 4, 8, NODES, 512e6)
    policy = TRANSFER_POLICIES["earliest"]
    schedule = joint_order(SCENARIO.shared(7, 60.0), problem, NODES, policy, begin_s=2.0)
    nominal = nominal_problem(problem, NODES, KM4, 450.0)
    joint, plain = LightTraining(nominal, schedule, NODES), training_of("1f1b")
    found = compare_policies(
        SCENARIO, {"plain": (plain, policy, None), "joint": (joint, policy, None)}, [0, 1], num_steps=2, skipped=0
    )
    assert found.change("joint").mean < 0
    assert max(peak_memory_bytes(nominal, schedule)) >= 4


def test_the_joint_order_keeps_to_the_memory_of_the_ranks():
    problem = pipeline_problem([0.026] * 4, [0.052] * 4, 8, NODES, 512e6)
    data = problem.to_data()
    data["ranks"] = [{"memory_bytes": 4.0, "static_bytes": 0.0}] * 4
    tight = type(problem).from_data(data)
    schedule = joint_order(SCENARIO.shared(7, 60.0), tight, NODES, Fixed(3), begin_s=2.0, num_steps=1)
    assert max(peak_memory_bytes(tight, schedule)) <= 4


def test_comparisons_are_paired_and_harm_is_none_without_a_training():
    training = training_of("1f1b")
    settings = {"a": (training, Fixed(3), None), "b": (training, Fixed(3), None), "c": (training, Fixed(1), None)}
    found = compare_policies(SCENARIO, settings, [0, 1, 2], num_steps=1, skipped=1)
    same = found.change("b")
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    assert found.change("c").low > 0
    assert [row["policy"] for row in found.to_data()] == ["a", "b", "c"]
    empty = LightTraining(training.problem, training.schedule, ("1",) * 4)
    assert run_once(SCENARIO, empty, Fixed(3), 0, num_steps=1, skipped=0).harm == 0


def test_intervals_are_student_s():
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2
    assert interval.half_width == pytest.approx(4.303 / np.sqrt(3))
    assert t_975(60) == pytest.approx(2.0003, abs=1e-3)
    assert paired_change([2.0, 4.0], [1.0, 2.0]).mean == 1


@pytest.mark.parametrize(("name", "says"), [("cd-cbaa", r"did you mean 'cd-cba'\?"), ("best-fit", "known: ksp-ff")])
def test_unknown_policies_are_refused(name, says):
    with pytest.raises(UsageError, match=says):
        find_transfer_policy(name)


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path):
    training = training_of("1f1b", 4)
    shared = SCENARIO.shared(0, 60.0)
    coupled = NetworkPlayer(shared, training, Fixed(6).rule, begin_s=2.0, num_logged=100_000)
    step = coupled.step(Fixed(6).demands(training, None))
    draw_light(tmp_path / "light.svg", step, shared.table, coupled.log, 80)
    text = (tmp_path / "light.svg").read_text()
    assert text.count("<path") > 100
    about = LightText("on nsfnet", "no other traffic", TableView("Policies", ("policy", "step s"), (("six", "1.5"),)))
    write_light_page(tmp_path / "light.html", step, shared.table, coupled.log, 80, about=about)
    page = (tmp_path / "light.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 3  # the spectrum; memory and links of the step
    assert all(text in page for text in ("<h1>on nsfnet</h1>", "No other traffic.", ">1.5</td>"))
    with pytest.raises(UsageError, match=r"as \.svg or \.png"):
        draw_light(tmp_path / "light.gif", step, shared.table, coupled.log, 80)
    draw_light(tmp_path / "part.svg", step, shared.table, coupled.log, 80, (0.1, 0.2))
    assert (tmp_path / "part.svg").read_text().count("<path") < text.count("<path")
    with pytest.raises(UsageError, match="nothing of it is after 100 s"):
        draw_light(tmp_path / "part.svg", step, shared.table, coupled.log, 80, (100.0, 101.0))


def test_a_trace_that_is_over_before_the_step_harms_nobody():
    over = replace(SCENARIO, background=SCENARIO.background.draw(tuple(KM4.of_pair), 10, 0), first_s=100.0)
    run = run_once(over, training_of("1f1b"), TRANSFER_POLICIES["widen"], 0, num_steps=1, skipped=0)
    assert (run.harm, run.harm_by_slots) == (0.0, 0.0)


def test_a_message_without_bytes_between_different_nodes_is_refused():
    training = training_of("1f1b")
    with pytest.raises(InputError, match=r"hops\[1\]: the problem has no bytes between ranks at 4 and 10"):
        replace(training, nodes=("1", "4", "10", "14"))
