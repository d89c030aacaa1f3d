"""Tensor parallelism with sequence parallelism of transformers' models: which layer is divided how, by its own plan.

Between layers every process has its part of the tokens (``Shard(1)``), and so do the messages between stages: each
goes from a process to the one with the same number at the next stage. Attention and MLP gather the tokens, compute with
their part of the heads and of the hidden units, and scatter the sum (Megatron's sequence parallelism, arXiv
2205.05198). The names are those of the model's ``tp_plan``; its hooks are not taken: they sum gradients in every
backward, which counts those of earlier microbatches again.

A layer's experts are not divided here: their router sees this process's tokens alone, which `expert_exchange` sends to
whole experts of other processes. Dividing each expert as well would gather all tokens for a thinner product.
"""

from typing import Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from farpipe.core.errors import InputError
from farpipe.engine.stages.experts import has_grouped_experts
from farpipe.engine.stages.hugging_face import HuggingFaceSlice, PassThrough, layers_of

_TOKENS: Final = Shard(1)
"""Activations [batch, sequence, hidden] between layers."""
_STYLES: Final[dict[str, ParallelStyle]] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(output_layouts=_TOKENS, use_local_output=False),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate(), output_layouts=_TOKENS, use_local_output=False),
    "replicated_with_grad_allreduce": SequenceParallel(use_local_output=True),
}
"""Styles of torch by the words of transformers. The last are gains of norms over single heads, of which each process
has its own: a norm gives the same for parts along any dimension before its last."""
_DIVIDED: Final = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def divide(module: HuggingFaceSlice, mesh: DeviceMesh) -> None:
    """Divide the layers of `module` over the one dimension of `mesh`, in place.

    What it takes and gives is [batch, sequence / size of `mesh`, hidden] afterwards. Parameters may be on the meta
    device; others must be equal on all processes, which keep their parts. Weight gradients are put off (`defer`)
    before or afterwards. InputError where transformers has no such plan or heads don't divide.
    """
    model, part = module.inner, module.part
    name, layers = layers_of(model)
    plan = _plan(model, f"{name}.*.")
    _expect_divisible(model.config, mesh.size())
    for layer in layers:
        if not isinstance(layer, PassThrough):
            _divide_layer(layer, plan, mesh)
    is_tied = part.has_embedding and bool(module.shared_names)
    if part.has_embedding:
        table = model.get_input_embeddings()
        _apply(table, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=_TOKENS, use_local_output=False))
    if part.has_head:
        _divide_end(model, name, mesh)
        if is_tied:
            model.tie_weights()
    _keep_local_boundaries(module, mesh)


def expect_all_divided(module: nn.Module) -> None:
    """InputError where `divide` left a parameter out: a run would not know whose gradient counts in the norm.

    Gains of norms over all heads at once (olmo2) are such: every process computes them, and their gradients, whole.
    """
    left = [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        name = type(getattr(module, "inner", module)).__name__
        raise InputError(
            f"layout.tensor: {name} can't be divided over tensor-parallel processes: nothing is known of {left[0]}; "
            "say layout.tensor = 1"
        )


def _plan(model: Any, prefix: str) -> dict[str, ParallelStyle]:
    """Styles by the names of a layer's modules; InputError where transformers has none or others."""
    every: dict[str, str] = model.config.base_model_tp_plan or {}
    words = {key: word for key, word in every.items() if "experts" not in key.split(".")}
    unknown = sorted({word for key, word in words.items() if word not in _STYLES or not key.startswith(prefix)})
    reason = f"its plan has {', '.join(unknown)}" if unknown else ""
    if len(words) < len(every) and not any("attn" in key for key in words):
        reason = "its plan divides no attention"
    if not every:
        reason = "transformers has no plan for it"
    if reason:
        raise InputError(
            f"layout.tensor: {type(model).__name__} can't be divided over tensor-parallel processes: {reason}; say "
            "layout.tensor = 1, and share its weights over replicas (training.zero)"
        )
    return {key.removeprefix(prefix): _STYLES[word] for key, word in words.items()}


def _expect_divisible(config: Any, size: int) -> None:
    for key in _DIVIDED:
        value = getattr(config, key, None)
        if isinstance(value, int) and value % size:
            raise InputError(f"layout.tensor = {size}: {key} = {value} of the model does not divide by it")


def _divide_layer(layer: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh) -> None:
    modules = dict(layer.named_modules())
    here = {path: module for path, module in modules.items() if path in plan}
    routed = {path.rpartition(".")[0] for path, module in modules.items() if has_grouped_experts(module)}
    blocks = {path.rpartition(".")[0] for path in here}
    for path, module in here.items():
        _apply(module, mesh, plan[path])
    for path in blocks:
        if _is_inside(path, routed):
            _apply_around(modules[path], mesh, is_local=True)
        modules[path].register_forward_pre_hook(_gather, with_kwargs=True)
    for path in routed:
        _apply_around(modules[path], mesh, is_local=False)
    for path, module in modules.items():
        has_none = next(module.parameters(recurse=False), None) is None
        if has_none or has_grouped_experts(module) or _is_inside(path, blocks):
            continue
        _apply(module, mesh, _OwnTokens() if _is_inside(path, routed) else SequenceParallel())


def _is_inside(path: str, blocks: set[str]) -> bool:
    return any(path == block or path.startswith(f"{block}.") for block in blocks)


def _apply_around(block: nn.Module, mesh: DeviceMesh, *, is_local: bool) -> None:
    """Give `block` this process's tokens: as a plain tensor, or as a DTensor where its surroundings are local."""
    given = PrepareModuleInput(input_layouts=_TOKENS, desired_input_layouts=_TOKENS, use_local_output=not is_local)
    taken = PrepareModuleOutput(output_layouts=_TOKENS, desired_output_layouts=_TOKENS, use_local_output=is_local)
    for style in (given, taken):
        _apply(block, mesh, style)


class _OwnTokens(ParallelStyle):
    """Style of a router, which computes plain tensors of this process's tokens, as transformers wrote it.

    Its parameters are replicated, and their gradients partial sums, as those of norms are; `settle` adds them up.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            whole = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
        swap = _LocalParameters()
        module.register_forward_pre_hook(swap.before)
        module.register_forward_hook(swap.after, always_call=True)  # recomputation may leave by an exception
        return module


class _LocalParameters:
    """Hooks between which parameters of a module are plain tensors, whose gradients are partial."""

    def __init__(self) -> None:
        self._own: dict[str, Any] = {}

    def before(self, module: nn.Module, inputs: Any) -> None:
        self._own = {name: own for name, own in module._parameters.items() if isinstance(own, DTensor)}
        local: dict[str, Any] = {name: own.to_local(grad_placements=[Partial()]) for name, own in self._own.items()}
        module._parameters.update(local)

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        module._parameters.update(self._own)


def _divide_end(model: Any, layers: str, mesh: DeviceMesh) -> None:
    """Divide what comes behind the layers: the last norm by tokens, the head by words, whose logits are gathered."""
    children = dict(model.base_model.named_children())
    behind = [children[name] for name in [*children][[*children].index(layers) + 1 :]]
    for module in behind:
        if next(module.parameters(), None) is not None:
            _apply(module, mesh, SequenceParallel())
    _apply(model.get_output_embeddings(), mesh, ColwiseParallel(input_layouts=_TOKENS, output_layouts=Replicate()))


def _apply(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    parallelize_module(module, mesh, style, src_data_rank=None)


def _gather(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """All tokens for a block that divides heads or hidden units: once for all of its layers."""
    return tuple(map(_all_tokens, inputs)), {key: _all_tokens(value) for key, value in options.items()}


def _all_tokens(value: Any) -> Any:
    return value.redistribute(placements=[Replicate()]) if isinstance(value, DTensor) else value


def _keep_local_boundaries(module: HuggingFaceSlice, mesh: DeviceMesh) -> None:
    """Let the stage take and give plain tensors: this process's part of the tokens."""
    if not module.part.has_embedding:
        parallelize_module(module, mesh, PrepareModuleInput(input_layouts=_TOKENS, desired_input_layouts=_TOKENS))
    if not module.part.has_head:
        parallelize_module(module, mesh, PrepareModuleOutput(output_layouts=_TOKENS, desired_output_layouts=_TOKENS))
