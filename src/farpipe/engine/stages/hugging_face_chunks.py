"""Chunks of sequences through models of transformers: attention is farpipe's, all else the model's own code."""

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from farpipe.core.errors import InputError
from farpipe.engine.stages.chunk_attention import ChunkAttention, Held, KeptResults
from farpipe.engine.stages.chunk_stage import ChunkStage
from farpipe.engine.stages.hugging_face import HuggingFaceSlice, layers_of
from farpipe.engine.stages.slices import again
from farpipe.engine.stages.stage import Boundary

ATTENTION: Final = "farpipe_chunks"
"""Name of the attention of chunks in transformers' registry."""


class ChunkPass:
    """One chunk on its way through the layers of a stage."""

    def __init__(self, stage: "HuggingFaceChunkStage", microbatch: int) -> None:
        self._stage, self._microbatch = stage, microbatch
        self._results: dict[int, KeptResults | None] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[1, heads, tokens, head_dim] each -> the same, in layer number `layer` of the model."""
        at = ChunkAttention(
            self._stage.keys_and_values,
            str(layer),
            self._stage.chunk(self._microbatch),
            query.shape[1] > key.shape[1],
            self._is_again(layer),
            self._results.get(layer),
        )
        return self._stage.attend(at, query, key, value)

    def run(self, layer: int, forward: Any, x: Tensor, options: dict[str, Any]) -> Any:
        """The output of a layer, which is computed again in the backward where the plan says so."""
        if not self._is_again(layer):
            return forward(x, **options)
        self._stage.count(self._microbatch, x)
        self._results[layer] = self._stage.results_to_keep()
        return again(forward, x, **options)

    def _is_again(self, layer: int) -> bool:
        return layer - self._stage.module.part.first_layer < self._stage.num_again(self._microbatch)


class HuggingFaceChunkStage(ChunkStage):
    """A ChunkStage whose slice is computed by transformers' code."""

    module: HuggingFaceSlice  # type: ignore[assignment]

    def __init__(self, module: HuggingFaceSlice, boundary: Boundary, device: torch.device | str = "cpu") -> None:
        AttentionInterface.register(ATTENTION, _attention)
        module.inner.set_attn_implementation(ATTENTION)
        part = module.part
        for number, layer in list(enumerate(layers_of(module.inner)[1]))[part.first_layer : part.end_layer]:
            layer.forward = _LayerOnChunk(number, layer)
        super().__init__(module, boundary, device)

    def _compute(self, microbatch: int, x: Tensor) -> Tensor:
        parts = self.chunk(microbatch).slices
        positions = torch.cat([torch.arange(part.start, part.end, device=x.device) for part in parts])
        own = positions[None, self.tokens_here(microbatch)]
        return self.module.hidden(x, position_ids=own, attention_mask=None, farpipe_chunk=ChunkPass(self, microbatch))

    def attend(self, at: ChunkAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[1, heads, tokens here, head_dim] each -> the same."""
        return at(query, key, value)

    def _logits(self, y: Tensor) -> Tensor:
        logits: Tensor = self.module.inner.get_output_embeddings()(y)  # type: ignore[no-untyped-call]
        return logits

    def count(self, microbatch: int, tensor: Tensor) -> None:
        """Count a tensor that is kept until the backward of a microbatch and that autograd does not see."""
        self._counted[microbatch].append(Held(self.held, tensor))


class _LayerOnChunk:
    """Forward of a layer, which may be computed again in the backward."""

    def __init__(self, number: int, layer: nn.Module) -> None:
        self._number, self._forward = number, layer.forward

    def __call__(self, x: Tensor, *rest: Any, farpipe_chunk: ChunkPass, **options: Any) -> Any:
        if rest:
            what = "layers that take more than one input by position"
            raise InputError(f"data.packing: {what} can't be trained on chunks; leave data.packing out")
        return farpipe_chunk.run(self._number, self._forward, x, options | {"farpipe_chunk": farpipe_chunk})


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    farpipe_chunk: ChunkPass | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a chunk in the form of transformers' registry; InputError for what it would compute wrongly."""
    unlike = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    unlike += ["sliding_window"] if sliding_window is not None else []
    if farpipe_chunk is None or unlike or value.shape[-1] != query.shape[-1]:
        what = ", ".join(unlike) or "heads of unlike widths, or layers that do not pass on their options"
        raise InputError(f"data.packing: attention with {what} can't be trained on chunks; leave data.packing out")
    usual = query.shape[-1] ** -0.5
    query = query if scaling is None else query * (scaling / usual)
    layer: Any = module.layer_idx
    return farpipe_chunk.attend(layer, query, key, value).transpose(1, 2), None
