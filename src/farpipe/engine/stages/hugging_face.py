"""Causal language models of transformers, cut into stages: the model's own code computes, less what others have.

A stage has the whole model's modules, with pass-throughs in the places of what other stages compute, so that numbers
of layers and kinds of attention by layer stay right. Rotary tables and masks are made anew from the positions; between
stages nothing travels but hidden states.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.output_capturing import OutputRecorder

from farpipe.core.errors import InputError
from farpipe.core.spec.recompute import Recompute, operations_of
from farpipe.engine.stages.balancing import Balancing
from farpipe.engine.stages.chunk_attention import ChunkPass
from farpipe.engine.stages.hugging_face_chunks import ATTENTION, LayerOnChunk, chunk_attention
from farpipe.engine.stages.recomputed import Again, again, recompute_norms
from farpipe.engine.stages.router_bias import train_router_biases
from farpipe.engine.stages.slices import ModuleSlice, StageSlice

RECOMPUTED: Final = ("core_attn", "layernorm", "mlp", "moe")
"""Operations of a layer that can be recomputed by themselves in any model of transformers."""
INSTEAD: Final = '; use a class that can, or [model] module = "package.module:function" with stages of your own'
"""Advice where a class of transformers can't be cut into stages."""
_RECOMPUTED_ATTENTION: Final = "farpipe_recomputed"
_ONE_AT_A_TIME: Final = threading.Lock()
"""Models are built under patches of torch and transformers, which hold for all threads."""
_MLP_NAMES: Final = ("mlp", "feed_forward", "block_sparse_moe")


def build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal LM of `config` whose parameters have no memory yet; InputError where transformers has none.

    It computes as in evaluation: without dropout, so that a microbatch's backward may come any time.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"model_type: transformers has no causal language model of type {config.model_type!r}")
    with _ONE_AT_A_TIME, empty_parameters():
        kind: Any = _get_model_class(config, MODEL_FOR_CAUSAL_LM_MAPPING)  # type: ignore[no-untyped-call]
        model: PreTrainedModel = kind._from_config(config, dtype=dtype).eval()
    return model


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Context in which parameters that this thread makes go to the meta device, while buffers are made as usual."""
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        is_here = threading.get_ident() == thread
        if is_here and parameter is not None and not parameter.is_meta:  # a tied one is registered twice
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", register_empty):
        yield


def fill(parameter: nn.Parameter, values: Tensor) -> None:
    """Give an empty parameter its values, in all modules that have it, tied ones too."""
    filled = nn.Parameter(values, parameter.requires_grad)
    torch.utils.swap_tensors(parameter, filled)  # type: ignore[no-untyped-call]


class PassThrough(nn.Module):
    """Placeholder for a module that another stage has."""

    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        """Its first input."""
        return x


class NoPositions(nn.Module):
    """Placeholder for a learned table of positions, which the first stage has added."""

    def forward(self, *rest: Any, **options: Any) -> Tensor:
        """A zero without dimensions, which changes neither shape nor dtype of what it is added to."""
        return torch.zeros(())


class HuggingFaceSlice(ModuleSlice):
    """A slice of a causal LM of transformers: tokens or activations in, activations or logits out."""

    inner: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        part: StageSlice,
        recompute: Recompute = "none",
        *,
        trains_router_biases: bool = False,
    ) -> None:
        """Cut `model` to `part`, in place; InputError if it has no list of layers to cut."""
        if trains_router_biases:
            train_router_biases(model)
        self._shared_names = _tied_names(model)
        self._balancing = None
        super().__init__(_cut(model, part), part)
        self._balancing = _balancing(model)
        _recompute(model, part, recompute)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """[b, s] or [b, s, hidden] -> [b, s, hidden] or [b, s, vocab]; `options` go to the model."""
        if not self.part.has_head:
            return self.hidden(x, **options)
        logits: Tensor = self.inner(**self._given(x), use_cache=False, **options).logits
        return logits

    def hidden(self, x: Tensor, **options: Any) -> Tensor:
        """[b, s] or [b, s, hidden] -> [b, s, hidden], without the head."""
        y: Tensor = self.inner.base_model(**self._given(x), use_cache=False, **options).last_hidden_state
        return y

    def prepare_chunks(self) -> None:
        """Put farpipe's attention of chunks in place of the model's."""
        AttentionInterface.register(ATTENTION, chunk_attention)
        self.inner.set_attn_implementation(ATTENTION)
        for number, layer in enumerate(self.blocks, self.part.first_layer):
            layer.forward = LayerOnChunk(number, layer)

    def on_chunk(self, x: Tensor, chunk: ChunkPass) -> Tensor:
        """[1, tokens] or [1, tokens, hidden] -> [1, tokens, hidden]."""
        return self.hidden(x, position_ids=chunk.positions[None], attention_mask=None, farpipe_chunk=chunk)

    def logits(self, x: Tensor) -> Tensor:
        """[b, s, hidden] -> [b, s, vocab]."""
        logits: Tensor = self.inner.get_output_embeddings()(x)  # type: ignore[no-untyped-call]
        return logits

    def _given(self, x: Tensor) -> dict[str, Tensor]:
        return {"input_ids" if self.part.has_embedding else "inputs_embeds": x}

    @property
    def blocks(self) -> list[nn.Module]:
        """Layers of this slice."""
        return list(layers_of(self.inner)[1])[self.part.first_layer : self.part.end_layer]

    @property
    def balancing(self) -> Balancing | None:
        """transformers' ``load_balancing_loss_func``, where the model's config asks for it."""
        return self._balancing

    @property
    def shared_names(self) -> dict[str, str]:
        """The name of the embedding's matrix by that of the head's, where they are one."""
        return self._shared_names

    @property
    def end_weights(self) -> dict[str, nn.Parameter]:
        """The matrices of embedding and head that this slice has."""
        embedding = self.inner.get_input_embeddings() if self.part.has_embedding else None
        head: Any = self.inner.get_output_embeddings() if self.part.has_head else None  # type: ignore[no-untyped-call]
        found = {"embedding": embedding, "head": head}
        return {name: end.weight for name, end in found.items() if end is not None}


def balancing_coefficient(config: PreTrainedConfig) -> float | None:
    """What the balancing loss is multiplied by; None where ``output_router_logits`` is off or the class has no loss."""
    coefficient: float | None = getattr(config, "router_aux_loss_coef", None)
    return coefficient if getattr(config, "output_router_logits", False) else None


def _balancing(model: PreTrainedModel) -> Balancing | None:
    """The balancing loss of a model that is cut; its own, which would know of one stage only, is turned off."""
    config = model.config
    if (coefficient := balancing_coefficient(config)) is None:
        return None
    recorder: Any = (model._can_record_outputs or {}).get("router_logits")
    if not isinstance(recorder, OutputRecorder):
        raise InputError(
            f"{type(model).__name__}: config.json asks for the loss that balances experts (output_router_logits), but "
            "transformers does not say where its routers are; say output_router_logits = false"
        )
    config.output_router_logits = False
    routers = {module: recorder.index for module in model.modules() if isinstance(module, recorder.target_class)}
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next(int(getattr(config, name)) for name in names if hasattr(config, name))
    return Balancing(routers, num_experts, config.num_experts_per_tok, coefficient)


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    names = {(id(module), name): f"{prefix}.{name}" for prefix, module in model.named_modules() for name in ("weight",)}
    return {names[id(head), "weight"]: names[id(table), "weight"]} if head.weight is table.weight else {}


def layers_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of a model's layers; InputError if it has not one such list right under its base model."""
    base, count = model.base_model, model.config.get_text_config().num_hidden_layers
    found = [(n, m) for n, m in base.named_children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if base is model or len(found) != 1:
        raise InputError(
            f"{type(model).__name__}: can't be cut into stages: expected one list of {count} layers right under its "
            f"base model, found {len(found)}{INSTEAD}"
        )
    return found[0]


def _cut(model: PreTrainedModel, part: StageSlice) -> PreTrainedModel:
    base: nn.Module = model.base_model
    name, layers = layers_of(model)
    for index in range(len(layers)):
        if not part.first_layer <= index < part.end_layer:
            layers[index] = PassThrough()
    children = list(base.named_children())
    place, embedding = [child for child, _ in children].index(name), model.get_input_embeddings()
    for index, (child_name, child) in enumerate(children):
        if index < place and not part.has_embedding and isinstance(child, nn.Embedding | nn.Dropout):
            is_positions = isinstance(child, nn.Embedding) and child is not embedding
            setattr(base, child_name, NoPositions() if is_positions else PassThrough())
        elif index > place and not part.has_head and "rotary" not in child_name:
            setattr(base, child_name, PassThrough())
    if not part.has_head:
        model.set_output_embeddings(PassThrough())  # type: ignore[no-untyped-call]
    return model


def _recompute(model: PreTrainedModel, part: StageSlice, recompute: Recompute) -> None:
    """Let the layers of `part` compute again in the backward what `recompute` names; InputError for what can't."""
    operations = operations_of(recompute)
    if unknown := [operation for operation in operations if operation not in RECOMPUTED]:
        raise InputError(
            f"training.recompute: {unknown[0]!r} can't be recomputed by itself in a model of transformers; "
            f"use 'full' or some of {', '.join(RECOMPUTED)}"
        )
    own = list(layers_of(model)[1])[part.first_layer : part.end_layer]
    if recompute == "full":
        _wrap(own)
    if {"mlp", "moe"} & {*operations}:
        _wrap([child for layer in own for name, child in layer.named_children() if name in _MLP_NAMES])
    for layer in own if "layernorm" in operations else ():
        recompute_norms(layer)
    if "core_attn" in operations:
        if (kind := model.config._attn_implementation) != "sdpa":
            raise InputError(
                f"training.recompute: attention of {type(model).__name__} is of kind {kind!r}, which can't be "
                "recomputed by itself; use 'full' or 'none'"
            )
        AttentionInterface.register(_RECOMPUTED_ATTENTION, _recomputed_attention)
        AttentionMaskInterface.register(_RECOMPUTED_ATTENTION, sdpa_mask)
        model.set_attn_implementation(_RECOMPUTED_ATTENTION)


def _wrap(modules: list[nn.Module]) -> None:
    for module in modules:
        module.forward = Again(module)


def _recomputed_attention(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, None]:
    """Scaled dot-product attention of transformers, computed again in the backward."""
    y: Tensor = again(lambda *tensors: sdpa_attention_forward(module, *tensors, **options)[0], *inputs)
    return y, None
