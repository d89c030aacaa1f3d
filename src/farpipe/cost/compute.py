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
from farpipe.cost.transfer import tensor_collective_s
from farpipe.errors import InfeasibleError
from farpipe.spec import Device, Model, Precision, Site, Training

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
    """What one device really does in a second, in one precision."""

    calibration: Calibration
    flops_per_s: float
    bytes_per_s: float
    element_bytes: int

    @classmethod
    def of(cls, device: Device, calibration: Calibration, precision: Precision) -> "Speed":
        """InfeasibleError when the device has no such precision."""
        if precision not in device.peak_flops:
            raise InfeasibleError(
                f"device {device.name!r} has no {precision}; choose one of {', '.join(sorted(device.peak_flops))}"
            )
        return cls(
            calibration,
            device.peak_flops[precision] * calibration.matrix_fraction,
            device.memory_bandwidth_bytes_per_s * calibration.memory_fraction,
            memory.element_bytes(precision),
        )

    def multiply_s(self, product: Product) -> float:
        """Seconds of the arithmetic of one product."""
        idle = 1 + self.calibration.wave_elements / (product.count * product.rows * product.columns)
        drain = 1 + self.calibration.depth_elements / product.depth
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


def layer_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    """One layer for one microbatch; what is recomputed is part of the input gradient."""
    speed = Speed.of(site.device, calibration, training.precision)
    linear = linear_times(model, training, layout, speed)
    core = attention_core_times(model, training, layout, speed)
    collective = COLLECTIVES_PER_PASS * residual_collective_s(model, training, layout, site, calibration)
    exposed = collective * (1 - calibration.hidden_collective_fraction)
    launch = launch_s(layout, calibration)
    forward = max(linear.forward_s + core.forward_s + collective, launch)
    backward = linear + core + Times(0.0, exposed, 0.0)
    stretch = max(1.0, 2 * launch / (backward.input_grad_s + backward.weight_grad_s))
    again = {"selective": core.forward_s, "full": forward}.get(training.recompute, 0.0)
    return Times(forward, backward.input_grad_s * stretch + again, backward.weight_grad_s * stretch)


def linear_times(model: Model, training: Training, layout: Layout, speed: Speed) -> Times:
    """Linear maps of attention and MLP, and the traffic of what lies between them."""
    tokens = memory.microbatch_tokens(training, layout)
    products = (
        *flops.attention_linear(model, tokens, layout.tensor),
        *flops.mlp_linear(model, tokens, layout.tensor),
    )
    kept = memory.linear_activation_bytes(model, training, layout)
    return _product_times(products, speed) + _traffic_times(kept, speed)


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
    scores, context = flops.attention_core(model, layout.microbatch_size, training.sequence_length, layout.tensor)
    if training.flash_attention:
        forward = CAUSAL_HALF * (speed.multiply_s(scores) + speed.multiply_s(context))
        backward = CAUSAL_HALF * (2 * speed.multiply_s(scores) + 3 * speed.multiply_s(context))
        return Times(forward, backward, 0.0)
    kept = memory.score_activation_bytes(model, training, layout)
    forward = speed.products_s((scores, context))
    backward = speed.products_s((scores, context, context, context))
    return Times(forward, backward, 0.0) + _traffic_times(kept, speed)


def residual_collective_s(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration
) -> float:
    """One all-reduce of the residual stream over the tensor-parallel devices."""
    return tensor_collective_s(site, calibration, layout, memory.boundary_bytes(model, training, layout))


def launch_s(layout: Layout, calibration: Calibration) -> float:
    """The host's time for the forward of one layer."""
    collectives = COLLECTIVES_PER_PASS if layout.tensor > 1 else 0
    return calibration.layer_launch_s + collectives * calibration.collective_launch_s


def embedding_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    """Looking rows up and adding their gradients up is traffic; the vocabulary is divided, so the rows are reduced."""
    speed = Speed.of(site.device, calibration, training.precision)
    rows = memory.boundary_bytes(model, training, layout)
    collective = residual_collective_s(model, training, layout, site, calibration)
    return Times(speed.traffic_s(2 * rows) + collective, 0.0, speed.traffic_s(3 * rows))


def head_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    """The logits, the loss over them in 32 bit, and one reduction of the gradient that goes back; never recomputed."""
    speed = Speed.of(site.device, calibration, training.precision)
    tokens = memory.microbatch_tokens(training, layout)
    loss = speed.traffic_s(calibration.loss_passes * 4 * tokens * model.vocab_size / layout.tensor)
    collective = residual_collective_s(model, training, layout, site, calibration)
    products = flops.head_linear(model, tokens, layout.tensor)
    return _product_times(products, speed) + Times(loss, loss + collective, 0.0)
