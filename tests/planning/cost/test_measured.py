"""Profiles of which only some parts were measured."""

import pytest

from cost_jobs import gpt, layout, site, stage_cost, training
from farpipe.core.spec import Cluster, Job
from farpipe.planning.cost import MeasuredPart, completed_profile

JOB = Job(model=gpt(), training=training(microbatch_size=2), cluster=Cluster(sites=(site(),)))


def cost(measured, num_layers, microbatch_size=2, **parts):
    place = JOB.cluster.sites[0]
    profile = completed_profile(JOB, place, measured) if measured else None
    where = (layout(microbatch_size=microbatch_size), place, num_layers)
    return stage_cost(JOB.model, JOB.training, *where, profile=profile, **parts)


def test_layers_take_what_was_measured():
    measured = {"layer": MeasuredPart(0.125, 0.25, 0.0625)}
    found = cost(measured, 4)
    assert (found.forward_s, found.input_grad_s, found.weight_grad_s) == (0.5, 0.75, 0.25)
    assert cost(measured, 2, microbatch_size=1).forward_s == 0.125


def test_a_whole_backward_is_divided_as_the_model_divides_it():
    found, none, one = cost({"layer": MeasuredPart(0.5, 1.5)}, 1), cost({}, 0), cost({}, 1)
    model_i, model_w = one.input_grad_s - none.input_grad_s, one.weight_grad_s - none.weight_grad_s
    assert found.input_grad_s + found.weight_grad_s == pytest.approx(1.5)
    assert found.input_grad_s / found.weight_grad_s == pytest.approx(model_i / model_w)


def test_parts_that_were_not_measured_are_modelled():
    layer = {"layer": MeasuredPart(0.5, 2.0, 1.0)}
    assert cost(layer, 0, head=True).forward_s == pytest.approx(
        cost({}, 0, head=True).forward_s - cost({}, 0).forward_s
    )
    head = {"head": MeasuredPart(6.0, 8.0)}
    assert cost(layer | head, 0, head=True).forward_s == 6.0
