"""Seconds of one layer, of the embedding and of the head on one device.

A matrix product takes ``flops / (peak x matrix_fraction) x (1 + wave_elements / (rows x columns)) x
(1 + depth_elements / depth)`` seconds, but no less than moving its factors and its result: a roofline (Williams et al.
2009) under which small results leave units idle and short sums do not pay for filling a tile. Sizes are those after
tensor parallelism has divided them, so thin slices and small microbatches are slow. Everything else is memory traffic:
each kept activation is written and read again in the forward, and read, with its gradient written and read, in the
backward. A layer is never faster than the host can launch it. Collectives of tensor parallelism: two in the forward and
two in the backward of every layer (Megatron-LM, arXiv 1909.08053).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from farpipe.cost import flops, memory
from farpipe.cost.calibration import Calibration
from farpipe.cost.flops import Product
from farpipe.cost.layout import Layout
from farpipe.cost.transfer import (
    context_exchange_s,
    expert_exchange_s,
    head_exchange_bytes,
    head_exchange_link,
    replica_link,
    ring_bytes,
    tensor_collective_s,
)
from farpipe.errors import InfeasibleError
from farpipe.spec import Device, Matmul, Model, Precision, Rate, Site, Training, operations_of

FORWARD_PASSES: Final = 2
"""Times that a kept activation crosses memory in the forward."""
BACKWARD_PASSES: Final = 4
COLLECTIVES_PER_PASS: Final = 2
CAUSAL_HALF: Final = 0.5
"""Flash attention skips the blocks above the diagonal (Dao 2023, arXiv 2307.08691, section 3.1)."""


@dataclass(frozen=True)
class Times:
    """Seconds of one microbatch."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float

    def __add__(self, other: "Times") -> "Times":
        return Times(
            self.forward_s + other.forward_s,
            self.input_grad_s + other.input_grad_s,
            self.weight_grad_s + other.weight_grad_s,
        )

    def times(self, factor: float) -> "Times":
        """Each of the three multiplied by `factor`."""
        return Times(self.forward_s * factor, self.input_grad_s * factor, self.weight_grad_s * factor)


@dataclass(frozen=True)
class Speed:
    """Rates that one device reaches, in one precision."""

    calibration: Calibration
    flops_per_s: float
    bytes_per_s: float
    element_bytes: int
    wave_elements: float
    depth_elements: float

    @classmethod
    def of(cls, device: Device, calibration: Calibration, precision: Precision, matmul: Matmul = "same") -> "Speed":
        """InfeasibleError when the device has no such precision."""
        rate = rate_name(precision, matmul)
        if rate not in device.peak_flops:
            raise InfeasibleError(
                f"device {device.name!r} has no {rate}; choose one of {', '.join(sorted(device.peak_flops))}"
            )
        plain = rate == "fp32"  # its tiles are small and always fill the device
        return cls(
            calibration,
            device.peak_flops[rate] * calibration.fraction(rate),
            device.memory_bandwidth_bytes_per_s * calibration.memory_fraction,
            memory.element_bytes(precision),
            0.0 if plain else calibration.wave_elements,
            0.0 if plain else calibration.depth_elements,
        )

    def multiply_s(self, product: Product) -> float:
        """Seconds of the arithmetic of one product."""
        idle = 1 + self.wave_elements / (product.count * product.rows * product.columns)
        drain = 1 + self.depth_elements / product.depth
        return product.flops / self.flops_per_s * idle * drain

    def product_s(self, product: Product) -> float:
        """Seconds of one product whose factors and result are in memory."""
        return max(self.multiply_s(product), self.traffic_s(product.elements * self.element_bytes))

    def products_s(self, products: Iterable[Product]) -> float:
        """Seconds of several products, one after the other."""
        return sum(map(self.product_s, products))

    def traffic_s(self, num_bytes: float) -> float:
        """Seconds to move `num_bytes` to or from memory."""
        return num_bytes / self.bytes_per_s


def rate_name(precision: Precision, matmul: Matmul) -> Rate:
    """The rate of a device that matrix products run at."""
    rates: dict[Matmul, Rate] = {"same": precision, "tf32": "tf32", "fp8": "fp8", "mxfp8": "mxfp8"}
    return rates[matmul]


def core_speed(training: Training, device: Device, calibration: Calibration) -> Speed:
    """The speed of everything but the layers' linear maps: attention and head are never in fp8 (TransformerEngine)."""
    return Speed.of(device, calibration, training.precision, "tf32" if training.matmul == "tf32" else "same")


def layer_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    """One layer for one microbatch; what is recomputed is part of the input gradient."""
    speed = core_speed(training, site.device, calibration)
    linear = linear_times(
        model, training, layout, Speed.of(site.device, calibration, training.precision, training.matmul)
    )
    core = attention_core_times(model, training, layout, speed) + _context_times(model, training, layout, site, speed)
    between = _exchange_times(model, training, layout, site, calibration)
    launch = 0.0 if training.cuda_graphs else launch_s(layout, calibration)
    computed = linear.forward_s + core.forward_s + between.forward_s
    forward = max(computed, launch)
    backward = linear + core + between
    stretch = max(1.0, 2 * launch / (backward.input_grad_s + backward.weight_grad_s))
    again = forward if training.recompute == "full" else 0.0
    for operation in operations_of(training.recompute):
        if operation == "core_attn":
            again += core.forward_s
        else:
            again += forward / computed * again_s(model, training, layout, site, calibration, operation)
    whole = Times(forward, backward.input_grad_s * stretch + again, backward.weight_grad_s * stretch)
    return whole + zero_times(model, training, layout, site, calibration, whole)


def again_share(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> float:
    """Part of a layer's modelled forward that its backward computes again; 1 of all of it."""
    if not operations_of(training.recompute):
        return 1.0
    plain = training.model_copy(update={"recompute": "none"})
    some, none = (layer_times(model, asked, layout, site, calibration) for asked in (training, plain))
    return (some.input_grad_s - none.input_grad_s) / none.forward_s


def again_s(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration, operation: str
) -> float:
    """Seconds of one of a layer's operations but attention's core, computed again by a device that launches it in time.

    An MLP that divides its layer gathers its input and sums its result anew, and experts exchange their tokens anew:
    Megatron-LM checkpoints all of the module. Of the norms and the nonlinearity only traffic counts.
    """
    tokens, num_experts = memory.microbatch_tokens(training, layout), layout.expert
    products: dict[str, tuple[Product, ...]] = {
        "mlp": flops.mlp_linear(model, tokens, layout.tensor),
        "moe": flops.mlp_linear(model, tokens, layout.tensor, num_experts),
        "shared_experts": flops.shared_experts(model, tokens, layout.tensor),
    }
    if model.latent_attention is not None:
        products["mla_up_proj"] = flops.latent_up(model, model.latent_attention, tokens, layout.tensor)
    speed = Speed.of(site.device, calibration, training.precision, training.matmul)
    seconds = speed.products_s(products.get(operation, ()))
    made = memory.freed_bytes(model, training, layout, operation) * _passes(training, calibration)
    seconds += speed.traffic_s(FORWARD_PASSES * made)
    if operation in ("mlp", "moe", "shared_experts"):
        seconds += residual_collective_s(model, training, layout, site, calibration)
    return seconds + (_expert_exchange_s(model, training, layout, site, calibration) if operation == "moe" else 0.0)


def _exchange_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    """All-reduces of tensor parallelism and, with experts, tokens on their way to them and back."""
    collective = COLLECTIVES_PER_PASS * residual_collective_s(model, training, layout, site, calibration)
    exposed = collective * (1 - calibration.hidden_collective_fraction)
    if model.experts is None:
        return Times(collective, exposed, 0.0)
    both_ways = _expert_exchange_s(model, training, layout, site, calibration)
    return Times(collective + both_ways, exposed + both_ways, 0.0)


def _expert_exchange_s(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> float:
    """Tokens on their way to their experts and back."""
    assert model.experts is not None
    sent = memory.residual_bytes(model, training, layout) * model.experts.per_token / layout.tensor
    return 2 * expert_exchange_s(site, calibration, layout, sent)


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
    size, effective = layout.num_shares, replica_link(site, calibration, layout)
    num_params = device_layer_params(model, layout)
    weights = ring_bytes("all-gather", num_params * memory.element_bytes(training.precision), size)
    gradients = ring_bytes("reduce-scatter", num_params * memory.gradient_bytes(training.precision), size)
    gather = effective.seconds(weights) if training.zero == 3 else 0.0
    beside = calibration.overlap_fraction if training.overlap else 0.0
    backward = layer.input_grad_s + layer.weight_grad_s
    return Times(
        max(0.0, gather - beside * layer.forward_s),
        max(0.0, gather + effective.seconds(gradients) - beside * backward),
        0.0,
    )


def device_layer_params(model: Model, layout: Layout) -> float:
    """Parameters of one layer on one device, before ZeRO divides them."""
    return (model.num_layer_params - model.num_expert_params * (1 - 1 / layout.expert)) / layout.tensor


def linear_times(model: Model, training: Training, layout: Layout, speed: Speed) -> Times:
    """Linear maps of attention and MLP, and the traffic of what lies between them."""
    tokens = memory.microbatch_tokens(training, layout)
    products = (
        *flops.attention_linear(model, tokens, layout.tensor),
        *flops.mlp_linear(model, tokens, layout.tensor, layout.expert),
    )
    kept = memory.linear_activation_bytes(model, training, layout)
    return _product_times(products, speed) + _traffic_times(_passes(training, speed.calibration) * kept, speed)


def _passes(training: Training, calibration: Calibration) -> float:
    """Factor on the traffic of what lies between matrix products."""
    return calibration.eager_traffic if training.kernels == "eager" else 1.0


def _product_times(products: tuple[Product, ...], speed: Speed) -> Times:
    return Times(
        speed.products_s(products),
        speed.products_s(product.input_grad() for product in products),
        speed.products_s(product.weight_grad() for product in products),
    )


def _traffic_times(kept_bytes: float, speed: Speed) -> Times:
    return Times(speed.traffic_s(FORWARD_PASSES * kept_bytes), speed.traffic_s(BACKWARD_PASSES * kept_bytes), 0.0)


def attention_core_times(model: Model, training: Training, layout: Layout, speed: Speed) -> Times:
    """Scores, softmax and context; the gradients of all of them belong to the input gradient.

    Flash attention computes the scores once more in the backward and never puts them into memory.
    """
    scores, context = flops.attention_core(
        model, layout.microbatch_size, training.sequence_length, layout.tensor, layout.context
    )
    if training.flash_attention:
        forward = CAUSAL_HALF * (speed.multiply_s(scores) + speed.multiply_s(context))
        backward = CAUSAL_HALF * (2 * speed.multiply_s(scores) + 3 * speed.multiply_s(context))
        return Times(forward, backward, 0.0)
    forward = speed.products_s((scores, context))
    backward = speed.products_s((scores, context, context, context))
    matrix = scores.count * scores.rows * scores.columns * speed.element_bytes
    there, back = _score_passes(training, speed.calibration)
    return Times(forward, backward, 0.0) + Times(speed.traffic_s(there * matrix), speed.traffic_s(back * matrix), 0.0)


def _score_passes(training: Training, calibration: Calibration) -> tuple[float, float]:
    """Passes of the scores through memory in forward and backward; dropout reads and writes them once more."""
    more = 1 if training.dropout else 0
    if training.precision == "fp32":
        return calibration.eager_score_passes + more, calibration.eager_score_grad_passes + 2 * more
    return calibration.score_passes + more, 2 * (calibration.score_passes + more)


def residual_collective_s(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration
) -> float:
    """One all-reduce of the residual stream over the tensor-parallel devices."""
    return tensor_collective_s(site, calibration, layout, memory.residual_bytes(model, training, layout))


def launch_s(layout: Layout, calibration: Calibration) -> float:
    """The host's time for the forward of one layer."""
    collectives = COLLECTIVES_PER_PASS if layout.tensor > 1 else 0
    return calibration.layer_launch_s + collectives * calibration.collective_launch_s


def embedding_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    """Looking rows up and adding their gradients up is traffic; the vocabulary is divided, so the rows are reduced."""
    speed = core_speed(training, site.device, calibration)
    rows = memory.residual_bytes(model, training, layout)
    collective = residual_collective_s(model, training, layout, site, calibration)
    return Times(speed.traffic_s(2 * rows) + collective, 0.0, speed.traffic_s(3 * rows))


def head_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    """The logits, the loss over them in 32 bit, and one reduction of the gradient that goes back; never recomputed."""
    speed = core_speed(training, site.device, calibration)
    tokens = memory.microbatch_tokens(training, layout)
    loss = speed.traffic_s(calibration.loss_passes * 4 * tokens * model.vocab_size / layout.tensor)
    collective = residual_collective_s(model, training, layout, site, calibration)
    products = flops.head_linear(model, tokens, layout.tensor)
    return _product_times(products, speed) + Times(loss, loss + collective, 0.0)
