"""A stage on the processes of a site that share every sequence and every layer."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from farpipe.core.errors import InputError
from farpipe.engine.site.context import DividedTokens, SharedSequences
from farpipe.engine.site.context_chunks import Groups, SharedChunks
from farpipe.engine.site.mesh import CONTEXT, TENSOR
from farpipe.engine.stages.balanced_stage import torch_stage
from farpipe.engine.stages.chunk_stage import ChunkStage
from farpipe.engine.stages.hugging_face import HuggingFaceSlice
from farpipe.engine.stages.stage import Boundary, TorchStage


def twin_stage(
    module: HuggingFaceSlice, boundary: Boundary, twins: DeviceMesh, device: torch.device | str = "cpu", *, share: float
) -> TorchStage:
    """The stage of this process, one of a mesh ``(CONTEXT, TENSOR)``; `boundary` is of whole sequences, `share` as of
    BalancedStage.

    Activations are ``1 / twins.size()`` of them: the tokens are divided over CONTEXT, each part again over TENSOR, as
    the layers of `module` are already.
    """
    size, length, *rest = boundary.shape
    own = Boundary((size, length // twins.size(), *rest), boundary.dtype)
    groups = [twins[name].get_group() for name in (CONTEXT, TENSOR) if twins[name].size() > 1]
    if (context := twins[CONTEXT]).size() == 1:
        return torch_stage(module, own, device, DividedTokens(groups), share=share)
    num_tokens, place = length // context.size(), context.get_local_rank()
    part = slice(place * num_tokens, (place + 1) * num_tokens)
    shared = SharedSequences(module, context.get_group(), part, device, groups)
    return torch_stage(module, own, device, shared, share=share)


def twin_chunk_stage(
    module: HuggingFaceSlice,
    boundary: Boundary,
    twins: DeviceMesh,
    device: torch.device | str = "cpu",
    groups: Groups | None = None,
) -> ChunkStage:
    """The same for a stage whose microbatches are chunks; InputError where layers are divided as well.

    `groups`: those in which processes may share chunks, where not all share all.
    """
    if twins[TENSOR].size() > 1:
        raise InputError("data.packing: layers can't be divided, only chunks; say layout.tensor = 1")
    return ChunkStage(module, boundary, device, SharedChunks(module, twins[CONTEXT].get_group(), groups))
