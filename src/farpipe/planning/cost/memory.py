"""Bytes on one device: activations, what waits for weight gradients, parameters and optimizer state.

Activations after Korthikanti et al. 2022 (arXiv 2205.05198), table 2 and section 4: a GPT layer in 16 bit keeps
s b h (10 + 24/t + 5 a s/(h t)) bytes under tensor parallelism, s b h (34 + 5 a s/h)/t with sequence parallelism as
well, the last term only without selective recomputation or flash attention, and 2 s b h under full recomputation. The
terms are counted here tensor by tensor, so that grouped queries, gated MLPs and 32 bit follow. Masks of dropout (one
byte per element) and the scores' dropped-out copy are counted where `training.dropout` says so.
"""

from typing import Final

from farpipe.core.spec import Device, Matmul, Model, Precision, Training, recomputed_of
from farpipe.core.spec.lora import attention_modules
from farpipe.core.spec.training import QUANTIZED
from farpipe.planning.cost.layout import Layout

MASK_BYTES: Final = 1


def element_bytes(precision: Precision) -> int:
    """Bytes of one weight or activation."""
    return 4 if precision == "fp32" else 2


def quantized_bytes(matmul: Matmul) -> float:
    """Bytes of one number in the format of quantized products, its share of the scales included.

    A scale of 1 byte for 32 numbers (MXFP8, OCP MX 1.0) or for 16 (NVFP4); one for a row or a tensor counts as nothing.
    """
    return {"fp8": 1.0, "fp8_rowwise": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}[matmul]


def is_quantized(training: Training) -> bool:
    """True if the layers' products run on numbers made from wider ones."""
    return training.matmul in QUANTIZED


def keeps_quantized(training: Training) -> bool:
    """True if linear maps keep their inputs, and weights, as they were multiplied: those of Transformer Engine do.

    TorchAO's keep both in the training's precision and quantize them again (matmul_with_hp_or_float8_args); its three
    tables, on H100, MI300X and B200, show the same memory with each recipe as in 16 bit.
    """
    return is_quantized(training) and not training.by_pytorch


def input_bytes(training: Training) -> float:
    """Bytes of one number that a linear map of a layer keeps of its input until W."""
    return quantized_bytes(training.matmul) if keeps_quantized(training) else element_bytes(training.precision)


def gradient_bytes(training: Training) -> int:
    """Bytes of one accumulated gradient: bf16 is coarse to add up in, so Megatron-LM does that in 32 bit by default."""
    wide = training.precision != "fp16" if training.grad_reduce_in_fp32 is None else training.grad_reduce_in_fp32
    return 4 if wide else 2


def kept_input_bytes(training: Training, *modules: str) -> float:
    """Bytes that the linear maps called `modules` together keep of each number of an input that they share, until W.

    Frozen ones keep nothing; an adapter keeps what dropout leaves, in the training's precision, and its mask.
    """
    if training.lora is None:
        return input_bytes(training)
    if not any(training.lora.adapts(module) for module in modules):
        return 0.0
    return element_bytes(training.precision) + (MASK_BYTES if training.lora.dropout else 0)


def gathered_weight_bytes(training: Training) -> float:
    """Bytes of one weight of a layer as ZeRO gathers it and the optimizer writes it."""
    return quantized_bytes(training.matmul) if training.fp8_param_gather else element_bytes(training.precision)


def weight_bytes(training: Training, *, transposed: bool = True) -> float:
    """Bytes of one weight of a layer on its device, the copies for quantized products included.

    Transformer Engine keeps the quantized weight between microbatches, and for the input gradient its transpose:
    Hopper multiplies 8-bit factors in one layout only, and blocks of MXFP8 and NVFP4 run along one direction.
    `transposed` is False where products of tensor-scaled numbers take any layout (Blackwell).
    """
    if training.lora is not None and training.lora.base_bytes is not None:
        return training.lora.base_bytes  # a transpose is made for each product: nothing updates the weight
    if not keeps_quantized(training):
        return element_bytes(training.precision)
    copies = 2 if transposed or training.matmul != "fp8" else 1
    wide = 0 if training.fp8_param_gather else element_bytes(training.precision)
    return wide + copies * quantized_bytes(training.matmul)


def needs_transposes(device: Device) -> bool:
    """True if a device multiplies 8-bit numbers in one layout only; those with MXFP8 take any."""
    return "mxfp8" not in device.peak_flops


def adam_bytes(training: Training) -> float:
    """Bytes that one parameter's update moves: state and weight are read and written, the gradient is read for the
    norm and for the update, and written in between by clipping."""
    traffic = 2 * optimizer_bytes(training.precision) + 3 * gradient_bytes(training)
    return traffic + gathered_weight_bytes(training) * (2 if training.precision == "fp32" else 1)


def optimizer_bytes(precision: Precision) -> int:
    """Bytes of Adam's state per parameter: two moments, and a 32-bit master weight where weights are shorter."""
    return 8 if precision == "fp32" else 12


def mask_bytes(training: Training) -> int:
    """Bytes of dropout's mask for each number that is dropped out."""
    return MASK_BYTES if training.dropout else 0


def microbatch_tokens(training: Training, layout: Layout) -> int:
    """Tokens of one microbatch on one of the context-parallel devices."""
    return training.sequence_length * layout.microbatch_size // layout.context


def boundary_bytes(model: Model, training: Training, layout: Layout) -> float:
    """One message between stages, for all devices of a replica together.

    Each device sends its 1/t and gathers the rest on the other side (Narayanan et al., SC 2021, section 4.1).
    """
    tokens = training.sequence_length * layout.microbatch_size
    return float(tokens * model.hidden * element_bytes(training.precision))


def residual_bytes(model: Model, training: Training, layout: Layout) -> float:
    """The residual stream of one microbatch on one of the context-parallel devices."""
    return float(microbatch_tokens(training, layout) * model.hidden * element_bytes(training.precision))


def shared_width_bytes(model: Model, training: Training) -> float:
    """Per token, what every tensor-parallel device keeps of a layer: the 10 of 10 + 24/t, times hidden.

    Inputs of both norms, of attention and of the MLP, and two dropout masks.
    """
    wide = element_bytes(training.precision) + mask_bytes(training)
    return 2 * model.hidden * wide + _norm_bytes(model, training)


def _norm_bytes(model: Model, training: Training) -> float:
    """Per token, the results of both norms that are kept, inputs of attention and of the MLP, and copies on the way."""
    inward = [name for name in attention_modules(model) if name.endswith(("qkv", "q_proj", "down_proj"))]
    results = kept_input_bytes(training, *inward) + kept_input_bytes(training, "linear_fc1")
    return model.hidden * (results + 2 * _norm_copy_bytes(model, training))


def _norm_copy_bytes(model: Model, training: Training) -> float:
    """Bytes of each number that an RMSNorm of PyTorch's own operations keeps besides its input and its result.

    In 32 bit the normalised number before the gain. In 16 bit that, and the input in 32 bit in place of itself: the
    same 4 bytes. Seen in 32 bit: Llama, Qwen3, Mixtral and Qwen3-MoE of transformers keep what is planned to 1 %.
    """
    return 4.0 if training.kernels == "eager" and model.norm == "rmsnorm" else 0.0


def split_width_bytes(model: Model, training: Training) -> float:
    """Per token, what is divided over the tensor-parallel devices: the 24, times hidden.

    Query, key, value, context; in the MLP the inputs of the nonlinearity and of the output projection, and with a gate
    also the gate's nonlinearity and the other factor. With experts the MLP's of each that a token goes through, and the
    token's copy on its way in and out. In quantized products the output projections keep copies of their own.
    """
    attention = attention_width(model) * element_bytes(training.precision) + _inner_norm_bytes(model, training)
    lora = training.lora
    own = keeps_quantized(training) if lora is None else lora.dropout > 0  # else it is what attention keeps anyway
    copy = context_width(model) * kept_input_bytes(training, "linear_proj") if own else 0.0
    return attention + copy + _mlp_bytes(model, training)


def _inner_norm_bytes(model: Model, training: Training) -> float:
    """Per token, what eager norms inside of attention keep besides results: of queries and keys the input as well."""
    copy, at = _norm_copy_bytes(model, training), model.latent_attention
    if not copy:
        return 0.0
    if at is not None:
        return copy * (at.query_rank + at.kv_rank)
    return model.qk_norm * (model.attention_hidden + model.kv_hidden) * (copy + element_bytes(training.precision))


def context_width(model: Model) -> int:
    """Width of what attention makes, the input of its output projection."""
    at = model.latent_attention
    return model.attention_hidden if at is None else model.num_heads * at.value_dim


def attention_width(model: Model) -> int:
    """Numbers per token that attention keeps: query, key, value and context; latent attention's narrow vectors too."""
    at = model.latent_attention
    if at is None:
        return 2 * model.attention_hidden + 2 * model.kv_hidden
    heads = 2 * (at.nope_dim + at.rope_dim + at.value_dim)
    return model.num_heads * heads + at.query_rank + at.kv_rank + at.rope_dim


def _inner_bytes(model: Model, training: Training, inner: float) -> float:
    """Per token, what an MLP of this inner width keeps besides its input: with a gate four numbers of that width,
    else two. Quantized or frozen, the fused nonlinearity keeps its input, and the output projection its own."""
    wide, number = element_bytes(training.precision), 2 if model.gated_mlp else 1
    stored = 1 if training.activation_func_fp8_input_store else wide
    if training.lora is None and not keeps_quantized(training):
        return inner * number * (stored + wide)
    return inner * (number * stored + kept_input_bytes(training, "linear_fc2"))


def _mlp_bytes(model: Model, training: Training) -> float:
    """Bytes per token that the MLP, or the experts, keep besides their input."""
    at = model.experts
    if at is None:
        return _inner_bytes(model, training, model.ffn_hidden)
    kept = kept_input_bytes(training, "linear_fc1") + element_bytes(training.precision)
    copies = at.per_token * model.hidden * kept
    return _inner_bytes(model, training, at.shared_ffn_hidden + at.per_token * at.ffn_hidden) + copies


def freed_widths(model: Model, training: Training, operation: str) -> tuple[float, float]:
    """Bytes per token that a layer keeps less if it computes `operation` again: of what every tensor-parallel device
    has, and of what they divide. Both norms: their results. The MLP, or the experts: all but their input. The
    nonlinearity of the experts: its result and, where gated, the product with the other factor. Latent attention:
    queries, keys and values, in place of which the narrow vectors are kept. ``op``: norms, the stream between attention
    and MLP, what every second product makes. `score_activation_bytes` counts scores.
    """
    at, latent, wide = model.experts, model.latent_attention, element_bytes(training.precision)
    made = input_bytes(training) if keeps_quantized(training) else wide * (2 if model.gated_mlp else 1)
    widths = {
        "layernorm": (_norm_bytes(model, training), 0.0),
        "mlp": (0.0, _mlp_bytes(model, training)),
        "moe": (0.0, _mlp_bytes(model, training) if at else 0.0),
        "moe_act": (0.0, at.per_token * at.ffn_hidden * made if at else 0.0),
        "shared_experts": (0.0, _inner_bytes(model, training, at.shared_ffn_hidden) if at else 0.0),
    }
    if latent is not None:
        narrow = latent.query_rank + latent.kv_rank + latent.rope_dim
        widths["mla_up_proj"] = (-narrow * wide, (model.attention_hidden + 2 * model.kv_hidden) * wide)
    if operation == "op":
        split = _mlp_bytes(model, training) * (0.75 if model.gated_mlp else 0.5) + model.kv_hidden * wide
        return _norm_bytes(model, training) + model.hidden * wide, split
    return widths[operation]


def freed_bytes(model: Model, training: Training, layout: Layout, operation: str) -> float:
    """Bytes that one layer keeps less for one microbatch if it computes `operation` again."""
    if operation == "core_attn":
        return score_activation_bytes(model, training, layout)
    shared, split = freed_widths(model, training, operation)
    shares = layout.tensor if training.sequence_parallel is True else 1
    return microbatch_tokens(training, layout) * (shared / shares + split / layout.tensor)


def score_width_bytes(model: Model, training: Training) -> float:
    """Per token, what attention keeps of its matrix: softmax, its mask and its dropped-out copy, the 5 a s.

    Without dropout the softmax alone.
    """
    copies = 2 if training.dropout else 1
    width = copies * element_bytes(training.precision) + mask_bytes(training)
    return model.num_heads * training.sequence_length * width


def linear_activation_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that one layer keeps for one microbatch besides the matrix of scores."""
    shared = shared_width_bytes(model, training) / (layout.tensor if training.sequence_parallel is True else 1)
    split = split_width_bytes(model, training) / layout.tensor
    return microbatch_tokens(training, layout) * (shared + split)


def layer_traffic_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes of what lies between a layer's products, as kernels read and write it: before anything is quantized."""
    as_made = {"matmul": "same", "lora": None, "activation_func_fp8_input_store": False, "kernels": "fused"}
    is_made = all(getattr(training, key) == value for key, value in as_made.items())
    return linear_activation_bytes(model, training if is_made else training.model_copy(update=as_made), layout)


def score_activation_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that one layer keeps of the matrix of scores when nothing is recomputed; flash attention keeps none."""
    if training.flash_attention:
        return 0.0
    return microbatch_tokens(training, layout) * score_width_bytes(model, training) / layout.tensor


def layer_activation_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that one layer keeps for one microbatch from its forward to its backward, in the mean of all layers where
    some of them wait in the host's memory."""
    if training.recompute == "full":
        return held_residual_bytes(model, training, layout)
    return (1 - training.cpu_offloading_num_layers / model.num_layers) * kept_bytes(model, training, layout)


def kept_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes of one layer and one microbatch that are kept on the device or in the host's memory."""
    again = recomputed_of(model, training.recompute)
    scores = 0.0 if "core_attn" in again else score_activation_bytes(model, training, layout)
    freed = sum(freed_bytes(model, training, layout, operation) for operation in again if operation != "core_attn")
    return linear_activation_bytes(model, training, layout) + scores - freed


def embedding_activation_bytes(model: Model, training: Training, layout: Layout) -> float:
    """The mask of the dropout behind the embedding."""
    tokens = microbatch_tokens(training, layout) / (layout.tensor if training.sequence_parallel is True else 1)
    return tokens * model.hidden * mask_bytes(training)


def head_activation_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Inputs of the final norm and of the head, and the logits in 32 bit (Korthikanti et al., section 4.3).

    Each module of multi-token prediction has them too, the activations of a layer, and in its map's input both streams
    with what their norms start from.
    """
    logits = 4 * microbatch_tokens(training, layout) * model.vocab_size / layout.tensor
    residual = held_residual_bytes(model, training, layout)
    once = (2 if training.lora is None else 1) * residual + logits
    return once + model.mtp_num_layers * (once + 4 * residual + layer_activation_bytes(model, training, layout))


def working_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Working memory of the backward of one layer: under recomputation, all that is computed again.

    It does not grow with the number of microbatches in flight, so it counts once per device.
    """
    if training.recompute == "full":
        return linear_activation_bytes(model, training, layout) + score_activation_bytes(model, training, layout)
    if training.cpu_offloading_num_layers:  # two layers leave or come back, when the others' activations are not there
        return max(0, 2 + training.cpu_offloading_num_layers - model.num_layers) * kept_bytes(model, training, layout)
    return float(sum(freed_bytes(model, training, layout, one) for one in recomputed_of(model, training.recompute)))


def state_bytes(
    device_params: float,
    training: Training,
    layout: Layout,
    *,
    expert_params: float = 0.0,
    end_params: float = 0.0,
    transposed: bool = True,
    adapters: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Parameters, gradients and Adam's state on one device: 2 + 4 (fp16: 2) + 12 bytes, in fp32 4 + 4 + 8.

    `device_params` are those of a stage on one device before ZeRO (Rajbhandari et al., arXiv 1910.02054) divides the
    optimizer's part (stage 1), gradients (2) and parameters (3) over the devices of the site that hold the same;
    `expert_params` of them are experts, which fewer devices hold; `end_params` of them are the embedding's and the
    head's, which are never quantized. `transposed`: as for `weight_bytes`. `adapters`: parameters on the device beside
    frozen ones, of which these are weights alone, and those of them that experts have.
    """
    shares, expert_shares = num_shares(training, layout), num_expert_shares(training, layout)
    parts = ((device_params - expert_params, shares), (expert_params, expert_shares))
    weight = weight_bytes(training, transposed=transposed)
    if training.lora is None:
        state = sum(count * _param_bytes(training, weight, size) for count, size in parts)
    else:
        state = sum(count * weight / (size if training.zero == 3 else 1) for count, size in parts)
        trained = ((adapters[0] - adapters[1], shares), (adapters[1], expert_shares))
        state += sum(count * _param_bytes(training, element_bytes(training.precision), n) for count, n in trained)
    return state - end_params * ((weight - element_bytes(training.precision)) / (shares if training.zero == 3 else 1))


def _param_bytes(training: Training, weight: float, size: int) -> float:
    """Bytes of one parameter on a device, of whose state `size` devices have a part each."""
    kept = 0 if training.barrier or training.clip_norm is None else 16  # weight, moments, gradient: to undo an update
    optimizer = (optimizer_bytes(training.precision) + kept) / size
    gradients = gradient_bytes(training) / (size if training.zero in (2, 3) else 1)
    return weight / (size if training.zero == 3 else 1) + gradients + optimizer


def gathered_bytes(layer_params: float, training: Training) -> float:
    """Bytes of whole parameters and gradients under ZeRO-3 at a time: two layers, for the next is gathered ahead."""
    if training.zero != 3:
        return 0.0
    if training.lora is not None:
        return 2 * layer_params * weight_bytes(training)
    return layer_params * (2 * gathered_weight_bytes(training) + gradient_bytes(training))


def num_shares(training: Training, layout: Layout) -> int:
    """Over how many devices the optimizer's state is divided; stage 1 reaches over several sites, 2 and 3 do not."""
    if not training.zero1:
        return 1
    return training.grouped(layout.data * layout.context if training.zero == 1 else layout.num_shares)


def num_expert_shares(training: Training, layout: Layout) -> int:
    """Over how many devices the optimizer's state of experts is divided: those that hold the same experts."""
    if not training.zero1:
        return 1
    return max(1, num_shares(training, layout) * layout.tensor // (layout.expert * layout.expert_tensor))


def held_residual_bytes(model: Model, training: Training, layout: Layout) -> float:
    """The residual stream of one microbatch as one tensor-parallel device keeps it."""
    tokens = microbatch_tokens(training, layout) / (layout.tensor if training.sequence_parallel is True else 1)
    return tokens * model.hidden * element_bytes(training.precision)
