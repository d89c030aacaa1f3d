"""Check of a model of transformers before it is trained: small stages of its very class against the small whole."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.spec.recompute import Recompute
from farpipe.engine.data.batches import Batch
from farpipe.engine.stages.balanced_stage import torch_stage
from farpipe.engine.stages.chunk_stage import ChunkStage, chunk_batch
from farpipe.engine.stages.hugging_face import INSTEAD, HuggingFaceSlice, balancing_coefficient, build, fill
from farpipe.engine.stages.slices import StageSlice, slices
from farpipe.engine.stages.stage import Boundary, TorchStage
from farpipe.planning.workload import Chunk, Slice

TOLERANCE: Final = 1e-5
"""Largest error of a gradient, relative to its largest element: 1e-14 where all is float64, 1e-7 where routers are not;
wrong splits were off by more than 1e-3."""
NUM_LAYERS: Final = 6
_SHAPE: Final = (2, 2, 16)
"""Microbatches, sequences of each, tokens of each: more than the shrunk windows of attention."""
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of how many experts a layer has."""
_SMALL: Final = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(("num_experts_per_tok", "first_k_dense_replace"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("ffn_dim", "n_inner"), 48),
    "word_embed_proj_dim": 32,
}
"""Sizes of the copy, by the names of transformers; what a config does not have or leaves out stays so."""


def shrunk(config: PreTrainedConfig, num_twins: int = 1) -> PreTrainedConfig:
    """A small copy of a config: the same class, the same kinds of layers, NUM_LAYERS of them, a width of 32.

    It has as many heads and experts as `num_twins` can share.
    """
    num_layers, data = config.num_hidden_layers, config.to_dict()
    data.pop("model_type", None)
    names = {theirs: name for name, theirs in type(config).attribute_map.items()}
    for key, value in data.items():
        name = names.get(key, key)
        if name == "num_attention_heads":
            data[key] = min(value, max(_SMALL[name], 2 * num_twins))
        elif name in EXPERTS:
            data[key] = min(value, max(_SMALL[name], num_twins))
        elif name in _SMALL and isinstance(value, int) and not isinstance(value, bool):
            data[key] = min(value, _SMALL[name])
        elif name.endswith("token_id") and value is not None:
            data[key] = 0
        elif name == "num_hidden_layers":
            data[key] = NUM_LAYERS
        elif isinstance(value, list | tuple) and len(value) == num_layers:
            data[key] = _kinds(value)
    heads = config.num_attention_heads
    if (key_heads := getattr(config, "num_key_value_heads", None)) is not None:
        small_heads = data.get("num_attention_heads", heads)
        data["num_key_value_heads"] = small_heads if key_heads == heads else max(2, num_twins)
    small = type(config)(**data)
    small._experts_implementation = "eager"  # the grouped one refuses float64
    return small


def _kinds(by_layer: Sequence[Any]) -> list[Any]:
    """NUM_LAYERS of the entries: the first ones if they show all kinds, else all kinds in turn."""
    kinds = list(dict.fromkeys(by_layer))
    if len(by_layer) >= NUM_LAYERS and set(by_layer[:NUM_LAYERS]) == set(kinds):
        return list(by_layer[:NUM_LAYERS])
    return [kinds[layer % len(kinds)] for layer in range(NUM_LAYERS)]


def check_split(config: PreTrainedConfig, recompute: Recompute = "none", *, on_chunks: bool = False) -> None:
    """Cut a shrunk copy of `config`'s model into three stages and compare loss and gradients with the whole's.

    `on_chunks`: the stages get documents in slices and packed, as with ``data.packing``. It takes less than a second.
    InputError names the model type and what differs: the class can't be trained so.
    """
    how = "on chunks (data.packing)" if on_chunks else "in stages"
    what = f"models of type {config.model_type!r} can't be trained {how}"

    def error() -> tuple[float, str]:
        whole = random_model(shrunk(config), torch.float64)
        return error_on_chunks(whole) if on_chunks else _error_in_stages(whole, recompute)

    instead = "; leave out data.packing" if on_chunks else INSTEAD
    expect_equal(f"{what}: a small one, cut into three,", error, instead)


def expect_equal(small_one: str, error: Callable[[], tuple[float, str]], instead: str = "") -> None:
    """InputError where ``error()``, the largest relative error and what it is of, raises or is above TOLERANCE.

    `small_one`, which breaks or differs, begins the message, and `instead` ends it. Random numbers begin at one seed.
    """
    try:
        with torch.random.fork_rng(devices=[]), one_thread():
            torch.manual_seed(0)
            found, where = error()
    except FarpipeError:
        raise
    except Exception as problem:  # whatever code of any model may raise
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise InputError(f"{small_one} breaks: {type(problem).__name__}: {reason}{instead}") from None
    if not found <= TOLERANCE:
        raise InputError(f"{small_one} has another {where} than the whole ({found:.2g} off){instead}")


def _error_in_stages(whole: PreTrainedModel, recompute: Recompute) -> tuple[float, str]:
    """The largest relative error of loss and gradients, and what it is of."""
    tokens = torch.randint(whole.config.vocab_size, _SHAPE)
    batch = Batch(tokens, tokens.roll(-1, -1))
    stages = make_stages(whole, batch, recompute)
    run_in_turn(stages, len(tokens))
    return worst_error(stages, whole, stages[-1].loss, reference_loss(whole, batch))


def error_on_chunks(
    whole: PreTrainedModel,
    make: Callable[[HuggingFaceSlice, Boundary], ChunkStage] = ChunkStage,
    summed: Callable[[Sequence[TorchStage]], float] = lambda stages: stages[-1].loss,
) -> tuple[float, str]:
    """The error for three documents: one in three slices, a short one packed with the last of them, one by itself.

    `make`: of a stage. `summed`: the loss, after all processes that share the stages have summed their gradients.
    """
    documents = [torch.randint(whole.config.vocab_size, (length,)) for length in (40, 5, 9)]
    slices_of_first = [Slice(0, 0, 16, 40), Slice(0, 16, 16, 40), Slice(0, 32, 8, 40)]
    packed = (slices_of_first[2], Slice(1, 0, 5, 5))
    cut = [*((one,) for one in slices_of_first[:2]), packed, (Slice(2, 0, 9, 9),)]
    batch = chunk_batch([Chunk(slices) for slices in cut], documents)
    boundary = Boundary((1, 1, whole.config.hidden_size), whole.dtype)
    stages = [make(HuggingFaceSlice(copy.deepcopy(whole), part), boundary) for part in _parts(3)]
    for number, stage in enumerate(stages):  # both kinds of recomputation
        stage.begin_chunks(batch, [1] * len(cut), keeps_attention=number % 2 == 0)
    run_in_turn(stages, len(cut))
    loss, expected = summed(stages), 0.0
    for document in documents:
        logits = whole(input_ids=document[None], use_cache=False).logits[0, :-1]
        share = functional.cross_entropy(logits, document[1:], reduction="sum") / batch.num_target_tokens
        torch.autograd.backward(share)
        expected += share.item()
    return worst_error(stages, whole, loss, expected)


def worst_error(
    stages: Sequence[TorchStage], whole: PreTrainedModel, loss: float, expected: float
) -> tuple[float, str]:
    """The largest relative error of `loss` and gradients, and what it is of."""
    found = gradients(stages, whole)
    errors = {"loss": abs(loss - expected) / expected}
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            errors[f"gradient of {name}"] = _error(found.get(name), parameter.grad)
    where = max(errors, key=lambda name: errors[name])
    return errors[where], where


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch computes on one thread: others would wait for cores longer than such sizes take."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def random_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A whole model of `config` on the CPU; its parameters are small random numbers."""
    model = build(config, dtype)
    for parameter in dict.fromkeys(model.parameters()):
        fill(parameter, torch.randn(parameter.shape, dtype=dtype) * 0.1)
    return model


def make_stages(whole: PreTrainedModel, batch: Batch, recompute: Recompute, num_stages: int = 3) -> list[TorchStage]:
    """Stages of equal numbers of layers with copies of the weights of `whole`, ready for `batch`."""
    _, size, length = batch.tokens.shape
    boundary = Boundary((size, length, whole.config.hidden_size), whole.dtype)
    copies = ((copy.deepcopy(whole), part) for part in _parts(num_stages))
    share = 1 / len(batch.tokens)
    stages = [torch_stage(HuggingFaceSlice(model, part, recompute), boundary, share=share) for model, part in copies]
    for stage in stages:
        stage.begin_step(batch)
    return stages


def _parts(num_stages: int) -> list[StageSlice]:
    cuts = [round(NUM_LAYERS * stage / num_stages) for stage in range(num_stages + 1)]
    return slices(tuple(pairwise(cuts)))


def run_in_turn(stages: Sequence[TorchStage], num_microbatches: int) -> None:
    """All forwards, then all backwards in reverse, split into I and W."""
    for microbatch in range(num_microbatches):
        x = None
        for stage in stages:
            x = stage.forward(microbatch, x)
    for microbatch in reversed(range(num_microbatches)):
        gy = None
        for stage in reversed(stages):
            gy = stage.input_grad(microbatch, gy)
            stage.weight_grad(microbatch)


def reference_loss(whole: PreTrainedModel, batch: Batch) -> float:
    """The loss of the whole model, whose gradients are left in it, by plain autograd.

    Microbatches come in reverse: a module that keeps a state from one to the next computes something else than stages.
    """
    total = 0.0
    for tokens, targets in zip(batch.tokens.flip(0), batch.targets.flip(0), strict=True):
        output = whole(input_ids=tokens, use_cache=False)
        loss = functional.cross_entropy(output.logits.flatten(0, -2), targets.flatten(), reduction="sum")
        loss = loss / batch.num_target_tokens
        if (coefficient := balancing_coefficient(whole.config)) is not None:
            loss = loss + coefficient / len(batch.tokens) * output.aux_loss
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def gradients(stages: Sequence[TorchStage], whole: PreTrainedModel) -> dict[str, Tensor]:
    """Gradients of all stages by the names in `whole`; of a tied matrix, the sum of both ends."""
    named = [(name, p.grad) for stage in stages for name, p in stage.module.named_parameters()]
    found = {name: whole_tensor(grad) for name, grad in named if grad is not None}
    head: Any = whole.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = whole.get_input_embeddings().weight
    if head.weight is tied and len(stages) > 1:
        name = next(name for name, parameter in whole.named_parameters() if parameter is tied)
        ends: list[Any] = [stages[0].module.end_weights["embedding"].grad, stages[-1].module.end_weights["head"].grad]
        ends = [whole_tensor(grad) for grad in ends if grad is not None]
        found[name] = sum(ends, torch.zeros(()))
    return found


def whole_tensor(grad: Tensor) -> Tensor:
    """All of a tensor in CPU memory; of one that is divided over processes all do so at once."""
    gather = getattr(grad, "full_tensor", None)
    whole: Tensor = grad if gather is None else gather()
    return whole.cpu()


def _error(found: Tensor | None, expected: Tensor) -> float:
    if found is None or found.shape != expected.shape:
        return float("inf")
    scale = float(expected.abs().max()) or 1.0
    return float((found - expected).abs().max()) / scale
