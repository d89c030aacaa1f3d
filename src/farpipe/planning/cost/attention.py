"""Seconds of attention's core, scores, softmax and context, by the kernel that computes them."""

from typing import Final

from farpipe.core.spec import Model, Training
from farpipe.planning.cost import flops
from farpipe.planning.cost.calibration import Calibration
from farpipe.planning.cost.layout import Layout
from farpipe.planning.cost.speed import Speed

CAUSAL_HALF: Final = 0.5
"""Flash attention skips the blocks above the diagonal (Dao 2023, arXiv 2307.08691, section 3.1)."""
SINKS_SLOWER: Final = 4.0
"""Factor on flash attention's time with learned sinks: twelve rows of GPT-OSS on Megatron-Bridge's pages of 2026 (H100
to GB300, 16 and 8 bit) ask for 3 to 7, the two of 2025 for 3 and 7."""


def attention_core_s(model: Model, training: Training, layout: Layout, speed: Speed) -> tuple[float, float]:
    """Seconds of attention's core in forward and backward.

    Flash attention computes the scores once more in the backward and never puts them into memory. Without it windows
    are masks over the whole matrix.
    """
    scores, context = flops.attention_core(
        model, layout.microbatch_size, training.sequence_length, layout.tensor, layout.context
    )
    if training.flash_attention:
        part = CAUSAL_HALF * flops.window_share(model, training.sequence_length, flops.BLOCK)
        part *= SINKS_SLOWER if model.attention_sinks else 1.0
        scores_s, context_s = (part * speed.attend_s(product, model.head_dim) for product in (scores, context))
        return scores_s + context_s, 2 * scores_s + 3 * context_s
    forward_s = speed.products_s((scores, context))
    backward_s = speed.products_s((scores, context, context, context))
    matrix = scores.count * scores.rows * scores.columns * speed.element_bytes
    there, back = _score_passes(training, speed.calibration)
    return forward_s + speed.traffic_s(there * matrix), backward_s + speed.traffic_s(back * matrix)


def _score_passes(training: Training, calibration: Calibration) -> tuple[float, float]:
    """Passes of the scores through memory in forward and backward; dropout reads and writes them once more."""
    more = 1 if training.dropout else 0
    if training.precision == "fp32":
        return calibration.eager_score_passes + more, calibration.eager_score_grad_passes + 2 * more
    return calibration.score_passes + more, 2 * (calibration.score_passes + more)
