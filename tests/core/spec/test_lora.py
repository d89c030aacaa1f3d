"""[training.lora] of a job."""

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job, possible_modules, preset_model

JOB = """
[model]
preset = "{model}"
[training]
sequence_length = 1024
global_batch = 8
[training.lora]
rank = 16
{lora}
[[cluster.sites]]
name = "a"
device = "h100"
num_devices = 8
"""


def job(lora="", model="llama-2-70b"):
    return parse_job(JOB.format(model=model, lora=lora))


def test_all_linear_maps_get_adapters_where_nothing_is_said():
    found = job()
    assert found.training.lora.target_modules is None
    assert all(found.training.lora.adapts(name) for name in possible_modules(found.model))
    assert parse_job(found.model_copy(update={"text": ""}).to_toml()).training == found.training


def test_a_module_that_no_model_has_is_an_input_error_with_the_nearest():
    with pytest.raises(
        InputError, match=r"training\.lora\.target_modules: there is no module 'linear_qvk'.*linear_qkv"
    ):
        job('target_modules = ["linear_qvk"]')


def test_a_module_that_this_model_lacks_is_an_input_error_that_names_those_it_has():
    message = "the layers of deepseek-v3 have no linear_qkv; they have linear_q_down_proj, linear_q_up_proj"
    with pytest.raises(InputError, match=message):
        job('target_modules = ["linear_qkv"]', model="deepseek-v3")


def test_latent_attention_has_other_modules():
    assert possible_modules(preset_model("deepseek-v3"))[0] == "linear_q_down_proj"
    assert possible_modules(preset_model("llama-3-8b")) == (
        *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    )
    assert "gate_proj" not in possible_modules(preset_model("gpt2"))


def test_a_map_and_a_part_of_it_are_not_named_together():
    with pytest.raises(InputError, match="linear_qkv has q_proj in it; name one of them"):
        job('target_modules = ["linear_qkv", "q_proj"]')


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("rank = 0", "rank"),
        ('base_weights = "int3"', "base_weights"),
        ("target_modules = []", "target_modules"),
        ("dropout = 1.5", "dropout"),
    ],
)
def test_bad_figures_are_input_errors_with_their_place(more, message):
    text = JOB.format(model="llama-2-70b", lora=more)
    with pytest.raises(InputError, match=message):
        parse_job(text.replace("rank = 16\n", "") if more.startswith("rank") else text)
