"""A run's Timeline as profiles and links: what made it is found again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.spec import Cluster, Job, Model, SiteLink, Training, preset_site
from farpipe.engine.launch.learned import Measured, lessons
from farpipe.planning import Plan
from farpipe.planning.cost import JobCosts, Layout, PartTimes, Profile, model_shape, place_evenly, step_cost

MODEL = Model(name="small", num_layers=8, hidden=256, num_heads=8, num_kv_heads=8, ffn_hidden=1024, vocab_size=2048)
TRAINING = Training(
    sequence_length=256, global_batch=8, microbatch_size=1, precision="fp32", zero=0, sequence_parallel=False
)
LAYOUT = Layout(pipeline=4, data=1, tensor=1, virtual=1, microbatch_size=1, num_microbatches=8)
SITES = ("west", "west", "east", "east")


def cluster(latency_s=0.02, rate=25e6):
    sites = tuple(preset_site(name, "cpu", 2) for name in ("west", "east"))
    links = tuple(
        SiteLink(source=a, target=b, latency_s=latency_s, bandwidth_bytes_per_s=rate)
        for a, b in (("west", "east"), ("east", "west"))
    )
    return Cluster(sites=sites, links=links)


def truth(scale=1.0, head=1.0):
    """A profile of the device that nobody has told the planner of."""

    def part(*seconds):
        return PartTimes(**dict(zip(("forward_s", "input_grad_s", "weight_grad_s"), seconds, strict=True)))

    return Profile(
        device="cpu",
        shape=model_shape(MODEL),
        precision="fp32",
        recompute="none",
        microbatch_size=1,
        sequence_length=256,
        embedding=part(0.001 * scale, 0.0, 0.002 * scale),
        layer=part(0.010 * scale, 0.013 * scale, 0.009 * scale),
        head=part(0.006 * head, 0.007 * head, 0.006 * head),
        optimizer_s_per_param=3e-9,
        action_overhead_s=0.0,
    )


def run_of(real, layers=(3, 2, 2, 1), method="1f1b", noise=0.0, placements=None, latency_s=0.035, rate=12.5e6):
    """A run that was planned with modelled times and another link, and took what `real` says."""
    placements = placements or place_evenly(SITES, layers)
    believed = step_cost(JobCosts(MODEL, TRAINING), LAYOUT, placements, cluster())
    step = step_cost(JobCosts(MODEL, TRAINING, {"cpu": real}), LAYOUT, placements, cluster(latency_s, rate))
    timeline = simulate(step.problem, order(method, believed.problem))
    actions = timeline.actions.copy()
    spread = np.random.default_rng(0).uniform(-noise, noise, len(actions))
    actions["end_s"] += (actions["end_s"] - actions["start_s"]) * spread
    timeline = replace(timeline, source="measured", actions=actions)
    job = Job(model=MODEL, training=TRAINING, cluster=cluster())
    parts = {"job": job, "layout": LAYOUT, "placements": placements, "problem": believed.problem}
    return Measured(Plan.model_construct(**parts), timeline, step.overhead_s), step


def changed(run, **fields):
    """The run of a plan with other fields."""
    return replace(run, plan=run.plan.model_copy(update=fields))


def told_s(run, learned, layers):
    """The makespan of another division of layers, with what was learned."""
    costs = JobCosts(MODEL, TRAINING, {p.device: p for p in learned.profiles})
    links = learned.links["west>east"]
    step = step_cost(costs, LAYOUT, place_evenly(SITES, layers), cluster(links.latency_s, links.bandwidth_bytes_per_s))
    return simulate(step.problem, order("1f1b", step.problem)).makespan_s + step.overhead_s


@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "eager"])
def test_the_parts_that_made_the_times_are_found(method):
    """Of joined backwards only the sum."""
    run, _ = run_of(truth(), method=method)
    (found,) = lessons(run).profiles
    mine, real = found.layer, truth().layer
    assert mine.forward_s == pytest.approx(real.forward_s, rel=0.02)
    assert mine.input_grad_s + mine.weight_grad_s == pytest.approx(real.input_grad_s + real.weight_grad_s, rel=0.02)
    if method == "zb-h1":
        assert mine.weight_grad_s == pytest.approx(real.weight_grad_s, rel=0.02)


def test_the_links_and_the_optimizer_are_found():
    run, _ = run_of(truth())
    learned = lessons(run)
    for name in ("west>east", "east>west"):
        assert learned.links[name].latency_s == pytest.approx(0.035, rel=0.05)
    assert learned.profiles[0].optimizer_s_per_param == pytest.approx(3e-9, rel=0.01)


@settings(max_examples=10, deadline=None)
@given(
    scale=st.floats(0.3, 3),
    head=st.floats(0.5, 2),
    layers=st.permutations([3, 2, 2, 1]),
    seed=st.sampled_from([0.0, 0.05]),
)
def test_another_division_is_told_within_three_percent(scale, head, layers, seed):
    """The demonstration's promise: learn from one plan, predict another on the same machine."""
    real = truth(scale, head)
    run, _ = run_of(real, noise=seed)
    costs = JobCosts(MODEL, TRAINING, {"cpu": real})
    other = step_cost(costs, LAYOUT, place_evenly(SITES, layers), cluster(0.035, 12.5e6))
    measured_s = simulate(other.problem, order("1f1b", other.problem)).makespan_s + other.overhead_s
    assert told_s(run, lessons(run), layers) == pytest.approx(measured_s, rel=0.03)


def test_stages_that_recompute_their_layers_tell_the_same_layer():
    placements = tuple(
        replace(p, recompute="full" if p.rank < 2 else "none") for p in place_evenly(SITES, (3, 2, 2, 1))
    )
    found, without = (lessons(run_of(truth(), placements=p)[0]).profiles[0] for p in (placements, None))
    assert found.layer.input_grad_s == pytest.approx(without.layer.input_grad_s, rel=0.03)


def test_stages_all_alike_keep_the_model_s_proportions_and_tell_their_own_time():
    run, step = run_of(truth(), layers=(2, 2, 2, 2))
    (found,) = lessons(run).profiles
    costs = JobCosts(MODEL, TRAINING, {"cpu": found})
    again = step_cost(costs, LAYOUT, run.plan.placements, cluster(0.035, 12.5e6))
    for mine, real in zip(again.problem.stages, step.problem.stages, strict=True):
        assert mine.forward_s == pytest.approx(real.forward_s, rel=0.02)


def test_what_can_not_be_told_is_refused():
    run, _ = run_of(truth())
    with pytest.raises(InputError, match="divided over 2 devices"):
        lessons(changed(run, layout=replace(LAYOUT, tensor=2)))


def test_stages_that_recompute_operations_tell_a_layer_without_them():
    run, _ = run_of(truth())
    some = tuple(
        replace(place, recompute="layernorm mlp" if place.rank < 2 else "none") for place in run.plan.placements
    )
    plain, found = (lessons(changed(run, placements=p)).profiles[0] for p in (run.plan.placements, some))
    assert found.recompute == "none"
    assert found.layer.forward_s == plain.layer.forward_s
    assert 0 < found.layer.input_grad_s < plain.layer.input_grad_s
