"""Measured times in place of modelled ones."""

import json

import pytest

from cost_jobs import A100, gpt, layout, placed, site, stage_cost, step, training
from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster
from farpipe.planning.cost import PartTimes, Profile, model_shape
from farpipe.planning.cost.profile import MEASURABLE
from farpipe.planning.cost.stage import stage_params


def profile(**more):
    spec = {
        "device": A100.name,
        "shape": model_shape(gpt()),
        "precision": "bf16",
        "recompute": "none",
        "microbatch_size": 1,
        "sequence_length": 256,
        "embedding": PartTimes(forward_s=1.0, input_grad_s=0.0, weight_grad_s=2.0),
        "layer": PartTimes(forward_s=10.0, input_grad_s=20.0, weight_grad_s=30.0),
        "head": PartTimes(forward_s=100.0, input_grad_s=200.0, weight_grad_s=300.0),
        "optimizer_s_per_param": 1e-9,
        "action_overhead_s": 0.25,
    }
    return Profile.model_validate(spec | more)


def test_a_stage_takes_the_measured_times_in_proportion_to_the_microbatch():
    cost = stage_cost(
        gpt(), training(), layout(microbatch_size=2), site(), 3, embedding=True, head=True, profile=profile()
    )
    assert (cost.forward_s, cost.input_grad_s, cost.weight_grad_s) == (262.25, 520.25, 784.0)


def test_full_recomputation_follows_from_a_measurement_without():
    plain, again = (
        stage_cost(gpt(), training(recompute=way), layout(microbatch_size=1), site(), 3, head=True, profile=profile())
        for way in ("none", "full")
    )
    assert (again.forward_s, again.weight_grad_s) == (plain.forward_s, plain.weight_grad_s)
    assert again.input_grad_s - plain.input_grad_s == 3 * 10.0
    assert again.activation_bytes < plain.activation_bytes
    with pytest.raises(InputError, match="recompute: measured with 'full', the job has 'none'"):
        stage_cost(gpt(), training(recompute="none"), layout(), site(), 1, profile=profile(recompute="full"))


def test_operations_computed_again_take_the_part_of_the_measured_forward_that_they_have_of_the_modelled_one():
    def input_grads(model, **known):
        asked = [training(recompute=mode) for mode in ("none", "layernorm mlp")]
        return [stage_cost(model, one, layout(microbatch_size=1), site(), 3, **known).input_grad_s for one in asked]

    plain, again = input_grads(gpt(), profile=profile())
    modelled = input_grads(gpt())
    forward_s = stage_cost(gpt(), training(), layout(microbatch_size=1), site(), 3)
    overhead_s = stage_cost(gpt(), training(), layout(microbatch_size=1), site(), 0).forward_s
    share = (modelled[1] - modelled[0]) / (forward_s.forward_s - overhead_s)
    assert 0 < share < 1
    assert again - plain == pytest.approx(3 * 10.0 * share)


def test_a_step_uses_the_profile_of_each_device():
    model, degrees, cluster = gpt(), layout(), Cluster(sites=(site(),))
    parts = (model, training(), degrees, placed(model, degrees), cluster)
    problem = step(*parts, profiles={A100.name: profile(microbatch_size=2)}).problem
    assert [stage.forward_s for stage in problem.stages] == [21.25, 120.25]
    other = step(*parts, profiles={"h100-sxm": profile()})
    assert other == step(*parts)


def test_the_optimizer_takes_the_measured_time_of_the_largest_rank():
    model, degrees, cluster = gpt(), layout(), Cluster(sites=(site(),))
    parts = (model, training(clip_norm=None), degrees, placed(model, degrees), cluster)
    slow, fast = (step(*parts, profiles={A100.name: profile(optimizer_s_per_param=s)}).overhead_s for s in (1e-6, 0.0))
    ranks = [stage_params(model, 2, embedding=first, head=not first) for first in (True, False)]
    assert slow - fast == pytest.approx(1e-6 * max(ranks))


def test_a_profile_survives_the_round_trip(tmp_path):
    profile().save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile()
    assert json.loads(profile().to_json())["format"] == "farpipe/profile/1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "h100-sxm"}, "device: measured with 'h100-sxm', the job has 'a100-80gb'"),
        ({"shape": "hidden 4"}, "shape: measured with 'hidden 4'"),
        ({"precision": "fp32"}, "precision"),
        ({"recompute": "full"}, "recompute"),
        ({"sequence_length": 128}, "sequence_length: measured with 128, the job has 256"),
    ],
)
def test_a_profile_of_something_else_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        stage_cost(gpt(), training(), layout(), site(), 1, profile=profile(**change))


def test_a_profile_of_one_device_says_nothing_about_tensor_parallelism():
    with pytest.raises(InputError, match="measured on one device; the layout has tensor 2"):
        stage_cost(gpt(), training(), layout(tensor=2), site(), 1, profile=profile())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devise": "cpu"}, "profile: devise: unknown key; did you mean 'device'"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"action_overhead_s": -1.0}, "action_overhead_s: must be at least 0"),
        ({"layer": {"forward_s": 1.0}}, "layer.input_grad_s: missing"),
        ({"format": "farpipe/profile/2"}, "expected 'farpipe/profile/1'"),
        *(
            ({part: profile().model_dump()[part] | {key: value}}, rf"{part}\.{key}: .*can't have been measured")
            for part, keys in MEASURABLE.items()
            for key in keys
            for value in (0.0, 1e6)
        ),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_place(change, message):
    data = json.loads(profile().to_json()) | change
    with pytest.raises(InputError, match=message):
        Profile.from_json(json.dumps(data))
