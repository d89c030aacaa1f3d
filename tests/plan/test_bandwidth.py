"""Bandwidth sensitivity, and staggered replicas."""

import math

import pytest
from hypothesis import given

from farpipe.plan import make_plan
from farpipe.plan.bandwidth import bandwidth_sensitivity, link_bounds, link_bytes, with_bandwidth
from farpipe.schedule.library import order
from farpipe.simulate import Timeline, simulate
from farpipe.step import Hop, Link, Problem, Rank, Stage, Sync, Transfer
from plan.jobs import both_ways, job, site
from strategies import problems


def two_sites(gbit_per_s, latency_s=0.002, **pins):
    places = [site("a", 2), site("b", 2)]
    return job(places, both_ways("a", "b", latency_s, gbit_per_s), **({"sites": ("a", "b"), "tensor": 1} | pins))


def pinned_plan(gbit_per_s):
    return make_plan(two_sites(gbit_per_s, pipeline=4, num_microbatches=16, virtual=1, schedule="geopipe"))


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
    points = bandwidth_sensitivity(plan.problem, [knee / 4, knee / 2, knee, 2 * knee, math.inf], "geopipe")
    quarter, half, at, twice, free = (point.makespan_s for point in points)
    assert quarter > 1.8 * half > 1.8 * 1.5 * at
    assert at > twice >= free > at / 2


def test_only_links_between_sites_are_changed():
    problem = pinned_plan(1.0).problem
    scaled = with_bandwidth(problem, 3.0)
    for name, link in problem.links.items():
        times = 1.0 if ":" in name else 3.0
        assert scaled.links[name].bandwidth_bytes_per_s == times * link.bandwidth_bytes_per_s
        assert scaled.links[name].latency_s == link.latency_s


@given(problems(with_sync=True, with_chains=True))
def test_nothing_but_links_is_changed(problem):
    """Exchanges of tied embeddings and chains stay: half of a bandwidth is no faster than all of it."""
    assert with_bandwidth(problem, 1.0).to_json() == problem.to_json()


def test_the_plan_tells_what_bandwidth_is_worth():
    plan = pinned_plan(1.0)
    line = next(line for line in plan.advice if "nothing planned anew: half" in line)
    assert "double" in line
    assert "unlimited" in line
    assert not any("bandwidth" in line for line in make_plan(job([site("a")], pipeline=2)).advice)


def test_replicas_take_turns_where_that_is_faster_and_the_plan_says_so():
    plan = make_plan(two_sites(2.0, 0.01, data=2, pipeline=2, num_microbatches=8, schedule="1f1b"))
    assert {link.num_staggered for name, link in plan.problem.links.items() if ":" not in name} == {2}
    assert any("2 replicas are staggered" in line for line in plan.advice)
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
