"""Operations that a layer computes again: bytes by closed forms, and the laws that every set of them keeps."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_jobs import A100, gpt, layout, llama, site, training
from farpipe.core.errors import InputError
from farpipe.core.spec import Model, operations_of, parse_job, possible_operations, preset_model
from farpipe.core.spec.recompute import OPERATIONS, spelled
from farpipe.planning.cost import compute, memory
from farpipe.planning.cost.calibration import calibration_of
from farpipe.planning.cost.exchange import residual_collective_s
from farpipe.planning.cost.speed import Speed
from farpipe.planning.planner.engine import training_obstacles
from job_files import LATENT_EXPERTS

EXPERTS = Model.model_validate(tomllib.loads(f"num_layers = 4\n{LATENT_EXPERTS}"))
LAW = calibration_of(site().device)
SBH, SCORES = 2048 * 4 * 4096, 5 * 32 * 2048 * 2048 * 4
"""Of the closed forms: s b h, and 5 a s^2 b."""


def kept(recompute, tensor=1, model=None, **how):
    """Bytes that a layer of a GPT of hidden 4096 with 32 heads keeps for 4 x 2048 tokens, with dropout."""
    asked = training(2048, **({"dropout": True, "flash_attention": False, "recompute": recompute} | how))
    return memory.layer_activation_bytes(
        model or gpt(hidden=4096, num_heads=32), asked, layout(1, tensor=tensor, microbatch_size=4)
    )


def test_a_dense_layer_among_those_with_experts_computes_none_of_them_again():
    assert EXPERTS.experts is not None
    with_dense = EXPERTS.experts.model_copy(update={"num_dense_layers": 1})
    (_, mixed), (_, dense) = EXPERTS.model_copy(update={"experts": with_dense}).kinds()
    modes = [training(recompute=mode) for mode in ("moe", "none")]
    sizes, times = ([], [])
    for kind in (mixed, dense):
        again, kept = (memory.kept_bytes(kind, asked, layout()) for asked in modes)
        sizes.append(again < kept)
        assert again <= kept
        slow, fast = (compute.layer_times(kind, a, layout(), site(), LAW).input_grad_s for a in modes)
        times.append(slow > fast)
    assert sizes == times == [True, False]


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ("none", 34 * SBH + SCORES),
        ("selective", 34 * SBH),
        ("layernorm", 30 * SBH + SCORES),
        ("mlp", 18 * SBH + SCORES),
        ("core_attn layernorm mlp", 14 * SBH),
        ("full", 2 * SBH),
    ],
)
def test_a_gpt_layer_keeps_what_the_terms_of_korthikanti_say(recompute, expected):
    """arXiv 2205.05198, section 4.1: 11 of attention (inputs 2, queries and keys 4, values 2, context 2, mask 1), 19 of
    the MLP (input 2, nonlinearity's 8, its result 8, mask 1) and 4 of the norms; what is recomputed goes."""
    assert kept(recompute) == expected


@pytest.mark.parametrize("tensor", [2, 8])
def test_tensor_parallel_devices_free_all_of_the_norms_unless_they_divide_the_sequence(tensor):
    assert kept("none", tensor) - kept("layernorm", tensor) == 4 * SBH
    assert kept("none", tensor) - kept("mlp", tensor) == 16 * SBH / tensor
    parallel = [kept(mode, tensor, sequence_parallel=True) for mode in ("none", "layernorm")]
    assert parallel[0] - parallel[1] == 4 * SBH / tensor


SETS = st.sets(st.sampled_from(OPERATIONS))


def of_model(operations, model):
    return {o for o in operations if o in possible_operations(model)}


def seconds(recompute, model, tensor, **how):
    asked = training(recompute=recompute, **how)
    return compute.layer_times(model, asked, layout(tensor=tensor), site(), calibration_of(site().device)).input_grad_s


@given(some=SETS, more=SETS, tensor=st.sampled_from([1, 4]), flash=st.booleans(), experts=st.booleans())
def test_more_operations_free_more_and_take_longer_and_full_is_the_end_of_both(some, more, tensor, flash, experts):
    model = EXPERTS if experts else gpt(hidden=4096, num_heads=32)
    how = {"flash_attention": flash, "kernels": "eager"}
    less, both = (spelled(of_model(chosen, model)) for chosen in (some, some | more))
    bytes_of = [kept(mode, tensor, model, **how) for mode in ("none", less, both, "full")]
    assert bytes_of == sorted(bytes_of, reverse=True)
    times = [seconds(mode, model, tensor, **how) for mode in ("none", less, both, "full")]
    assert times == pytest.approx(sorted(times), rel=1e-12)


@given(operations=SETS, experts=st.booleans())
def test_what_is_freed_is_what_the_backward_works_with(operations, experts):
    model = EXPERTS if experts else gpt(hidden=4096, num_heads=32)
    mode = spelled(of_model(operations, model))
    asked = training(recompute=mode, flash_attention=False)
    working = memory.working_bytes(model, asked, layout(tensor=2))
    whole = memory.layer_activation_bytes(model, training(recompute="none", flash_attention=False), layout(tensor=2))
    assert memory.layer_activation_bytes(model, asked, layout(tensor=2)) + working == pytest.approx(whole, rel=1e-12)


@given(SETS)
def test_a_set_has_one_spelling(operations):
    mode = spelled(operations)
    assert spelled(operations_of(mode)) == mode
    words = " ".join(sorted(operations, reverse=True)) or "none"
    assert training(recompute=words).recompute == mode
    assert "moe" not in operations_of(mode) or not {"moe_act", "shared_experts"} & set(operations_of(mode))


def test_the_words_of_attention_are_one():
    assert training(recompute="core_attn").recompute == "selective"
    assert training(recompute="selective mlp").recompute == "core_attn mlp"
    assert possible_operations(gpt()) == ("core_attn", "layernorm", "mlp")
    assert possible_operations(EXPERTS) == tuple(o for o in OPERATIONS if o != "mlp")


@pytest.mark.parametrize("operation", ["moe", "moe_act", "shared_experts"])
def test_dense_layers_of_a_model_with_experts_recompute_nothing_of_experts(operation):
    """DeepSeek-V3's first three layers are dense: planning it with all to choose from ended in an assertion."""
    dense = next(kind for _, kind in preset_model("deepseek-v3").kinds() if kind.experts is None)
    at = layout(1, tensor=2, microbatch_size=1)
    plain, again = (training(2048, recompute=each) for each in ("none", operation))
    assert memory.layer_activation_bytes(dense, again, at) == memory.layer_activation_bytes(dense, plain, at)
    times = (compute.layer_times(dense, each, at, site("a", 8), calibration_of(A100)) for each in (plain, again))
    assert next(times) == next(times)


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("model", [gpt(hidden=4096, num_heads=32), llama(hidden=4096, num_heads=32, ffn_hidden=14336)])
def test_every_second_product_is_between_nothing_and_the_whole_layer(model, tensor):
    how = {"flash_attention": True, "dropout": False, "framework": "pytorch"}
    assert kept("full", tensor, model, **how) < kept("op", tensor, model, **how) < kept("none", tensor, model, **how)
    sizes = {"flash_attention": True, "framework": "pytorch"}
    none, by_op, full = (seconds(mode, model, tensor, **sizes) for mode in ("none", "op", "full"))
    assert none < by_op < full


def test_every_second_product_of_llama_is_the_keys_attention_s_output_and_the_mlp_s_second():
    """8,192 tokens of Llama 3 8B: 2 T h (k + h + f) FLOPs, against 2 T h (2 h + 2 k + 3 f) of a forward's maps; in 8
    bit too, where TorchAO's three tables show the memory of 16 bit."""
    model, at = preset_model("llama-3-8b"), layout(microbatch_size=1)
    wide, narrow = training(8192), training(8192, matmul="fp8")
    found = [sum(one.flops for one in compute._every_second(model, asked, at)) for asked in (wide, narrow)]
    assert found == [2 * 8192 * 4096 * (1024 + 4096 + 14336)] * 2


def test_every_second_product_is_planned_alone_and_not_for_experts():
    with pytest.raises(ValueError, match="'op layernorm'"):
        training(recompute="op layernorm")
    assert 'training.recompute = "op"' in training_obstacles(
        training(recompute="op"), shares_weights=True, has_router_bias=False, is_own_module=False
    )
    with pytest.raises(InputError, match="the layers of mixtral-8x7b have no op"):
        parse_job(in_job("mixtral-8x7b"))
    assert parse_job(in_job("llama-3-8b")).training.recompute == "op"


def in_job(model):
    return (
        f'[model]\npreset = "{model}"\n[training]\nsequence_length = 512\nglobal_batch = 8\nrecompute = "op"\n'
        '[[cluster.sites]]\nname = "a"\nnum_devices = 8\ndevice = { preset = "h100" }\n'
    )


@pytest.mark.parametrize("tensor", [1, 4])
def test_pytorch_does_not_compute_a_layer_s_last_product_again(tensor):
    """Of 4 h f FLOPs a token the half, and half of the sum of what it makes."""
    model, at = gpt(hidden=4096, num_heads=32), layout(tensor=tensor)
    found = [seconds("full", model, tensor, framework=name) for name in ("megatron", "pytorch")]
    none = [seconds("none", model, tensor, framework=name) for name in ("megatron", "pytorch")]
    asked = training(framework="pytorch")
    speed = Speed.of(site().device, LAW, asked.precision)
    last = speed.product_s(compute.linear_products(model, asked, at)[-1])
    sent = residual_collective_s(model, asked, at, site(), LAW) / 2
    assert (found[0] - none[0]) - (found[1] - none[1]) == pytest.approx(last + sent)
