"""Two stages per rank in a V, without a pin."""

import pytest

from farpipe import planning
from farpipe.core.errors import InfeasibleError
from farpipe.planning.cost import round_robin, v_shape
from farpipe.planning.planner.orders import V_ORDERS
from planning.planner.every_layout import candidates
from planning.planner.jobs import both_ways, job, site


def test_stages_go_down_the_ranks_and_up_again():
    assert v_shape(3) == [0, 1, 2, 2, 1, 0]
    assert round_robin(3, 6) == [0, 1, 2, 0, 1, 2]


def test_a_v_is_planned_where_it_is_faster():
    request = job([site("a")], pipeline=3, data=1, tensor=1, num_microbatches=16)
    plan = planning.plan(request)
    assert plan.schedule.method in V_ORDERS
    assert [p.rank for p in plan.placements] == v_shape(3)
    alone = planning.plan(job([site("a")], pipeline=3, data=1, tensor=1, num_microbatches=16, virtual=1))
    assert plan.prediction.step_s < alone.prediction.step_s


def test_a_v_crosses_a_cut_twice_each_way():
    links = both_ways("a", "b", latency_s=1e-4)
    request = job([site("a", 2), site("b", 2)], links, sites=("a", "b"), pipeline=4, num_microbatches=8, schedule="zbv")
    plan = planning.plan(request)
    crossing = [hop.forward.link for hop in plan.problem.hops if hop and ":" not in hop.forward.link]
    assert crossing == ["a>b", "b>a"]
    assert plan.sites == ("a", "a", "b", "b")


def test_pinned_layers_may_leave_the_first_and_the_last_of_many_stages_without_one():
    """Of 8 layers on 10 stages: embedding and head count as a layer each where layers are dealt."""
    layers = (0, *[1] * 8, 0)
    pins = {"pipeline": 2, "virtual": 5, "layers": layers, "data": 1, "tensor": 1, "num_microbatches": 8}
    plan = planning.plan(job([site("a", 2)], **pins))
    assert tuple(placement.num_layers for placement in plan.placements) == layers


def test_any_number_of_stages_on_a_rank_is_planned():
    plan = planning.plan(job([site("a", 2)], pipeline=2, virtual=4, data=1, tensor=1, num_microbatches=16))
    assert plan.layout.virtual == 4
    assert [p.rank for p in plan.placements] == round_robin(2, 8)


@pytest.mark.parametrize(("method", "in_v"), [("zbv", True), ("wave", True), ("1f1b", False), ("interleaved", False)])
def test_a_pinned_order_decides_the_placement(method, in_v):
    found = candidates(job([site("a")], schedule=method))
    assert {c.in_v for c in found} == {in_v}


def test_pinned_layers_decide_the_number_of_stages():
    found = candidates(job([site("a")], layers=(2, 2, 2, 2), pipeline=4))
    assert {(c.layout.virtual, c.layout.pipeline) for c in found} == {(1, 4)}
    found = candidates(job([site("a")], layers=(2, 2, 2, 2)))
    assert {(c.layout.virtual, c.layout.pipeline) for c in found} == {(1, 4), (2, 2)}


def test_an_order_that_its_pins_rule_out_is_told():
    with pytest.raises(InfeasibleError, match="needs two stages per rank in a V"):
        planning.plan(job([site("a")], virtual=1, pipeline=2, schedule="zbv"))
