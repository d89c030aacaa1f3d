"""Chunks of sequences that processes of a site share by Ulysses: each has some of a chunk's tokens, or of its heads.

Keys and values of split sequences stay where the heads are, so that the attention of a chunk does not know of it. All
processes share all chunks, or each chunk has a group of its own: then all have the same chunks in the same order, and
each leaves out those that others share.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from farpipe.engine.site.context import heads_for_tokens, parts, tokens_for_heads
from farpipe.engine.stages.chunk_attention import ChunkAttention
from farpipe.engine.stages.chunk_stage import ChunkBatch, WholeChunks
from farpipe.engine.stages.hugging_face import HuggingFaceSlice
from farpipe.planning.workload import Chunk

Groups = Mapping[tuple[int, int], dist.ProcessGroup | None]
"""(first process, number of processes) -> the group of these neighbours; None for one process alone."""


class SharedChunks(WholeChunks):
    """A part of every chunk's tokens; the other processes of its group have the rest."""

    def __init__(self, module: HuggingFaceSlice, group: dist.ProcessGroup, groups: Groups | None = None) -> None:
        """`group`: all processes of the stage. `groups`: those that may share chunks where not all do."""
        self._module, self._process, self._all = module, group.rank(), (0, group.size())
        self._groups = groups or {self._all: group}
        self._sharing: dict[Chunk, tuple[int, int]] = {}
        register_fsdp_forward_method(module, "hidden")

    def begin(self, batch: ChunkBatch) -> None:
        """Take the step's chunks, with all weights gathered: the head is computed apart from the layers."""
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                part.unshard()
        self._sharing = dict(zip(batch.chunks, batch.groups or [self._all] * len(batch.chunks), strict=True))

    def tokens(self, chunk: Chunk) -> slice:
        lengths, place = self._lengths(chunk), self._process - self._sharing[chunk][0]
        begin = sum(lengths[:place])
        return slice(begin, begin + lengths[place])

    def attend(self, at: ChunkAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = self._groups[self._sharing[at.chunk]]
        if group is None:
            return at(query, key, value)
        lengths, key_heads = self._lengths(at.chunk), parts(key.shape[1], group.size())
        heads = [number * (query.shape[1] // key.shape[1]) for number in key_heads]
        pairs = (query, heads), (key, key_heads), (value, key_heads)
        rows = (tokens_for_heads(x, group, lengths, numbers) for x, numbers in pairs)
        return heads_for_tokens(at(*rows), group, lengths, heads)

    def _lengths(self, chunk: Chunk) -> list[int]:
        """Tokens of every process of the chunk's group."""
        return parts(chunk.num_tokens, self._sharing[chunk][1])

    @contextmanager
    def acting(self, microbatch: int, chunk: Chunk) -> Iterator[bool]:
        """Context whose collectives name the chunk and those that share it when they break."""
        first, degree = self._sharing[chunk]
        try:
            yield first <= self._process < first + degree
        except RuntimeError as error:
            if "gloo" not in str(error) and "NCCL" not in str(error):
                raise
            whom = f"processes {first} to {first + degree - 1} of the stage share chunk {microbatch}"
            documents = ", ".join(str(part.sequence) for part in chunk.slices)
            broken = f"{str(error).splitlines()[0]}: {whom} (documents {documents} of the step)"
            raise RuntimeError(broken) from error
