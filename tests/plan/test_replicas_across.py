"""A whole pipeline at each site, and gradients that cross."""

import pytest

from farpipe.cost import JobCosts
from farpipe.plan import make_plan
from farpipe.plan.planner import search
from farpipe.plan.replicas_across import replicas_across
from plan.jobs import MODEL, both_ways, device, job, site

PINS = {"pipeline": 2, "tensor": 1, "virtual": 1, "schedule": "1f1b"}


def exchange(gbit_per_s, latency_s=0.01, data=1, on=None):
    request = job(
        [site("a"), site("b", on=on)], both_ways("a", "b", latency_s, gbit_per_s), data=data, num_microbatches=8, **PINS
    )
    costs = JobCosts(request.model, request.training)
    evaluated, _ = search(request, costs)
    return replicas_across(request, [e for e in evaluated if len(e.candidate.order) == 1], costs)


def test_every_gradient_crosses_once_each_way_between_two_sites():
    assert exchange(100.0).bytes_per_link == 4 * MODEL.num_params


def test_with_a_free_link_each_site_takes_its_half_of_the_batch():
    alone = make_plan(job([site("a")], data=1, num_microbatches=8, **PINS)).prediction.step_s
    assert 0.45 * alone < exchange(1e9, 0.0).step_s < 0.8 * alone


@pytest.mark.parametrize("data", [1, 2])
def test_with_a_slow_link_the_exchange_sets_the_time(data):
    slow = exchange(1.0, data=data)
    crossing_s = slow.bytes_per_link / (1e9 / 8)
    assert crossing_s < slow.step_s < 1.5 * crossing_s


def test_a_longer_way_costs_its_two_latencies():
    near, far = exchange(10.0, 0.01), exchange(10.0, 0.11)
    assert far.step_s - near.step_s == pytest.approx(2 * 0.1)


def test_only_equal_sites_are_estimated():
    assert exchange(10.0, on=device("h100-sxm", flops=989e12)) is None


def test_the_plan_tells_which_use_of_a_second_site_is_better():
    plan = make_plan(job([site("a"), site("b")], both_ways("a", "b", 0.02, 1.0), **PINS, data=1, num_microbatches=8))
    assert any(line.startswith("A replica at each of a, b instead") for line in plan.advice)
