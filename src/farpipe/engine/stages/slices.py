"""Slices of a model, one per stage: which layers, and what every stage asks of the module that computes them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class StageSlice:
    """Layers ``first_layer <= i < end_layer`` with the embedding before and the head behind them, or not."""

    first_layer: int
    end_layer: int
    has_embedding: bool
    has_head: bool


def slices(partition: tuple[tuple[int, int], ...]) -> list[StageSlice]:
    """One slice per stage: the embedding goes with the first, the head with the last."""
    last = len(partition) - 1
    return [StageSlice(first, end, stage == 0, stage == last) for stage, (first, end) in enumerate(partition)]


class SliceModule(Protocol):
    """Module of one stage. Its parameters have the names of the whole model, whatever the slice."""

    part: StageSlice

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens or activations -> activations or logits."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, each once."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters with their names."""

    @property
    def end_weights(self) -> dict[str, nn.Parameter]:
        """``embedding`` and ``head``: matrices that a model may tie, as far as the slice has them."""

    @property
    def shared_names(self) -> dict[str, str]:
        """The name of the embedding's matrix by that of the head's, where the whole model ties them."""

    casts_weights: bool
    """True if it computes in another dtype than that of its weights; False if they must have the one it computes in."""

    def forget_casts(self) -> None:
        """The parameters have changed."""


class Again:
    """Forward of a module of which only the inputs are kept: its backward does it once more."""

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return again(self._forward, *inputs, **options)


def again(work: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """``work(*inputs, **options)``, of which only the inputs are kept: its backward does it once more."""
    return checkpoint(work, *inputs, use_reentrant=False, preserve_rng_state=False, **options)
