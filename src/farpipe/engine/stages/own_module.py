"""Stages out of a function of the user's: ``[model] module = "package.module:function"``."""

import hashlib
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from farpipe.core.errors import InputError, fault_in
from farpipe.core.spec.recompute import Recompute
from farpipe.engine.stages.recomputed import Again
from farpipe.engine.stages.slices import ModuleSlice, SliceModule, StageSlice

_ONE_AT_A_TIME: Final = threading.Lock()
"""Torch's random numbers are those of the whole process."""
_TOLERANCE: Final = 1e-3
"""Difference between two outputs for one input, of the largest: kernels of GPUs may add in another order."""


def own_module(name: str, part: StageSlice, seed: int, recompute: Recompute = "none") -> ModuleSlice:
    """The module that the function called `name` builds for a slice, computing as in evaluation.

    Torch's random numbers depend on `seed` and the slice's first layer. With `recompute` ``full`` each of its
    ``layers`` is computed again in the backward. InputError names the function and what is wrong with it.
    """
    build = _function(name)
    digest = hashlib.sha256(f"{seed} {part.first_layer}".encode()).digest()
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8]))
        try:
            module = build(part)
        except (Exception, SystemExit) as problem:  # whatever code of the user may raise
            raise InputError(f"model.module: {name}({part}) raises {fault_in(problem)}") from problem
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise InputError(f"model.module: {name} returns {kind}, not a torch.nn.Module; let it return the slice's")
    if recompute == "full":
        _recompute_layers(name, module)
    return ModuleSlice(module.eval(), part)


def check_outputs(name: str, module: SliceModule, shape: tuple[int, ...], vocab_size: int) -> None:
    """InputError unless `module` gives a tensor of the right shape, and the same one for a microbatch seen before.

    `shape`: [microbatch size, tokens, width] between stages. An order may bring microbatches in any turn, and
    recomputation twice.
    """
    what = f"model.module: the module of {name}"
    try:
        first, again = _outputs(module, shape, vocab_size)
    except (Exception, SystemExit) as problem:  # whatever code of the user may raise
        reason = fault_in(problem)
        raise InputError(f"{what} breaks in its forward ({reason}); each layer takes and gives one tensor") from problem
    if not isinstance(first, Tensor):
        raise InputError(f"{what} gives {type(first).__name__}, not a tensor; let it return the hidden states alone")
    key, width = ("vocab_size", vocab_size) if module.part.has_head else ("hidden", shape[-1])
    if first.shape != (*shape[:-1], width):
        expected = f"{[*shape[:-1], width]}: sequences, tokens, model.{key}"
        raise InputError(f"{what} gives {list(first.shape)}, not {expected}")
    if not (first - again).abs().max() <= _TOLERANCE * first.abs().max():
        raise InputError(
            f"{what} keeps a state between microbatches or draws random numbers, as dropout does: the first one gives "
            "another output after the second; let outputs depend on inputs and parameters only"
        )


@torch.no_grad()
def _outputs(module: SliceModule, shape: tuple[int, ...], vocab_size: int) -> tuple[Any, Any]:
    """Outputs for a microbatch before and after another one."""
    numbers, like = torch.Generator(), next(module.parameters(), torch.empty(0))

    def output(seed: int) -> Any:
        numbers.manual_seed(seed)
        if module.part.has_embedding:
            return module(torch.randint(vocab_size, shape[:-1], generator=numbers).to(like.device))
        return module(torch.randn(shape, generator=numbers).to(like.device, like.dtype))

    first, _, again = (output(seed) for seed in (0, 1, 0))
    return first, again


def digests_of_files(name: str) -> dict[str, str]:
    """SHA-256 of the source of the function called `name`: of its package's files so far imported, by module.

    Of a module outside packages, of those that lie beside it; of an installed one, its own alone.
    """
    place = name.partition(":")[0]
    root, own = place.partition(".")[0], Path(getattr(import_module(place), "__file__", None) or "")
    is_package = hasattr(sys.modules[root], "__path__")
    found: dict[str, str] = {}
    for module, content in sorted(sys.modules.items()):
        file = Path(getattr(content, "__file__", None) or "")
        is_beside = file.parent == own.parent and not {"site-packages", "dist-packages"} & {*own.parts}
        mine = module.partition(".")[0] == root if is_package else module == place or is_beside
        if mine and file.suffix == ".py" and file.is_file():
            found[module] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return found


def _function(name: str) -> Callable[[StageSlice], Any]:
    place, _, function = name.partition(":")
    try:
        found = getattr(import_module(place), function)
    except (ImportError, AttributeError, ValueError) as problem:
        hint = "expected package.module:function, which every rank can import"
        raise InputError(f"model.module: {name}: {problem}; {hint}") from None
    except (Exception, SystemExit) as problem:  # whatever code of the user may raise
        raise InputError(f"model.module: {place} can't be imported: {fault_in(problem)}") from problem
    if not callable(found):
        raise InputError(f"model.module: {name} is no function")
    build: Callable[[StageSlice], Any] = found
    return build


def _recompute_layers(name: str, module: nn.Module) -> None:
    layers = getattr(module, "layers", None)
    if not isinstance(layers, nn.ModuleList | nn.ModuleDict):
        raise InputError(
            f"training.recompute = 'full': the module of {name} needs its layers as `layers`, a ModuleList or "
            "ModuleDict; or say 'none'"
        )
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        layer.forward = Again(layer)
