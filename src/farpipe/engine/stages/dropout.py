"""Dropout that any order and any cut computes alike: a mask follows from seed, step, microbatch and layer alone.

Torch's own draws from one state, in the order of calls: another order of actions or another cut would be another
training, and recomputation would need the state of then. Here each call seeds a generator by what it is of. So a model
in stages has the gradients of the whole one, recomputed or not, and replicas have those of one.
"""

import hashlib
from typing import Any, Final

import torch
from torch import Tensor, nn

_SEED_BYTES: Final = 8
OF_ADAPTERS: Final = "lora_dropout"
"""What the names of peft's dropout layers have."""


class Masks:
    """The masks of a stage's microbatches. None is drawn where no gradient will be: in evaluations."""

    def __init__(self, seed: int) -> None:
        self._seed, self._step, self._first, self._microbatch = seed, 0, 0, 0

    def begin_step(self, step: int, first: int) -> None:
        """What comes is of `step`; `first` is the number of this replica's first microbatch among all of the step's."""
        self._step, self._first = step, first

    def begin(self, microbatch: int) -> None:
        """What comes is the forward of this replica's `microbatch`, or its backward, which may do that again."""
        self._microbatch = microbatch

    def dropped(self, name: str, share: float, like: Tensor) -> Tensor:
        """True for the elements of a tensor of the form of `like` that layer `name` of the model drops out."""
        words = f"{self._seed} {self._step} {self._first + self._microbatch} {name}"
        seed = int.from_bytes(hashlib.sha256(words.encode()).digest()[:_SEED_BYTES]) >> 1
        generator = torch.Generator(like.device).manual_seed(seed)
        return torch.rand(like.shape, generator=generator, device=like.device) < share


class _Dropout:
    """Forward of a dropout layer that is patched."""

    def __init__(self, masks: Masks, name: str, share: float) -> None:
        self._masks, self._name, self._share = masks, name, share

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x
        return x.masked_fill(self._masks.dropped(self._name, self._share, x), 0.0) / (1 - self._share)


def seed_dropout(module: nn.Module, seed: int, *, only: str = "") -> Masks | None:
    """Let dropout layers of a stage draw from the Masks that are returned, though it computes as in evaluation.

    `only`: a word that their names have. None where there is no such layer.
    """
    whole: nn.Module = getattr(module, "inner", module)  # whose names are those of the whole model
    layers: dict[str, Any] = {
        name: layer
        for name, layer in whole.named_modules()
        if isinstance(layer, nn.Dropout) and layer.p > 0 and only in name
    }
    if not layers:
        return None
    masks = Masks(seed)
    for name, layer in layers.items():
        layer.forward = _Dropout(masks, name, layer.p)
    return masks
