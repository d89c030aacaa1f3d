"""Mixtures of experts and latent attention, counted to the last parameter."""

import pytest

from farpipe import planning
from farpipe.core.catalog import model_row
from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.spec import Model, parse_job, preset_model
from farpipe.core.spec.hugging_face import model_fields
from job_files import added

MIXTRAL = """
[model]
preset = "mixtral-8x7b"
[training]
sequence_length = 4096
global_batch = 64
[[cluster.sites]]
name = "a"
device = "h100"
num_devices = 16
[layout]
{pins}
"""


@pytest.mark.parametrize(
    ("name", "num_params", "active"),
    [
        ("mixtral-8x7b", 46_702_792_704, 12.9e9),
        ("mixtral-8x22b", 140_620_634_112, 39.1e9),
        ("qwen3-30b-a3b", 30_532_122_624, 3.35e9),
        ("qwen3-235b-a22b", 235_093_634_560, 22.2e9),
        ("deepseek-v3", 671_026_419_200, 37.6e9),
        ("gpt-oss-120b", 116_829_156_672, 5.71e9),
        ("gpt-oss-20b", 20_914_757_184, 4.19e9),
    ],
)
def test_published_mixtures_are_counted_exactly(name, num_params, active):
    model = preset_model(name)
    assert model.num_params == model_row(name).published_params == num_params
    assert model.num_active_params == pytest.approx(active, rel=0.01)


def test_a_dense_model_is_active_as_a_whole():
    model = preset_model("llama-3-8b")
    assert model.num_active_params == model.num_params


def test_more_experts_per_token_than_there_are_is_an_error_that_names_the_place():
    table = "experts = { num_experts = 4, per_token = 5, ffn_hidden = 64 }"
    with pytest.raises(InputError, match=r"model.experts.per_token: 5 of 4 experts"):
        parse_job(added("model", table))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("num_groups = 3", r"num_groups: 4 experts are not divided evenly by 3"),
        ("num_groups = 2, group_topk = 3", r"group_topk: 3 of 2 groups"),
        ("num_groups = 4", r"group_topk: 1 of 4 groups, 1 experts for a token"),
    ],
)
def test_groups_that_can_not_have_a_token_s_experts_are_an_error_that_names_the_place(groups, message):
    table = f"experts = {{ num_experts = 4, per_token = 2, ffn_hidden = 64, {groups} }}"
    with pytest.raises(InputError, match="model.experts." + message):
        parse_job(added("model", table))


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ("expert = 3", "layout.expert: 3 does not divide the 8 experts of mixtral-8x7b; 1, 2, 4, 8 would"),
        ("expert = 8\ndata = 4", "layout.expert: 8 does not divide the 4 devices .* 1, 2, 4 would"),
        ("expert = 6\ndata = 4", "layout.expert: 6 does not divide the 8 experts"),
    ],
)
def test_a_degree_that_divides_nothing_is_an_error_that_names_those_that_would(pins, message):
    with pytest.raises(InputError, match=message):
        parse_job(MIXTRAL.format(pins=pins))


def test_a_degree_that_no_rank_can_share_says_which_and_what_would():
    job = parse_job(MIXTRAL.format(pins="expert = 8\ntensor = 2\npipeline = 4"))
    message = r"layout.expert: 8 does not divide the devices \(data x context x tensor\) .* 4 at most; 1, 2, 4 would"
    with pytest.raises(InfeasibleError, match=message):
        planning.plan(job)


def test_experts_of_a_dense_model_are_an_input_error():
    with pytest.raises(InputError, match=r"layout.expert: llama-3-8b has no experts; leave it out"):
        parse_job(MIXTRAL.replace("mixtral-8x7b", "llama-3-8b").format(pins="expert = 2"))


@pytest.mark.slow
def test_a_pinned_degree_may_fold_experts_over_tensor_parallel_devices():
    plan = planning.plan(parse_job(MIXTRAL.format(pins="expert = 8\ndata = 4\ntensor = 2")))
    assert (plan.layout.expert, plan.layout.expert_tensor, plan.layout.data, plan.layout.tensor) == (8, 1, 4, 2)


def test_a_job_with_experts_survives_its_file():
    job = parse_job(added("model", "experts = { num_experts = 4, per_token = 2, ffn_hidden = 64 }"))
    assert parse_job(job.model_copy(update={"text": ""}).to_toml()).model == job.model
    assert isinstance(job.model, Model)


CONFIGS = {
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151936, "attention_bias": False, "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "topk_method": "noaux_tc", "moe_layer_freq": 1, "vocab_size": 129280, "tie_word_embeddings": False,
        "n_group": 8, "topk_group": 4,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0}, "quantization_config": {"quant_method": "fp8"},
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4, "vocab_size": 201088, "attention_bias": True, "sliding_window": 128,
        "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
    },
}  # fmt: skip


LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_attention_heads": 16,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "topk_method": "greedy", "moe_layer_freq": 1, "vocab_size": 102400, "tie_word_embeddings": False,
}  # fmt: skip
KIMI = CONFIGS["deepseek-v3"] | {
    "model_type": "kimi_k2", "n_routed_experts": 384, "first_k_dense_replace": 1, "num_attention_heads": 64,
    "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 64, "vocab_size": 163840,
}  # fmt: skip


@pytest.mark.parametrize(("config", "num_params"), [(LITE, 15_706_484_224), (KIMI, 1_026_408_232_448)])
def test_other_models_with_deepseek_s_layers_have_the_published_number_of_parameters(config, num_params):
    assert Model.model_validate(model_fields(config)).num_params == num_params
    bare = {key: value for key, value in config.items() if key != "topk_method"}  # as transformers' own classes have it
    assert Model.model_validate(model_fields(bare)).num_params == num_params


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_hugging_face_have_the_published_number_of_parameters(name):
    model = Model.model_validate(model_fields(CONFIGS[name]))
    assert model.num_params == model_row(name).published_params
    assert model.num_active_params == preset_model(name).num_active_params
    assert model.windowed_share == preset_model(name).windowed_share == (0.5 if name == "gpt-oss-120b" else 0)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mixtral-8x7b", {"num_local_experts": None}, "num_experts: missing"),
        ("qwen3-30b-a3b", {"mlp_only_layers": 0}, "mlp_only_layers: expected a list of layers, found 0"),
        ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank: missing"),
        ("gpt-oss-120b", {"num_experts_per_tok": None}, "num_experts_per_tok: missing"),
    ],
)
def test_a_config_that_lacks_something_is_an_error_that_names_it(name, change, message):
    with pytest.raises(InputError, match=message):
        model_fields(CONFIGS[name] | change)
