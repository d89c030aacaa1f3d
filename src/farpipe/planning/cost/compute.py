"""Seconds of one layer, of the embedding and of the head on one device.

A matrix product takes ``flops / (peak x matrix_fraction) x (1 + wave_elements / (rows x columns)) x
(1 + depth_elements / depth)`` seconds, but no less than moving its factors and its result: a roofline (Williams et al.
2009) under which small results leave units idle and short sums do not pay for filling a tile. Sizes are those after
tensor parallelism has divided them, so thin slices and small microbatches are slow. Everything else is memory traffic:
each kept activation is written and read again in the forward, and read, with its gradient written and read, in the
backward. A layer is never faster than the host can launch it. Collectives of tensor parallelism: two in the forward and
two in the backward of every layer (Megatron-LM, arXiv 1909.08053).
"""

from dataclasses import replace
from typing import Final

from farpipe.core.spec import Model, Site, Training, recomputed_of
from farpipe.planning.cost import adapters, flops, memory
from farpipe.planning.cost.attention import attention_core_s
from farpipe.planning.cost.calibration import Calibration
from farpipe.planning.cost.exchange import (
    COLLECTIVES_PER_PASS,
    Times,
    exchange_times,
    hidden_exchange,
    layer_expert_exchange_s,
    residual_collective_s,
)
from farpipe.planning.cost.flops import Product
from farpipe.planning.cost.layout import Layout
from farpipe.planning.cost.speed import Speed, attention_speed, core_speed, head_speed
from farpipe.planning.cost.traffic import expert_traffic_bytes, rotary_traffic_bytes, scaling_traffic_bytes
from farpipe.planning.cost.transfer import (
    context_exchange_s,
    head_exchange_bytes,
    head_exchange_link,
    ring_bytes,
    ring_link,
    summed_over_groups_s,
    tensor_collective_s,
)

FORWARD_PASSES: Final = 2
"""Times that a kept activation crosses memory in the forward."""
BACKWARD_PASSES: Final = 4
SHARDED_SLOWDOWN: Final = 0.5
"""Part of the time of FSDP's hidden collectives by which computation beside them takes longer, as they use
multiprocessors and memory: fitted to llm-foundry's 31 rows on H100; its rows on A100 ask for 0.7, torchtitan's of 2025
for 0.5 to 0.7."""


def layer_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    """One layer for one microbatch; what is recomputed is part of the input gradient."""
    return sum(layer_parts(model, training, layout, site, calibration).values(), Times(0.0, 0.0, 0.0))


def layer_parts(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration
) -> dict[str, Times]:
    """The seconds of `layer_times` by what takes them: matrix products with the traffic between them, adapters,
    attention's core, exchanges of context, tensor and expert parallelism, launches, what is recomputed, and ZeRO."""
    speed = core_speed(training, site.device, calibration)
    linear = linear_times(
        model, training, layout, Speed.of(site.device, calibration, training.precision, training.matmul)
    )
    attend = attention_speed(training, site.device, calibration)
    attention = attention_core_times(model, training, layout, attend)
    context = _context_times(model, training, layout, site, attend)
    adapter = _adapter_times(model, training, layout, site, speed)
    between = exchange_times(model, training, layout, site, calibration)
    if training.overlap_moe_expert_parallel_comm and model.experts is not None:
        sent_s = layer_expert_exchange_s(model, training, layout, site, calibration)
        between += hidden_exchange(sent_s, linear + attention, calibration)
    launch = launch_s(model, training, layout, calibration)
    backward = linear + adapter + attention + context + between
    computed, core_s = backward.forward_s, attention.forward_s + context.forward_s
    idle = calibration.expert_sync_s if waits_for_counts(model, training) else 0.0
    forward = max(computed + idle, launch)
    late = max(0.0, 2 * launch / (backward.input_grad_s + backward.weight_grad_s) - 1)
    again = forward if training.recompute == "full" else 0.0
    chosen = recomputed_of(model, training.recompute)
    if training.by_pytorch and (again or {"mlp", "moe"} & {*chosen}):
        again -= _not_needed_s(model, training, layout, site, calibration)
    for operation in chosen:
        if operation == "core_attn":
            again += core_s
        else:
            again += forward / computed * again_s(model, training, layout, site, calibration, operation)
    parts = {
        "matrix products": linear,
        "adapters": adapter,
        "attention": attention,
        "context exchange": context,
        "tensor and expert exchange": between,
        "waiting for the host": Times(forward - computed, backward.input_grad_s * late, backward.weight_grad_s * late),
        "recomputed": Times(0.0, again, 0.0),
    }
    whole = sum(parts.values(), Times(0.0, 0.0, 0.0))
    offloading = _offloading_times(model, training, layout, calibration, whole)
    return parts | {
        "copies to the host": offloading,
        "ZeRO": zero_times(model, training, layout, site, calibration, whole + offloading),
    }


def _not_needed_s(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> float:
    """Seconds of a forward that no gradient needs: of the layer's last product, and of what sends its result on.

    `torch.utils.checkpoint` stops at the last tensor that it has to make again (``set_checkpoint_early_stop``).
    """
    speed = Speed.of(site.device, calibration, training.precision, training.matmul)
    seconds = speed.product_s(linear_products(model, training, layout)[-1])
    seconds += residual_collective_s(model, training, layout, site, calibration) / 2
    if model.experts is not None:
        seconds += layer_expert_exchange_s(model, training, layout, site, calibration) / 2
    return seconds


def _every_second(model: Model, training: Training, layout: Layout) -> tuple[Product, ...]:
    """Products that torchtitan's checkpointing by operation does not keep.

    In the order of its Llama these are keys, attention's output and the MLP's second one, with TorchAO's products too.
    """
    inward, outward, up, _ = linear_products(model, training, layout)
    keys = replace(inward, columns=model.kv_hidden / layout.tensor)
    return (keys, outward, replace(up, columns=up.columns / 2)) if model.gated_mlp else (keys, outward)


def _offloading_times(
    model: Model, training: Training, layout: Layout, calibration: Calibration, beside: Times
) -> Times:
    """Exposed seconds of activations on their way to the host's memory and back, in the mean of all layers."""
    offloaded = training.cpu_offloading_num_layers / model.num_layers * memory.kept_bytes(model, training, layout)
    copied_s = offloaded / calibration.host_link_bytes_per_s
    backward_s = beside.input_grad_s + beside.weight_grad_s
    return Times(max(0.0, copied_s - beside.forward_s), max(0.0, copied_s - backward_s), 0.0)


def again_share(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> float:
    """Part of a layer's modelled forward that its backward computes again; 1 of all of it."""
    if not recomputed_of(model, training.recompute):
        return 1.0
    plain = training.model_copy(update={"recompute": "none"})
    some, none = (layer_times(model, asked, layout, site, calibration) for asked in (training, plain))
    return (some.input_grad_s - none.input_grad_s) / none.forward_s


def again_s(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration, operation: str
) -> float:
    """Seconds of one of a layer's operations but attention's core, computed again by a device that launches it in time.

    An MLP that divides its layer gathers its input and sums its result anew, and experts exchange their tokens anew:
    Megatron-LM checkpoints all of the module. Of the norms and the nonlinearity only traffic counts. Dense layers of a
    model with experts have none of what experts compute.
    """
    if model.experts is None and operation in ("moe", "moe_act", "shared_experts"):
        return 0.0
    tokens = memory.microbatch_tokens(training, layout)
    products: dict[str, tuple[Product, ...]] = {
        "op": _every_second(model, training, layout) if operation == "op" else (),
        "mlp": flops.mlp_linear(model, tokens, layout.tensor),
        "moe": flops.mlp_linear(model, tokens, layout.tensor, layout.expert, layout.expert_tensor),
        "shared_experts": flops.shared_experts(model, tokens, layout.tensor),
    }
    if model.latent_attention is not None:
        products["mla_up_proj"] = flops.latent_up(model, model.latent_attention, tokens, layout.tensor)
    speed = Speed.of(site.device, calibration, training.precision, training.matmul)
    again = products.get(operation, ())
    seconds = speed.products_s(again) + speed.traffic_s(scaling_traffic_bytes(training, layout, again)[0])
    fused = training.model_copy(update={"kernels": "fused"})  # what eager ones write besides is in `_passes`
    made = memory.freed_bytes(model, fused, layout, operation) * _passes(model, training, calibration)
    seconds += speed.traffic_s(FORWARD_PASSES * made)
    if operation == "moe":
        seconds += speed.traffic_s(expert_traffic_bytes(model, training, layout)[0])
    if operation in ("op", "mlp", "moe", "shared_experts"):
        seconds += residual_collective_s(model, training, layout, site, calibration)
    return seconds + (
        layer_expert_exchange_s(model, training, layout, site, calibration) if operation == "moe" else 0.0
    )


def _context_times(model: Model, training: Training, layout: Layout, site: Site, speed: "Speed") -> Times:
    """Exposed seconds of context parallelism, by a ring or by Ulysses, beyond attention."""
    if layout.context == 1:
        return Times(0.0, 0.0, 0.0)
    tokens = memory.microbatch_tokens(training, layout)
    if layout.context_exchange == "ulysses":
        link = head_exchange_link(site, speed.calibration, layout.context, layout.tensor)
        seconds = link.seconds(head_exchange_bytes(model, training, layout.tensor, tokens))
        return Times(seconds, seconds, 0.0)
    return _ring_times(model, training, layout, site, speed, tokens)


def _ring_times(model: Model, training: Training, layout: Layout, site: Site, speed: "Speed", tokens: int) -> Times:
    """Exposed seconds of the ring of keys and values, beyond attention; the backward sends their gradients as well."""
    width = 2 * model.kv_hidden / layout.tensor
    ring = context_exchange_s(
        site, speed.calibration, layout, tokens * width * memory.element_bytes(training.precision)
    )
    core, hidden = attention_core_times(model, training, layout, speed), (layout.context - 1) / layout.context
    return Times(max(0.0, ring - hidden * core.forward_s), max(0.0, 2 * ring - hidden * core.input_grad_s), 0.0)


def zero_times(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration, layer: Times
) -> Times:
    """Exposed seconds of ZeRO's collectives of one layer, beyond those of `layer`.

    Stage 3 gathers parameters for the forward and again for the backward, 2 and 3 scatter the sum of gradients in every
    backward (FSDP2 with ``reshard_after_forward``).
    """
    if training.zero not in (2, 3) or layout.num_shares == 1:
        return Times(0.0, 0.0, 0.0)
    size = training.grouped(layout.num_shares)
    effective = ring_link(site, calibration, size, layout.tensor)
    num_params = device_layer_params(model, layout)
    width = memory.gathered_weight_bytes(training) if training.lora is None else memory.weight_bytes(training)
    weights = ring_bytes("all-gather", num_params * width, size)
    trained = num_params if training.lora is None else adapters.trained_params(model, training, 1)[0] / layout.tensor
    summed = trained * memory.gradient_bytes(training)
    gradients_s = effective.seconds(ring_bytes("reduce-scatter", summed, size))
    gradients_s += summed_over_groups_s(site, calibration, layout, size, summed)
    gather = effective.seconds(weights) if training.zero == 3 else 0.0
    beside = calibration.overlap_fraction if training.overlap else 0.0
    slower = SHARDED_SLOWDOWN if training.by_pytorch else 0.0

    def exposed(sent_s: float, computed_s: float) -> float:
        hidden_s = min(sent_s, beside * computed_s)
        return sent_s - (1 - slower) * hidden_s

    backward_s = gather + gradients_s
    return Times(exposed(gather, layer.forward_s), exposed(backward_s, layer.input_grad_s + layer.weight_grad_s), 0.0)


def device_layer_params(model: Model, layout: Layout) -> float:
    """Parameters of one layer on one device, before ZeRO divides them."""
    common = (model.num_layer_params - model.num_expert_params) / layout.tensor
    return common + model.num_expert_params / (layout.expert * layout.expert_tensor)


def linear_times(model: Model, training: Training, layout: Layout, speed: Speed) -> Times:
    """Linear maps of attention and MLP, and the traffic of what lies between them."""
    kept = memory.layer_traffic_bytes(model, training, layout)
    traffic = _traffic_times(_passes(model, training, speed.calibration) * kept, speed)
    widened_s = speed.traffic_s(_widened_bytes(training) * device_layer_params(model, layout))
    products = linear_products(model, training, layout)
    made = product_times(products, speed, frozen=training.lora is not None)
    for there, back in (
        expert_traffic_bytes(model, training, layout),
        rotary_traffic_bytes(model, training, layout),
        scaling_traffic_bytes(training, layout, products),
    ):
        traffic += Times(speed.traffic_s(there), speed.traffic_s(back), 0.0)
    return made + Times(widened_s, widened_s, 0.0) + traffic


def linear_products(model: Model, training: Training, layout: Layout) -> tuple[Product, ...]:
    """Linear maps of attention and MLP of one layer on one device."""
    tokens = memory.microbatch_tokens(training, layout)
    return (
        *flops.attention_linear(model, tokens, layout.tensor),
        *flops.mlp_linear(model, tokens, layout.tensor, layout.expert, layout.expert_tensor),
    )


def _widened_bytes(training: Training) -> float:
    """Traffic of widening one frozen weight for a product: read narrow and written wide; 0 where products take it."""
    stored = training.lora.base_bytes if training.lora is not None else None
    if stored is None or (stored == 1 and training.matmul == "fp8"):
        return 0.0
    return stored + memory.element_bytes(training.precision)


def _adapter_times(model: Model, training: Training, layout: Layout, site: Site, speed: Speed) -> Times:
    """Adapters of one layer: traffic, and sums of each narrow result over the tensor-parallel devices.

    Products that are `rank` numbers wide or deep are bound by memory, far below the ridge of the roofline.
    """
    lora = training.lora
    if lora is None:
        return Times(0.0, 0.0, 0.0)
    tokens = memory.microbatch_tokens(training, layout)
    base = adapters.layout_adapted(model, lora, tokens, layout)
    narrow = float(tokens * lora.rank * memory.element_bytes(training.precision))
    summed = len(base) * tensor_collective_s(site, speed.calibration, layout, narrow)
    there, back, weights = (speed.traffic_s(speed.element_bytes * numbers) for numbers in adapters.passes(lora, base))
    return Times(there + summed, back + summed, weights)


def _passes(model: Model, training: Training, calibration: Calibration) -> float:
    """Factor on the traffic of what lies between matrix products; PyTorch has one kernel for all of LayerNorm, and one
    for GELU, but none for RMSNorm, rotary positions and gates."""
    return calibration.eager_traffic if training.kernels == "eager" and model.norm == "rmsnorm" else 1.0


def product_times(products: tuple[Product, ...], speed: Speed, *, frozen: bool = False) -> Times:
    """Seconds of products and of those that make the gradients of their factors, the right ones unless `frozen`."""
    return Times(
        speed.products_s(products),
        speed.products_s(product.input_grad() for product in products),
        0.0 if frozen else speed.products_s(product.weight_grad() for product in products),
    )


def _traffic_times(kept_bytes: float, speed: Speed) -> Times:
    return Times(speed.traffic_s(FORWARD_PASSES * kept_bytes), speed.traffic_s(BACKWARD_PASSES * kept_bytes), 0.0)


def attention_core_times(model: Model, training: Training, layout: Layout, speed: Speed) -> Times:
    """Scores, softmax and context; the gradients of all of them belong to the input gradient."""
    return Times(*attention_core_s(model, training, layout, speed), 0.0)


def waits_for_counts(model: Model, training: Training) -> bool:
    """True if the device idles after the host has asked how many tokens each expert gets.

    Dispatchers made for experts tell it while tokens travel, and one launch starts all products of 16-bit numbers;
    quantized ones have each expert's tokens made narrow first (GroupedLinear of Transformer Engine).
    """
    asked = training.moe_token_dispatcher_type == "alltoall" or memory.is_quantized(training)
    return model.experts is not None and not training.cuda_graphs and asked


def launch_s(model: Model, training: Training, layout: Layout, calibration: Calibration) -> float:
    """The host's time for the forward of one layer; of what is not replayed from graphs."""
    if training.cuda_graphs is True or (training.cuda_graphs and model.experts is None):
        return 0.0
    experts_s = calibration.expert_launch_s if model.experts is not None else 0.0
    if training.cuda_graphs:
        return experts_s
    collectives = COLLECTIVES_PER_PASS * layout.tensor if layout.tensor > 1 else 0
    softmax_s = 0.0 if fuses_softmax(model, training, layout) else calibration.softmax_launch_s
    return calibration.layer_launch_s + collectives * calibration.collective_launch_s + softmax_s + experts_s


def fuses_softmax(model: Model, training: Training, layout: Layout) -> bool:
    """True unless PyTorch's operations scale, mask and normalise scores in place of Megatron-LM's kernel, which takes a
    multiple of four matrices of 16-bit scores (``FusedScaleMaskSoftmax.is_kernel_available``)."""
    if training.flash_attention or training.precision == "fp32" or training.by_pytorch:
        return True
    return layout.microbatch_size * model.num_heads / layout.tensor % 4 == 0


def embedding_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    """Looking rows up and adding their gradients up is traffic; the vocabulary is divided, so the rows are reduced."""
    speed = core_speed(training, site.device, calibration)
    rows = memory.residual_bytes(model, training, layout)
    collective = residual_collective_s(model, training, layout, site, calibration)
    added = 0.0 if training.lora is not None else speed.traffic_s(3 * rows)
    return Times(speed.traffic_s(2 * rows) + collective, 0.0, added)


def head_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    """The logits, the loss over them in 32 bit, and one reduction of the gradient that goes back; never recomputed.

    With multi-token prediction each module has a layer, and logits and a loss of its own.
    """
    once = _head_times(model, training, layout, site, calibration)
    if not model.mtp_num_layers:
        return once
    job = (training, layout, site, calibration)
    maps = flops.mtp_linear(model, memory.microbatch_tokens(training, layout), layout.tensor)
    speed = Speed.of(site.device, calibration, training.precision, training.matmul)
    further = layer_times(model, *job) + once + product_times(maps, speed, frozen=training.lora is not None)
    return once + further.times(model.mtp_num_layers)


def _head_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    speed = core_speed(training, site.device, calibration)
    tokens = memory.microbatch_tokens(training, layout)
    passes = calibration.passes_of_loss(fused=training.cross_entropy_loss_fusion)
    loss = speed.traffic_s(passes * 4 * tokens * model.vocab_size / layout.tensor)
    collective = residual_collective_s(model, training, layout, site, calibration)
    products, frozen = flops.head_linear(model, tokens, layout.tensor), training.lora is not None
    made = product_times(products, head_speed(training, site.device, calibration), frozen=frozen)
    return made + Times(loss, loss + collective, 0.0)
