"""Traffic of experts inside a device."""

from farpipe.cost.layout import Layout
from farpipe.cost.memory import element_bytes, is_quantized, microbatch_tokens, quantized_bytes
from farpipe.spec import Model, Training


def expert_traffic_bytes(model: Model, training: Training, layout: Layout) -> tuple[float, float]:
    """Bytes that a layer's experts move in forward and backward beside `memory.layer_traffic_bytes`; 0 without.

    Copies of tokens come from other devices by device: they are read and written once more to lie by expert, and once
    more on their way back, as their gradients are (`sort_chunks_by_idxs`, megatron/core/transformer/moe). Quantized
    grouped products have each input and each gradient written narrow, by rows and, for W, by columns (GroupedLinear of
    Transformer Engine); before a dense layer's products the norm or the nonlinearity writes that in place of wide ones.
    """
    at = model.experts
    if at is None:
        return 0.0, 0.0
    copies = microbatch_tokens(training, layout) * at.per_token / layout.tensor
    is_sorted = 1 < layout.expert < at.num_experts
    by_expert = 4 * model.hidden * element_bytes(training.precision) if is_sorted else 0
    directions = 2 if training.lora is None else 1
    narrow = directions * quantized_bytes(training.matmul) if is_quantized(training) else 0.0
    inner = at.ffn_hidden * (2 if model.gated_mlp else 1)
    there, back = (by_expert + narrow * (model.hidden + width) for width in (at.ffn_hidden, inner))
    return copies * there, copies * back
