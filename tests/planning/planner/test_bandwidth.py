"""Bandwidth sensitivity, and staggered replicas."""

import math

import pytest

from farpipe import planning
from farpipe.core.schedule.library import order
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Sync, Transfer
from farpipe.core.units import format_seconds
from farpipe.planning.cost import JobCosts, step_cost
from farpipe.planning.explain import limits
from farpipe.planning.planner.bandwidth import link_bounds, link_bytes, with_bandwidth
from farpipe.planning.planner.orders import try_quickly
from planning.planner.jobs import both_ways, job, planned, site, why


def two_sites(gbit_per_s, latency_s=0.002, loss=0.0, **pins):
    links = [link.model_copy(update={"loss": loss}) for link in both_ways("a", "b", latency_s, gbit_per_s)]
    return job([site("a", 2), site("b", 2)], links, **({"sites": ("a", "b"), "tensor": 1} | pins))


def pinned_plan(gbit_per_s):
    return planning.plan(two_sites(gbit_per_s, pipeline=4, num_microbatches=16, virtual=1, schedule="geopipe"))


def test_the_wall_goes_exactly_where_it_says():
    slow = pinned_plan(0.2)
    found = link_bounds(slow.problem, simulate(slow.problem, slow.schedule))
    assert {wall.link for wall in found} == {"a>b", "b>a"}
    assert all(wall.message_s > wall.pace_s for wall in found)
    enough = max(wall.enough_bytes_per_s for wall in found)
    for factor, is_wall in ((0.99, True), (1.01, False)):
        near = pinned_plan(enough * 8 / 1e9 * factor)
        assert bool(link_bounds(near.problem, simulate(near.problem, near.schedule))) == is_wall


def test_the_knee_curve_falls_steeply_before_the_wall_and_hardly_after():
    plan = pinned_plan(0.2)
    (wall, *_) = link_bounds(plan.problem, simulate(plan.problem, plan.schedule))
    knee = wall.enough_bytes_per_s / plan.problem.links[wall.link].bandwidth_bytes_per_s
    scaled = [over(plan, factor) for factor in (knee / 4, knee / 2, knee, 2 * knee, math.inf)]
    quarter, half, at, twice, free = (try_quickly("geopipe", problem).makespan_s for problem in scaled)
    assert quarter > 1.8 * half > 1.8 * 1.5 * at
    assert at > twice >= free > at / 2


def over(plan, factor):
    """The Problem of the plan with `factor` times the bandwidth between sites."""
    costs = JobCosts(plan.job.model, plan.job.training)
    return step_cost(costs, plan.layout, plan.placements, with_bandwidth(plan.job.cluster, factor)).problem


def test_only_links_between_sites_are_changed():
    plan = pinned_plan(1.0)
    scaled = over(plan, 3.0)
    for name, link in plan.problem.links.items():
        times = 1.0 if ":" in name else 3.0
        assert scaled.links[name].bandwidth_bytes_per_s == pytest.approx(times * link.bandwidth_bytes_per_s)
        assert scaled.links[name].latency_s == link.latency_s


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins", [{"pipeline": 4}, {"replicas": "across"}, {"pipeline": 2, "data": 2, "num_microbatches": 8}]
)
@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_the_same_bandwidth_is_the_same_step(pins, loss, monkeypatch):
    """Of staggered replicas and over links that lose packets, too: then it is the mean step of the plan."""
    monkeypatch.setattr(limits, "BANDWIDTH_FACTORS", {1.0: "the same"})
    document = planned(two_sites(1.0, loss=loss, **pins))
    expected = f"the same -> {format_seconds(document.plan.prediction.step_s)} (0.0 %)."
    assert any(line.endswith(expected) for line in document.explanation.advice)


@pytest.mark.parametrize(("pins", "loss"), [({"replicas": "across"}, 0.0), ({"pipeline": 4}, 0.01)])
def test_what_bandwidth_is_worth_is_what_a_plan_over_such_a_link_takes(pins, loss):
    """Exchanges of replicas and messages over a link that loses packets state their own times."""
    now, half = (planned(two_sites(gbit, loss=loss, schedule="1f1b", **pins)) for gbit in (0.2, 0.1))
    line = next(line for line in now.explanation.advice if "without replanning: half" in line)
    assert f"half -> {format_seconds(half.plan.prediction.step_s)} (+" in line


def test_replicas_are_limited_by_the_bandwidth_that_their_exchange_takes():
    assert why(two_sites(0.1, replicas="across")).limited_by.startswith("bandwidth of")


def test_the_plan_tells_what_bandwidth_is_worth():
    asked = two_sites(1.0, pipeline=4, num_microbatches=16, virtual=1, schedule="geopipe")
    line = next(line for line in why(asked).advice if "without replanning: half" in line)
    assert "double" in line
    assert "unlimited" in line
    assert not any("bandwidth" in line for line in why(job([site("a")], pipeline=2)).advice)


def test_replicas_take_turns_where_that_is_faster_and_the_plan_says_so():
    document = planned(two_sites(2.0, 0.01, data=2, pipeline=2, num_microbatches=8, schedule="1f1b"))
    plan, said = document.plan, document.explanation.advice
    assert {link.num_staggered for name, link in plan.problem.links.items() if ":" not in name} == {2}
    assert any("2 replicas are staggered" in line for line in said)
    message = plan.job.model.hidden * plan.job.training.sequence_length * plan.layout.microbatch_size * 2
    assert plan.prediction.link_bytes["a>b"] == 2 * 8 * message
    assert link_bytes(plan.problem, simulate(plan.problem, plan.schedule)) == pytest.approx(plan.prediction.link_bytes)


def test_a_collective_is_of_all_replicas_and_counts_once_on_a_link_where_they_take_turns():
    links = {name: Link(latency_s=1.0, bandwidth_bytes_per_s=1.0, num_staggered=3) for name in ("a>b", "b>a")}
    problem = Problem(
        num_microbatches=4,
        ranks=(Rank(),) * 2,
        stages=tuple(Stage(rank=rank, forward_s=1, input_grad_s=1, weight_grad_s=1) for rank in range(2)),
        links=links,
        hops=(Hop(forward=Transfer(link="a>b", bytes=0.5), backward=Transfer(link="b>a", bytes=0.25)),),
        sync=(None, Sync(gather=Transfer(link="a>b", bytes=40.0), reduce=Transfer(link="a>b", bytes=60.0))),
    )
    timeline = simulate(problem, order("1f1b", problem))
    assert link_bytes(problem, timeline) == {"a>b": 3 * 4 * 0.5 + 100.0, "b>a": 3 * 4 * 0.25}
    assert timeline.messages["bytes"].sum() == 4 * 0.5 + 100.0 + 4 * 0.25, "of one replica"
    assert Timeline.from_data(timeline.to_data()).link_bytes() == timeline.link_bytes()
    assert link_bounds(problem, timeline) == [], "3 replicas' 0.5 s are less than the 3 s that a rank computes"
