"""The outer optimizer of local steps: one step of Nesterov's momentum on the mean of the sites' differences.

All of it works element by element, in a fixed order, without fused operations: so every site computes the same bits,
in whatever parts its processes have the parameters.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from farpipe.core.errors import InputError
from farpipe.core.spec import LocalSteps


def mean_of(differences: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of the sites' differences, added in the order of the sites; `weights`: tokens behind each."""
    total = sum(weights)
    mean = differences[0] * (weights[0] / total)
    for one, weight in zip(differences[1:], weights[1:], strict=True):
        mean += one * (weight / total)
    return mean


@torch.no_grad()
def outer_update(anchor: Tensor, momentum: Tensor, mean: Tensor, settings: LocalSteps) -> None:
    """Move `anchor`, the weights that all sites had in common, and `momentum`, in place.

    `mean`: anchor minus weights, the direction of a gradient. As torch.optim.SGD with `nesterov` (OpenDiLoCo's, arXiv
    2407.07852).
    """
    momentum.mul_(settings.momentum).add_(mean)
    anchor.sub_((momentum * settings.momentum + mean) * settings.learning_rate)


@torch.no_grad()
def merge(weights: Tensor, anchor: Tensor, settings: LocalSteps) -> None:
    """Give a site's `weights`, in place, the values that all have in common, but a share of what they were."""
    kept = weights * settings.keep_local
    weights.copy_(kept + anchor * (1 - settings.keep_local) if settings.keep_local else anchor)


def fragments_of(sizes: Mapping[str, int], count: int) -> list[tuple[str, ...]]:
    """Names of the parameters in each fragment: runs of about equal size.

    `sizes`: elements of every parameter of the whole model, in its order. InputError where parameters are too few.
    """
    if count > len(sizes):
        raise InputError(
            f"training.local_steps.fragments: {count} is more than the {len(sizes)} parameters of the model"
        )
    names, ends = [*sizes], [0]
    for size in sizes.values():
        ends.append(ends[-1] + size)
    cuts = [0]
    for number in range(1, count):
        last = len(names) - (count - number)  # a name at least for each of the rest
        candidates = range(cuts[-1] + 1, last + 1)
        cuts.append(min(candidates, key=lambda cut: abs(ends[cut] - ends[-1] * number / count)))
    return [tuple(names[a:b]) for a, b in zip(cuts, [*cuts[1:], len(names)], strict=True)]
