"""Seconds of what a layer's devices exchange: tensor parallelism's sums, and tokens on their way to experts."""

from dataclasses import dataclass
from typing import Final

from farpipe.core.spec import Model, Site, Training
from farpipe.planning.cost import flops, memory
from farpipe.planning.cost.calibration import Calibration
from farpipe.planning.cost.layout import Layout
from farpipe.planning.cost.speed import Speed
from farpipe.planning.cost.transfer import expert_exchange_s, tensor_collective_s

COLLECTIVES_PER_PASS: Final = 2


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


def residual_collective_s(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration
) -> float:
    """One all-reduce of the residual stream over the tensor-parallel devices."""
    return tensor_collective_s(site, calibration, layout, memory.residual_bytes(model, training, layout))


def exchange_times(model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration) -> Times:
    """All-reduces of tensor parallelism and, with experts, tokens on their way to them and back.

    Megatron-LM computes W beside the backward's all-reduces (LinearWithGradAccumulationAndAsyncCommunication); DTensor
    waits for each, and adapters beside frozen weights have no W.
    """
    collective = COLLECTIVES_PER_PASS * residual_collective_s(model, training, layout, site, calibration)
    waits = training.by_pytorch or training.lora is not None
    beside_w = 0.0 if waits else calibration.hidden_collective_fraction
    exposed = Times(collective, collective * (1 - beside_w), 0.0)
    if training.tp_comm_overlap and layout.tensor > 1 and model.experts is None:
        exposed = _overlapped(model, training, layout, site, calibration, exposed)
    if model.experts is None:
        return exposed
    both_ways = layer_expert_exchange_s(model, training, layout, site, calibration)
    return exposed + Times(both_ways, both_ways, 0.0)


def hidden_exchange(sent_s: float, beside: Times, calibration: Calibration) -> Times:
    """Gain, as negative seconds, of tokens that travel for `sent_s` in the forward and in the backward beside another
    microbatch's computation, which they slow by `overlap_slowdown` of the hidden time."""
    hidden = min(2 * sent_s, beside.forward_s + beside.input_grad_s + beside.weight_grad_s)
    gained = hidden * (1 - calibration.overlap_slowdown) / 2
    return Times(-gained, -gained, 0.0)


def _overlapped(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration, whole: Times
) -> Times:
    """Exposed seconds of tensor-parallel collectives that run beside the products, part by part (Transformer Engine).

    A product over t devices has t parts. Gathering its input goes on beside all parts but the last, the device's own
    being first; scattering the sum of its result beside all but the first, and the last part's is left. In the backward
    of trained weights that goes for what does not run beside W already; of frozen ones the gathers alone are divided.
    """
    speed = Speed.of(site.device, calibration, training.precision, training.matmul)
    tokens, parts = memory.microbatch_tokens(training, layout), layout.tensor
    maps = (*flops.attention_linear(model, tokens, parts), *flops.mlp_linear(model, tokens, parts))
    beside = (parts - 1) / parts / 2 * speed.products_s(maps)
    half = whole.forward_s / 2
    gathered, scattered = max(0.0, half - beside), max(half / (parts - 1), half - beside)
    if training.lora is not None:
        return Times(gathered + scattered, gathered + half, 0.0)
    return Times(gathered + scattered, min(whole.input_grad_s, gathered + scattered), 0.0)


def layer_expert_exchange_s(
    model: Model, training: Training, layout: Layout, site: Site, calibration: Calibration
) -> float:
    """Tokens on their way to their experts and back."""
    assert model.experts is not None
    sent = memory.residual_bytes(model, training, layout) / layout.tensor
    once = training.moe_token_dispatcher_type == "flex"
    return 2 * expert_exchange_s(site, calibration, layout, sent, model.experts, once=once)
