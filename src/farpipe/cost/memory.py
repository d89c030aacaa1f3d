"""Bytes on one device: activations, what waits for weight gradients, parameters and optimizer state.

Activations after Korthikanti et al. 2022 (arXiv 2205.05198), table 2 and section 4: a GPT layer in 16 bit keeps
s b h (10 + 24/t + 5 a s/(h t)) bytes under tensor parallelism, s b h (34 + 5 a s/h)/t with sequence parallelism as
well, the last term only without selective recomputation or flash attention, and 2 s b h under full recomputation. The
terms are counted here tensor by tensor, so that grouped queries, gated MLPs and 32 bit follow. Masks of dropout (one
byte per element) and the scores' dropped-out copy are counted where `training.dropout` says so.
"""

from typing import Final

from farpipe.cost.layout import Layout
from farpipe.spec import Model, Precision, Training, operations_of

MASK_BYTES: Final = 1


def element_bytes(precision: Precision) -> int:
    """Bytes of one weight or activation."""
    return 4 if precision == "fp32" else 2


def gradient_bytes(precision: Precision) -> int:
    """Bytes of one accumulated gradient: bf16 is too coarse to add up in, so Megatron-LM does that in 32 bit."""
    return 2 if precision == "fp16" else 4


def adam_bytes(precision: Precision) -> float:
    """Bytes that one parameter's update moves: state and weight are read and written, the gradient is read for the
    norm and for the update, and written in between by clipping."""
    traffic = 2 * optimizer_bytes(precision) + 3 * gradient_bytes(precision)
    return traffic + element_bytes(precision) * (2 if precision == "fp32" else 1)


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
    return model.hidden * (4 * element_bytes(training.precision) + 2 * mask_bytes(training))


def split_width_bytes(model: Model, training: Training) -> float:
    """Per token, what is divided over the tensor-parallel devices: the 24, times hidden.

    Query, key, value, context; in the MLP the inputs of the nonlinearity and of the output projection, and with a gate
    also the gate's nonlinearity and the other factor. With experts the MLP's of each that a token goes through, and the
    token's copy on its way in and out.
    """
    attention = 2 * model.attention_hidden + 2 * model.kv_hidden
    return (attention + _mlp_width(model)) * element_bytes(training.precision)


def _mlp_width(model: Model) -> int:
    """Numbers per token that the MLP keeps besides its input."""
    width = 4 if model.gated_mlp else 2
    if model.experts is None:
        return model.ffn_hidden * width
    at = model.experts
    return width * (at.shared_ffn_hidden + at.per_token * at.ffn_hidden) + 2 * at.per_token * model.hidden


def freed_widths(model: Model, operation: str) -> tuple[int, int]:
    """Numbers per token that a layer keeps less if it computes `operation` again: of what every tensor-parallel device
    has, and of what they divide.

    Both norms: their results. The MLP, or the experts: all but their input. The nonlinearity of the experts: its result
    and, where gated, the product with the other factor. Latent attention: queries, keys and values, in place of which
    the narrow vectors are kept. Attention's scores are counted by `score_activation_bytes`.
    """
    at, latent = model.experts, model.latent_attention
    shared = at.shared_ffn_hidden * (4 if model.gated_mlp else 2) if at else 0
    gated = 2 if model.gated_mlp else 1
    widths = {
        "layernorm": (2 * model.hidden, 0),
        "mlp": (0, _mlp_width(model)),
        "moe": (0, _mlp_width(model)),
        "moe_act": (0, at.per_token * at.ffn_hidden * gated if at else 0),
        "shared_experts": (0, shared),
    }
    if latent is not None:
        narrow = latent.query_rank + latent.kv_rank + latent.rope_dim
        widths["mla_up_proj"] = (-narrow, model.attention_hidden + 2 * model.kv_hidden)
    return widths[operation]


def freed_bytes(model: Model, training: Training, layout: Layout, operation: str) -> float:
    """Bytes that one layer keeps less for one microbatch if it computes `operation` again."""
    if operation == "core_attn":
        return score_activation_bytes(model, training, layout)
    shared, split = freed_widths(model, operation)
    shares = layout.tensor if training.sequence_parallel is True else 1
    width = shared / shares + split / layout.tensor
    return microbatch_tokens(training, layout) * width * element_bytes(training.precision)


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


def score_activation_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that one layer keeps of the matrix of scores when nothing is recomputed; flash attention keeps none."""
    if training.flash_attention:
        return 0.0
    return microbatch_tokens(training, layout) * score_width_bytes(model, training) / layout.tensor


def layer_activation_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that one layer keeps for one microbatch from its forward to its backward."""
    if training.recompute == "full":
        return _residual_bytes(model, training, layout)
    again = operations_of(training.recompute)
    scores = 0.0 if "core_attn" in again else score_activation_bytes(model, training, layout)
    freed = sum(freed_bytes(model, training, layout, operation) for operation in again if operation != "core_attn")
    return linear_activation_bytes(model, training, layout) + scores - freed


def embedding_activation_bytes(model: Model, training: Training, layout: Layout) -> float:
    """The mask of the dropout behind the embedding."""
    tokens = microbatch_tokens(training, layout) / (layout.tensor if training.sequence_parallel is True else 1)
    return tokens * model.hidden * mask_bytes(training)


def head_activation_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Inputs of the final norm and of the head, and the logits in 32 bit (Korthikanti et al., section 4.3)."""
    logits = 4 * microbatch_tokens(training, layout) * model.vocab_size / layout.tensor
    return 2 * _residual_bytes(model, training, layout) + logits


def working_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Working memory of the backward of one layer: under recomputation, all that is computed again.

    It does not grow with the number of microbatches in flight, so it counts once per device.
    """
    if training.recompute == "full":
        return linear_activation_bytes(model, training, layout) + score_activation_bytes(model, training, layout)
    again = operations_of(training.recompute)
    return float(sum(freed_bytes(model, training, layout, operation) for operation in again))


def layer_stash_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that remain of one layer between I and W: inputs and output gradients of its linear maps."""
    at = model.experts
    inner = (at.per_token * at.ffn_hidden + at.shared_ffn_hidden if at else model.ffn_hidden) / layout.tensor
    heads, keys = model.attention_hidden / layout.tensor, model.kv_hidden / layout.tensor
    inputs = 2 * model.hidden + heads + inner
    grads = 2 * model.hidden + heads + 2 * keys + inner * (2 if model.gated_mlp else 1)
    return microbatch_tokens(training, layout) * (inputs + grads) * element_bytes(training.precision)


def head_stash_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that remain of the head between I and W: its input and the gradient of the logits."""
    width = model.hidden + model.vocab_size / layout.tensor
    return microbatch_tokens(training, layout) * width * element_bytes(training.precision)


def embedding_stash_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that remain of the embedding between I and W: the gradient of its output."""
    return microbatch_tokens(training, layout) * model.hidden * element_bytes(training.precision)


def state_bytes(device_params: float, training: Training, layout: Layout) -> float:
    """Parameters, gradients and Adam's state on one device: 2 + 4 (fp16: 2) + 12 bytes, in fp32 4 + 4 + 8.

    `device_params` are those of a stage on one device before ZeRO (Rajbhandari et al., arXiv 1910.02054) divides the
    optimizer's part (stage 1), gradients (2) and parameters (3) over the devices of the site that hold the same.
    """
    precision, zero, size = training.precision, training.zero, num_shares(training, layout)
    optimizer = optimizer_bytes(precision) / size
    gradients = gradient_bytes(precision) / (size if zero in (2, 3) else 1)
    weights = element_bytes(precision) / (size if zero == 3 else 1)
    return device_params * (weights + gradients + optimizer)


def gathered_bytes(layer_params: float, training: Training) -> float:
    """Bytes of whole parameters and gradients under ZeRO-3 at a time: two layers, for the next is gathered ahead."""
    width = element_bytes(training.precision)
    return layer_params * (2 * width + gradient_bytes(training.precision)) if training.zero == 3 else 0.0


def num_shares(training: Training, layout: Layout) -> int:
    """Over how many devices the optimizer's state is divided; stage 1 reaches over several sites, 2 and 3 do not."""
    if not training.zero1:
        return 1
    return layout.data * layout.context if training.zero == 1 else layout.num_shares


def _residual_bytes(model: Model, training: Training, layout: Layout) -> float:
    tokens = microbatch_tokens(training, layout) / (layout.tensor if training.sequence_parallel is True else 1)
    return tokens * model.hidden * element_bytes(training.precision)
