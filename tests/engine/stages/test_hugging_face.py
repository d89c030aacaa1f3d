"""Models of transformers in stages: loss and gradients of the whole, in every order, recomputed or not."""

import weakref
from copy import deepcopy
from functools import cache, partial

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from expert_models import MODELS
from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.spec import Training
from farpipe.engine.data.batches import Batch
from farpipe.engine.executor.executor import Executor, stage_ranks
from farpipe.engine.executor.optimizer import Optimizer
from farpipe.engine.stages.hugging_face import HuggingFaceSlice, build, fill
from farpipe.engine.stages.hugging_face_weights import config_of_model
from farpipe.engine.stages.router_bias import ROUTER_BIAS, train_router_biases
from farpipe.engine.stages.self_check import (
    NUM_LAYERS,
    check_split,
    gradients,
    make_stages,
    one_thread,
    random_model,
    reference_loss,
    shrunk,
)
from farpipe.engine.stages.slices import StageSlice
from farpipe.planning.planner.engine import UNCUT
from in_process import run_ranks
from small_models import placed_problem, relative_error
from strategies import schedules

BY_NUMBER = {f"{kind} by numbers": model for kind, model in MODELS.items()}
EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
NAMES = ("llama", "qwen3", "gemma3_text", *EXPERTS, *BY_NUMBER, "gpt2", "olmo2", "phi")
BALANCED = {name: {"output_router_logits": True, "router_aux_loss_coef": 0.5} for name in EXPERTS[:-1]}
"""A balancing loss that weighs as much as the other, for all that transformers gives one."""
BIASED = Training(sequence_length=12, global_batch=8, moe_router_bias_update_rate=0.001)
FLAT, VEE, ROUND = (0, 1), (0, 1, 1, 0), (0, 1, 0, 1)
ORDERS = {"1f1b": FLAT, "zb-h1": FLAT, "zb-2p": FLAT, "wave": VEE, "interleaved": ROUND}
MODES = ("none", "full", "selective", "mlp", "core_attn mlp", "layernorm", "layernorm mlp")
REFUSED = {"gpt_oss": ("selective", "core_attn mlp")}
"""Modes that need another kind of attention than a model has."""
NUM_MICROBATCHES = 4


@cache
def whole_and_loss(name):
    """A small model of a type, its gradients in it, the batch that they are of, and the loss."""
    torch.manual_seed(0)
    config = (
        config_of_model(BY_NUMBER[name]) if name in BY_NUMBER else AutoConfig.for_model(name, **BALANCED.get(name, {}))
    )
    whole = random_model(shrunk(config), torch.float64)
    tokens = torch.randint(64, (NUM_MICROBATCHES, 2, 12))
    batch = Batch(tokens, tokens.roll(-1, -1))
    return whole, batch, reference_loss(whole, batch)


def assert_equals_whole(name, schedule, recompute):
    ranks = stage_ranks(schedule)
    with one_thread():
        whole, batch, expected = whole_and_loss(name)
        stages = make_stages(whole, batch, recompute, len(ranks))

        def work(peers):
            mine = {stage: stages[stage] for stage, rank in enumerate(ranks) if rank == peers.rank}
            Executor(schedule, mine, peers).run(0)

        run_ranks(len(schedule.ranks), work)
    summed_in_float32 = 1e-7 if name in BALANCED else 0.0
    assert abs(stages[-1].loss - expected) <= max(1e-10, summed_in_float32) * expected
    found = gradients(stages, whole)
    for parameter, reference in whole.named_parameters():
        if reference.grad is not None:
            assert relative_error(found[parameter], reference.grad) <= 1e-10, parameter
    assert all(stage.store.num_bytes == 0 for stage in stages)


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", [*ORDERS])
@pytest.mark.parametrize("name", NAMES)
def test_stages_have_the_gradients_of_the_whole_in_every_order(name, method, recompute):
    assert_equals_whole(name, order(method, placed_problem(ORDERS[method], NUM_MICROBATCHES)), recompute)


@pytest.mark.slow
@settings(max_examples=len(NAMES), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_valid_order_gives_the_gradients_of_the_whole(data):
    problem = placed_problem(data.draw(st.sampled_from([FLAT, VEE, ROUND, (0, 1, 0)])), NUM_MICROBATCHES)
    recompute = data.draw(st.sampled_from(MODES))
    name, schedule = data.draw(st.sampled_from(NAMES)), data.draw(schedules(problem))
    assume(recompute not in REFUSED.get(name, ()))
    assert_equals_whole(name, schedule, recompute)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recompute"), [(name, mode) for name, modes in REFUSED.items() for mode in modes])
def test_what_a_model_can_not_recompute_by_itself_is_refused(name, recompute):
    whole, batch, _ = whole_and_loss(name)
    with pytest.raises(InputError, match=r"kind 'eager', which can't be recomputed by itself; use 'full' or 'none'"):
        make_stages(whole, batch, recompute, 2)


def test_parameters_have_no_memory_until_they_are_filled_and_buffers_have_values():
    config = shrunk(AutoConfig.for_model("gemma3_text"))
    model = build(config, torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(not buffer.is_meta for buffer in model.buffers())
    assert not model.training, "no dropout: a backward may come any time"


def test_a_slice_has_its_own_parameters_only_by_the_whole_models_names():
    model = build(shrunk(AutoConfig.for_model("llama")), torch.float32)
    module = HuggingFaceSlice(model, StageSlice(2, 4, False, False))
    names = {name for name, _ in module.named_parameters()}
    assert {name.split(".")[2] for name in names} == {"2", "3"}
    assert "model.layers.2.self_attn.q_proj.weight" in names


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "gemma2",
        "mistral",
        "phi3",
        "gpt_neox",
        "starcoder2",
        "glm4_moe",
        "qwen3_next",
        "smollm3",
    ],
)
def test_further_classes_split_right(name):
    check_split(AutoConfig.for_model(name))


def test_a_model_of_few_layers_is_checked_with_as_many_as_others():
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    assert shrunk(config).layer_types == ["full_attention"] * NUM_LAYERS
    check_split(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("opt", "OPTForCausalLM: can't be cut into stages: expected one list of 6 layers right under its base model"),
        ("bloom", "models of type 'bloom' can't be trained in stages: a small one, cut into three, breaks"),
        ("falcon", "models of type 'falcon' can't be trained in stages: a small one, cut into three, breaks"),
    ],
)
def test_classes_that_do_not_split_are_refused(name, message):
    with pytest.raises(InputError, match=rf"{message}.*; use a class that can, or \[model\] module = "):
        check_split(AutoConfig.for_model(name))
    assert name in UNCUT


def test_a_split_that_computes_something_else_is_refused(monkeypatch):
    monkeypatch.setattr(HuggingFaceSlice, "forward", _slightly_off(HuggingFaceSlice.forward))
    with pytest.raises(InputError, match=r"cut into three, has another .* than the whole"):
        check_split(AutoConfig.for_model("llama"))


def _slightly_off(forward):
    return lambda self, x, **options: forward(self, x, **options) * 1.001


def test_a_layer_that_keeps_a_state_between_microbatches_is_refused(monkeypatch):
    forward = LlamaMLP.forward

    def counting(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return forward(self, x) * (1 + 0.1 * self.calls)

    monkeypatch.setattr(LlamaMLP, "forward", counting)
    with pytest.raises(InputError, match=r"cut into three, has another .* than the whole"):
        check_split(AutoConfig.for_model("llama"))


def test_what_can_t_be_recomputed_by_itself_is_refused():
    with pytest.raises(InputError, match="'moe_act' can't be recomputed by itself in a model of transformers; use"):
        check_split(AutoConfig.for_model("mixtral"), "moe_act")
    with pytest.raises(InputError, match="attention of Gemma2ForCausalLM is of kind 'eager'"):
        check_split(AutoConfig.for_model("gemma2"), "selective")


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "olmo2", "phi", "gpt2", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("recompute", ["layernorm", "layernorm mlp"])
def test_norms_are_computed_again_as_in_the_whole(name, recompute):
    """Also where a norm comes behind its part, or before several."""
    assert_equals_whole(name, order("zb-h1", placed_problem(FLAT, NUM_MICROBATCHES)), recompute)


@pytest.mark.parametrize(("recompute", "num_kept"), [("none", 2), ("layernorm", 0), ("layernorm mlp", 0)])
def test_results_of_norms_are_not_kept_where_they_are_computed_again(recompute, num_kept):
    whole, batch, _ = whole_and_loss("llama")
    stage, *_ = make_stages(whole, batch, recompute, 2)
    norms = [stage.module.blocks[1].input_layernorm, stage.module.blocks[1].post_attention_layernorm]
    results = []
    for norm in norms:
        norm.register_forward_hook(lambda module, inputs, y: results.append(weakref.ref(y)))
    stage.forward(0, None)
    assert len([y for y in results if y() is not None]) == num_kept


def test_encoders_are_refused():
    with pytest.raises(InputError, match="transformers has no causal language model of type 'vit'"):
        check_split(AutoConfig.for_model("vit"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "olmo2", "qwen3_moe", "phi3"])
def test_documents_in_slices_and_packed_have_the_gradients_of_whole_ones(name):
    check_split(AutoConfig.for_model(name), on_chunks=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma3_text", "data.packing: attention with sliding_window can't be trained on chunks"),
        ("deepseek_v3", "attention with heads of unlike widths"),
        ("gpt2", "more than one input by position can't be trained on chunks; leave data.packing out"),
        (
            "qwen3_next",
            r"can't be trained on chunks \(data\.packing\): a small one, cut into three, has another gradient",
        ),
    ],
)
def test_attention_that_chunks_would_compute_wrongly_is_refused(name, message):
    with pytest.raises(InputError, match=message):
        check_split(AutoConfig.for_model(name), on_chunks=True)


@pytest.mark.parametrize("name", EXPERTS)
def test_weight_gradients_of_experts_wait_for_w(name):
    torch.manual_seed(0)
    whole = random_model(shrunk(AutoConfig.for_model(name)), torch.float32)
    tokens = torch.randint(64, (1, 2, 12))
    (stage,) = make_stages(whole, Batch(tokens, tokens.roll(-1, -1)), "none", 1)
    stage.forward(0, None)
    stage.input_grad(0, None)
    experts = [p for n, p in stage.module.named_parameters() if ".experts." in n and p.ndim == 3]
    assert experts
    assert all(parameter.grad is None for parameter in experts)
    stage.weight_grad(0)
    assert all(parameter.grad is not None for parameter in experts)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("method", [*ORDERS])
def test_biases_of_routers_are_updated_by_the_choices_of_the_whole_model(method, recompute):
    whole, batch, _ = whole_and_loss("deepseek_v3")
    routers = {n: m for n, m in whole.named_modules() if hasattr(m, ROUTER_BIAS)}
    counts = {n: torch.zeros(router.num_experts, dtype=torch.int64) for n, router in routers.items()}
    listeners = [m.register_forward_hook(partial(_count, counts[n])) for n, m in routers.items()]
    for tokens in batch.tokens:
        whole(input_ids=tokens, use_cache=False)
    for listener in listeners:
        listener.remove()
    schedule = order(method, placed_problem(ORDERS[method], NUM_MICROBATCHES))
    ranks = stage_ranks(schedule)
    biased = deepcopy(whole)
    train_router_biases(biased)
    for parameter in [p for p in biased.parameters() if p.is_meta]:
        fill(parameter, torch.zeros(parameter.shape))
    stages = make_stages(biased, batch, recompute, len(ranks))

    def work(peers):
        Executor(schedule, {s: stages[s] for s, rank in enumerate(ranks) if rank == peers.rank}, peers).run(0)

    run_ranks(len(schedule.ranks), work)
    found = gradients(stages, biased)
    assert len(counts) == NUM_LAYERS - 2
    for name, count in counts.items():
        above = len(count) * count - count.sum()
        assert above.any()
        assert found[f"{name}.{ROUTER_BIAS}"].tolist() == above.tolist()
        bias = torch.nn.Parameter(torch.zeros(len(count)))
        bias.grad = found[f"{name}.{ROUTER_BIAS}"].float()
        optimizer = Optimizer([bias], BIASED, router_biases=[bias])
        assert optimizer.sum_of_squares().total == 0
        optimizer.update(0.0)
        assert bias.tolist() == (0.001 * torch.sign(count.float().mean() - count)).tolist()


def _count(counts, router, inputs, output):
    counts += torch.bincount(output[2].flatten(), minlength=len(counts))


def test_biases_of_routers_that_have_none_are_refused():
    with pytest.raises(InputError, match="moe_router_bias_update_rate: routers of MixtralForCausalLM have no"):
        HuggingFaceSlice(
            build(shrunk(AutoConfig.for_model("mixtral")), torch.float32),
            StageSlice(0, 6, True, True),
            trains_router_biases=True,
        )
