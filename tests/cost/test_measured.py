"""Profiles made from the measured times of a job."""

import pytest

from cost_jobs import gpt, layout, site, training
from farpipe.cost import profiles_of, stage_cost, tell_measured
from farpipe.spec import Cluster, Job, Measured
from farpipe.units import format_percent

PLAIN = Job(model=gpt(), training=training(), cluster=Cluster(sites=(site(),)))
DEVICE = PLAIN.cluster.sites[0].device.name


def measured(**more):
    return Measured(**{"device": DEVICE, "microbatch_size": 2, "forward_s": 0.5} | more)


def cost(job, num_layers, microbatch_size=2, **parts):
    profile = next(iter(profiles_of(job)), None)
    where = (layout(microbatch_size=microbatch_size), job.cluster.sites[0], num_layers)
    return stage_cost(job.model, job.training, *where, profile=profile, **parts)


def with_times(*tables):
    return PLAIN.model_copy(update={"measured": tables})


def test_the_layers_that_were_measured_take_what_was_measured():
    halves = with_times(measured(num_layers=4, input_grad_s=0.75, weight_grad_s=0.25))
    found = cost(halves, 4)
    assert (found.forward_s, found.input_grad_s, found.weight_grad_s) == (0.5, 0.75, 0.25)
    assert cost(halves, 2, microbatch_size=1).forward_s == 0.125
    assert list(tell_measured(halves)) == []


def test_a_whole_backward_is_divided_as_the_model_divides_it_and_that_is_told():
    job = with_times(measured(backward_s=1.5))
    found, none, one = cost(job, 1), cost(PLAIN, 0), cost(PLAIN, 1)
    model_i, model_w = one.input_grad_s - none.input_grad_s, one.weight_grad_s - none.weight_grad_s
    assert found.input_grad_s + found.weight_grad_s == pytest.approx(1.5)
    assert found.input_grad_s / found.weight_grad_s == pytest.approx(model_i / model_w)
    (told,) = tell_measured(job)
    assert f"backward of the layer on {DEVICE}" in told
    assert f"{format_percent(model_i / (model_i + model_w))} gradient of the input" in told
    assert list(tell_measured(job, replaced=[DEVICE])) == []


def test_what_was_not_measured_is_modelled():
    job = with_times(measured(input_grad_s=1.0, weight_grad_s=1.0))
    fixed_s = cost(PLAIN, 0).forward_s
    assert cost(job, 0, head=True).forward_s == pytest.approx(cost(PLAIN, 0, head=True).forward_s - fixed_s)
    head = measured(part="head", microbatch_size=1, forward_s=3.0, backward_s=4.0)
    assert cost(with_times(job.measured[0], head), 0, head=True).forward_s == 6.0


def test_a_job_without_measured_times_has_no_profile():
    assert profiles_of(PLAIN) == ()
