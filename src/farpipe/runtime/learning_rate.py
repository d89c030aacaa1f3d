"""The learning rate of every step: a linear warm-up, then constant or half a cosine down to a floor."""

import math

from farpipe.spec import Training


def learning_rate(training: Training, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of a run of `num_steps` steps.

    Warm-up rises in equal parts, so that the first step learns something and step ``warmup_steps`` has the full rate.
    The cosine is that of SGDR (Loshchilov and Hutter, arXiv 1608.03983) without restarts.
    """
    peak, floor, warmup = training.learning_rate, training.final_learning_rate, training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if training.decay == "none":
        return peak
    end = training.decay_steps or num_steps
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
