import gc
import weakref

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from farpipe.core.errors import InputError
from farpipe.core.spec import Model
from farpipe.engine.stages.decoder import Decoder, Numerics, compute_dtype, initialise, rotate
from farpipe.engine.stages.recomputed import discarding
from farpipe.engine.stages.slices import StageSlice, slices
from small_models import (
    GPT,
    LLAMA,
    MICROBATCH_SIZE,
    SEED,
    SEQUENCE_LENGTH,
    TIED,
    even_partition,
    make_batch,
    whole_model,
)

QWEN = LLAMA.model_copy(update={"qkv_bias": True})


@pytest.mark.parametrize("model", [LLAMA, TIED, GPT, QWEN], ids=["llama", "tied", "gpt", "qwen"])
def test_the_module_has_as_many_parameters_as_the_spec_says(model):
    module = whole_model(model, torch.float32)
    assert sum(parameter.numel() for parameter in module.parameters()) == model.num_params


@pytest.mark.parametrize("model", [LLAMA, TIED, GPT], ids=["llama", "tied", "gpt"])
def test_every_partition_starts_with_the_same_weights(model):
    whole = dict(whole_model(model, torch.float32).named_parameters())
    seen = set()
    for num_stages in (2, 3):
        for part in slices(even_partition(model, num_stages)):
            module = Decoder(model, part, SEQUENCE_LENGTH)
            initialise(module, 7)
            for name, parameter in module.named_parameters():
                tied = model.tied_embeddings and name == "head.weight"
                assert torch.equal(parameter, whole["embedding.weight" if tied else name]), name
                seen.add(name)
    assert whole.keys() <= seen


def test_stages_one_after_the_other_are_the_whole_model():
    batch = make_batch(LLAMA, 1)
    x = batch.tokens[0]
    for part in slices(((0, 1), (1, 1), (1, 6), (6, 8))):
        module = Decoder(LLAMA, part, SEQUENCE_LENGTH, Numerics(torch.float64, torch.float64))
        initialise(module, 7)
        x = module(x)
    torch.testing.assert_close(x, whole_model(LLAMA, torch.float64)(batch.tokens[0]), rtol=0, atol=1e-15)


def test_other_seeds_give_other_weights():
    modules = [Decoder(LLAMA, StageSlice(0, 1, False, False), SEQUENCE_LENGTH) for _ in range(2)]
    for seed, module in enumerate(modules):
        initialise(module, seed)
    first, second = (dict(module.named_parameters()) for module in modules)
    assert not torch.equal(first["layers.0.mlp.up.weight"], second["layers.0.mlp.up.weight"])
    assert not torch.equal(first["layers.0.mlp.up.weight"], first["layers.0.mlp.gate.weight"])


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_no_position_sees_a_later_one(model):
    module = whole_model(model, torch.float64)
    tokens = make_batch(model, 1).tokens[0]
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % model.vocab_size
    before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_rotary_attention_depends_on_distance_only():
    module = whole_model(LLAMA, torch.float64)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 1, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    turned = [[rotate(x, module.rotary[:, p : p + 1]) for p in range(6)] for x in (query, key)]
    score = lambda q, k: float((turned[0][q] * turned[1][k]).sum())  # noqa: E731
    assert score(5, 3) == pytest.approx(score(3, 1), abs=1e-12)
    assert score(5, 3) != pytest.approx(score(5, 1), abs=1e-3)


def test_fewer_key_heads_serve_groups_of_queries():
    """Grouped heads equal full heads whose keys and values are repeated."""
    full = LLAMA.model_copy(update={"num_kv_heads": LLAMA.num_heads})
    part = StageSlice(0, 1, False, False)
    modules = [Decoder(m, part, 6, Numerics(torch.float64, torch.float64)) for m in (LLAMA, full)]
    for module in modules:
        initialise(module, 7)
    state = modules[0].state_dict()
    for name in ("key", "value"):
        weight = state[f"layers.0.attention.{name}.weight"].view(2, 4, 16)
        state[f"layers.0.attention.{name}.weight"] = weight.repeat_interleave(2, 0).reshape(16, 16)
    modules[1].load_state_dict(state)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    torch.testing.assert_close(modules[0](x), modules[1](x))


def test_more_tokens_than_learned_positions_are_refused():
    with pytest.raises(InputError, match=r"sequence_length: 9 tokens, .* has 8 rows"):
        Decoder(GPT, StageSlice(0, 1, True, False), 9)


def test_precisions_that_train():
    assert compute_dtype("bf16") == torch.bfloat16
    with pytest.raises(InputError, match="use one of fp32, bf16"):
        compute_dtype("fp16")


def test_heads_wider_than_the_hidden_share():
    model = Model(num_layers=1, hidden=12, num_heads=2, head_dim=8, ffn_hidden=8, vocab_size=16)
    assert whole_model(model, torch.float32)(torch.zeros(1, 6, dtype=torch.int64)).shape == (1, 6, 16)


LONG = 64
"""So many tokens that scores are most of what attention makes."""


def kept_bytes(model, recompute, dtype=torch.float64):
    """Bytes that autograd keeps of a forward of two layers, besides parameters and the inputs of recomputation."""
    numerics = Numerics(dtype, dtype, recompute)
    module = Decoder(model, StageSlice(0, 2, False, False), LONG, numerics)
    initialise(module, SEED)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive, or its place would be used again
        return tensor

    x = torch.randn(MICROBATCH_SIZE, LONG, model.hidden, dtype=dtype, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, sdpa_kernel(SDPBackend.MATH):
        module(x)
    return sum(size for size, _ in kept.values())


def test_recomputing_attention_keeps_no_scores_and_recomputing_all_keeps_next_to_nothing():
    scores = 2 * MICROBATCH_SIZE * LLAMA.num_heads * LONG**2 * 8
    inputs = 2 * MICROBATCH_SIZE * LONG * (LLAMA.attention_hidden + 2 * LLAMA.kv_hidden) * 8
    none, selective, full = (kept_bytes(LLAMA, recompute) for recompute in ("none", "selective", "full"))
    assert selective + inputs <= none - 0.9 * scores, "nearly all of two layers' softmax"
    assert full + 2 * MICROBATCH_SIZE * LONG * LLAMA.hidden * 8 < (selective + inputs) / 4


def test_a_result_is_made_again_once_for_all_that_use_it():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    made = []

    def work(values):
        made.append(values.exp())
        return made.pop() if torch.is_grad_enabled() else made[-1]

    with discarding(work, x) as y:
        loss = sum((y @ weight).square().sum() for weight in weights)
    del y
    found = torch.autograd.grad(loss, [x, *weights])
    assert len(made) == 1
    plain = sum((x.exp() @ weight).square().sum() for weight in weights)
    for one, other in zip(found, torch.autograd.grad(plain, [x, *weights]), strict=True):
        torch.testing.assert_close(one, other)


def test_a_norm_s_result_is_not_kept_by_the_maps_that_read_it():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    norm = torch.nn.LayerNorm(4, dtype=torch.float64)
    with discarding(norm, x) as y:
        gone, kept = weakref.ref(y), y @ weight
    del y
    gc.collect()
    assert gone() is None
    kept.sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(weight.grad, (norm(x).T @ torch.ones(3, 4, dtype=torch.float64)))
