"""Experts by numbers become transformers' classes: the shape that is read back is the shape that was given."""

import pytest

from expert_models import DEEP, MODELS, NARROW, a_model
from farpipe.core.errors import InputError
from farpipe.core.spec import Model, preset_model
from farpipe.core.spec.experts_by_number import config_with_experts, kind_of
from farpipe.core.spec.hugging_face_kinds import shape_fields


@pytest.mark.parametrize("kind", MODELS)
def test_numbers_become_a_class_of_transformers_of_this_very_shape(kind):
    model = MODELS[kind]
    assert kind_of(model) == kind
    config = config_with_experts(model)
    read = Model.model_validate(shape_fields(config, "config.json"))
    if kind == "glm4_moe":  # where the planner reads fewer keys
        biases = {"qkv_bias": True, "attention_bias": False}
        read = read.model_copy(update=biases | {"experts": read.experts.model_copy(update={"router_bias": 1})})
    ignored = {"name", "rotary_base", "norm_epsilon"} | (set() if read.experts.num_dense_layers else {"ffn_hidden"})
    assert read.model_dump(exclude=ignored) == model.model_dump(exclude=ignored)


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        (a_model({"shared_ffn_hidden": 48}), "shared_ffn_hidden"),
        (a_model({"num_dense_layers": 1}), "num_dense_layers"),
        (a_model({}, sliding_window=16), "model.sliding_window"),
        (a_model({}, norm="layernorm"), "model.norm"),
        (a_model(DEEP | {"shared_ffn_hidden": 50}), "no multiple"),
        (a_model({}, latent_attention=NARROW, head_dim=16), "router_bias = 0"),
        (preset_model("gpt-oss-20b"), "attention_bias"),
    ],
)
def test_what_no_class_has_is_named(model, missing):
    with pytest.raises(InputError, match=missing):
        kind_of(model)
