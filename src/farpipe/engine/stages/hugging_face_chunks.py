"""Chunks of sequences through models of transformers: attention is farpipe's, all else the model's own code."""

from typing import Any, Final

from torch import Tensor, nn

from farpipe.core.errors import InputError
from farpipe.engine.stages.chunk_attention import ChunkPass

ATTENTION: Final = "farpipe_chunks"
"""Name of the attention of chunks in transformers' registry."""


class LayerOnChunk:
    """Forward of a layer, which may be computed again in the backward."""

    def __init__(self, number: int, layer: nn.Module) -> None:
        self._number, self._forward = number, layer.forward

    def __call__(self, x: Tensor, *rest: Any, farpipe_chunk: ChunkPass, **options: Any) -> Any:
        if rest:
            what = "layers that take more than one input by position"
            raise InputError(f"data.packing: {what} can't be trained on chunks; leave data.packing out")
        return farpipe_chunk.run(self._number, self._forward, x, options | {"farpipe_chunk": farpipe_chunk})


def chunk_attention(
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
