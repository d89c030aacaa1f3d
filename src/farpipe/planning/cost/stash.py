"""What waits between I and W: inputs of linear maps, and the gradients of what they make."""

from farpipe.core.spec import Lora, Model, Training
from farpipe.planning.cost.adapters import layout_adapted, shared_inputs
from farpipe.planning.cost.layout import Layout
from farpipe.planning.cost.memory import element_bytes, held_residual_bytes, input_bytes, microbatch_tokens


def layer_stash_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that remain of one layer between I and W: inputs and output gradients of its linear maps."""
    if training.lora is not None:
        return _adapter_stash_bytes(model, training, training.lora, layout)
    at = model.experts
    inner = (at.per_token * at.ffn_hidden + at.shared_ffn_hidden if at else model.ffn_hidden) / layout.tensor
    heads, keys = model.attention_hidden / layout.tensor, model.kv_hidden / layout.tensor
    inputs = 2 * model.hidden + heads + inner
    grads = 2 * model.hidden + heads + 2 * keys + inner * (2 if model.gated_mlp else 1)
    return microbatch_tokens(training, layout) * (inputs + grads) * input_bytes(training)


def _adapter_stash_bytes(model: Model, training: Training, lora: Lora, layout: Layout) -> float:
    """The same of the adapters: inputs of both matrices, and the gradients of both results."""
    base = layout_adapted(model, lora, microbatch_tokens(training, layout), layout)
    numbers = sum(at.count * at.rows * (at.columns + 2 * lora.rank) for at in base)
    inputs = sum(at.count * at.rows * at.depth for at in shared_inputs(base))
    return (numbers + inputs) * element_bytes(training.precision)


def head_stash_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that remain of the head between I and W: its input and the gradient of the logits; none if frozen."""
    if training.lora is not None:
        return 0.0
    width = model.hidden + model.vocab_size / layout.tensor
    once = microbatch_tokens(training, layout) * width * element_bytes(training.precision)
    streams = 3 * held_residual_bytes(model, training, layout)
    return once + model.mtp_num_layers * (once + streams + layer_stash_bytes(model, training, layout))


def embedding_stash_bytes(model: Model, training: Training, layout: Layout) -> float:
    """Bytes that remain of the embedding between I and W: the gradient of its output; none if frozen."""
    if training.lora is not None:
        return 0.0
    return microbatch_tokens(training, layout) * model.hidden * element_bytes(training.precision)
