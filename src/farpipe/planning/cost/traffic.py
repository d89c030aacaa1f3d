"""Traffic inside a device beside what a layer keeps: of experts, and of operations that no library fuses."""

from collections.abc import Iterable
from typing import Final

from farpipe.core.spec import Model, Training
from farpipe.planning.cost.flops import Product
from farpipe.planning.cost.layout import Layout
from farpipe.planning.cost.memory import element_bytes, is_quantized, microbatch_tokens, quantized_bytes

ROTARY_PASSES: Final = (12, 14)
"""Times that queries and keys cross memory in forward and backward where YaRN's factor on them, which Transformer
Engine's kernel lacks, has PyTorch's operations turn them one by one (rope_utils.py of Megatron-Core)."""
BIAS_BYTES: Final = {"alltoall": (12, 16), "flex": (28, 40)}
"""Bytes for each number that leaves experts, in forward and backward: PyTorch's operations scale the second bias by the
router's weights and add it (TEGroupedMLP._apply_bias of Megatron-Core), behind DeepEP and HybridEP in 32 bit."""

ROWWISE_BYTES: Final = 5.25
"""Bytes that a number crosses memory more, each time that it is scaled along rows and not with its whole tensor, whose
traffic is in the 8-bit share of the peak. A factor of three products is scaled along its rows and, for another product,
along its columns, in passes of their own. Fitted to TorchAO's steps on H100 (5.4); those on MI300X ask for 5.1."""
ROWWISE_GATHERED: Final = 2
"""Times as many under tensor parallelism, where nothing is gathered in 8 bit: 8B and 70B of torchtitan's asyncTP page
(TP 8) ask for 2.1 and 1.9."""


def scaling_traffic_bytes(training: Training, layout: Layout, products: Iterable[Product]) -> tuple[float, float]:
    """Bytes that scales for every row move more than one for a tensor in forward and backward; 0 without them.

    The forward scales inputs and weights, the backward both along the other side, and gradients along both.
    """
    if training.matmul != "fp8_rowwise":
        return 0.0, 0.0
    there = grads = 0.0
    for at in products:
        there += at.count * at.depth * (at.rows + at.columns)
        grads += at.count * at.rows * at.columns
    each = ROWWISE_BYTES * (ROWWISE_GATHERED if layout.tensor > 1 else 1)
    return each * there, each * (there + 2 * grads)


def rotary_traffic_bytes(model: Model, training: Training, layout: Layout) -> tuple[float, float]:
    """Bytes that turning a layer's queries and keys moves in forward and backward where it is not fused; else 0."""
    scaling = model.rotary_scaling
    if scaling is None or scaling.kind != "yarn" or model.latent_attention is not None:
        return 0.0, 0.0
    numbers = microbatch_tokens(training, layout) * (model.attention_hidden + model.kv_hidden) / layout.tensor
    there, back = (passes * element_bytes(training.precision) * numbers for passes in ROTARY_PASSES)
    return there, back


def expert_traffic_bytes(model: Model, training: Training, layout: Layout) -> tuple[float, float]:
    """Bytes that a layer's experts move in forward and backward beside `memory.layer_traffic_bytes`; 0 without.

    Copies of tokens come from other devices by device: they are read and written once more to lie by expert, and once
    more on their way back, as their gradients are (`sort_chunks_by_idxs`, megatron/core/transformer/moe). Quantized
    grouped products have each input and each gradient written narrow, by rows and, for W, by columns (GroupedLinear of
    Transformer Engine); before a dense layer's products the norm or the nonlinearity writes that in place of wide ones.
    Biases are fused only where whole layers are replayed from graphs.
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
    unfused = (
        BIAS_BYTES[training.moe_token_dispatcher_type]
        if at.expert_bias and training.cuda_graphs is not True
        else (0, 0)
    )
    return copies * (there + unfused[0] * model.hidden), copies * (back + unfused[1] * model.hidden)
