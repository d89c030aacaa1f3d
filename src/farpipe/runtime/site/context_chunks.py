"""Chunks of sequences that processes of a site share by Ulysses: each has some of a chunk's tokens, or of its heads.

Keys and values of split sequences stay where the heads are, so that the attention of a chunk does not know of it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from farpipe.runtime.chunk_stage import ChunkBatch
from farpipe.runtime.model.chunk_attention import ChunkAttention
from farpipe.runtime.site.context import heads_for_tokens, tokens_for_heads
from farpipe.runtime.stage import Boundary
from farpipe.runtime.stages.hugging_face import HuggingFaceSlice
from farpipe.runtime.stages.hugging_face_chunks import HuggingFaceChunkStage
from farpipe.sequences import Chunk


class ContextChunkStage(HuggingFaceChunkStage):
    """A HuggingFaceChunkStage with a part of every chunk's tokens; the other processes of `group` have the rest."""

    def __init__(
        self,
        module: HuggingFaceSlice,
        boundary: Boundary,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(module, boundary, device)
        self._group = group
        register_fsdp_forward_method(module, "hidden")

    def begin_chunks(
        self, batch: ChunkBatch, recomputed: Sequence[int] | None = None, *, keeps_attention: bool = False
    ) -> None:
        """Take the step's chunks, with all weights gathered: the head is computed apart from the layers."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.unshard()
        super().begin_chunks(batch, recomputed, keeps_attention=keeps_attention)

    def tokens_here(self, microbatch: int) -> slice:
        lengths, place = self._lengths(self.chunk(microbatch)), self._group.rank()
        begin = sum(lengths[:place])
        return slice(begin, begin + lengths[place])

    def attend(self, at: ChunkAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lengths = self._lengths(at.chunk)
        rows = (tokens_for_heads(x, self._group, lengths) for x in (query, key, value))
        return heads_for_tokens(at(*rows), self._group, lengths)

    def _lengths(self, chunk: Chunk) -> list[int]:
        """Tokens of every process, the larger parts first."""
        each, rest = divmod(chunk.num_tokens, self._group.size())
        return [each + (place < rest) for place in range(self._group.size())]
