"""Rates that a device reaches in products and in memory traffic, by number format."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Device, Matmul, Precision, Training, rate_name
from farpipe.planning.cost import memory
from farpipe.planning.cost.calibration import Calibration
from farpipe.planning.cost.flops import Product

FULL_HEAD: Final = 128
"""Width of an attention head from which on flash attention reaches its full rate."""


@dataclass(frozen=True)
class Speed:
    """Rates that one device reaches, in one precision."""

    calibration: Calibration
    peak_flops_per_s: float
    flops_per_s: float
    bytes_per_s: float
    element_bytes: int
    wave_elements: float
    depth_elements: float
    attention_share: float
    """Share of the peak that flash attention reaches; 0: that of products as small as its blocks."""

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
            device.peak_flops[rate],
            device.peak_flops[rate] * calibration.fraction(rate),
            device.memory_bandwidth_bytes_per_s * calibration.memory_fraction,
            memory.element_bytes(precision),
            0.0 if plain else calibration.wave_elements,
            0.0 if plain else calibration.depth_elements,
            calibration.attention_fraction,
        )

    def multiply_s(self, product: Product) -> float:
        """Seconds of the arithmetic of one product."""
        return product.flops / self.flops_per_s * self.idle(product) * self.drain(product)

    def idle(self, product: Product) -> float:
        """Factor on a product's time for units that its result leaves idle."""
        return 1 + self.wave_elements / (product.count * product.rows * product.columns)

    def drain(self, product: Product) -> float:
        """Factor on a product's time for filling and draining tiles."""
        return 1 + self.depth_elements / product.depth

    def attend_s(self, product: Product, head_dim: int) -> float:
        """Seconds of the arithmetic of one of flash attention's products, whose results stay on the chip.

        Heads narrower than 128 do less arithmetic for each exponential: 64 wide ones reach about 0.7 of the rate (arXiv
        2407.08608, figures 5 to 7).
        """
        reached = self.attention_share * min(1.0, head_dim / FULL_HEAD) ** 0.5
        return product.flops / (self.peak_flops_per_s * reached) if reached else self.multiply_s(product)

    def product_s(self, product: Product) -> float:
        """Seconds of one product whose factors and result are in memory."""
        return max(self.multiply_s(product), self.traffic_s(product.elements * self.element_bytes))

    def products_s(self, products: Iterable[Product]) -> float:
        """Seconds of several products, one after the other."""
        return sum(map(self.product_s, products))

    def traffic_s(self, num_bytes: float) -> float:
        """Seconds to move `num_bytes` to or from memory."""
        return num_bytes / self.bytes_per_s


def peak_flops_per_s(device: Device, training: Training) -> float:
    """Dense FLOP/s of a device at the rate of the training's matrix products, which MFU is a share of."""
    return device.peak_flops[rate_name(training.precision, training.matmul)]


def core_speed(training: Training, device: Device, calibration: Calibration) -> Speed:
    """The speed of everything but the layers' linear maps: attention and head only where that is asked for."""
    return Speed.of(device, calibration, training.precision, "tf32" if training.matmul == "tf32" else "same")


def head_speed(training: Training, device: Device, calibration: Calibration) -> Speed:
    """The speed of the head's products."""
    if training.fp8_output_proj:
        return Speed.of(device, calibration, training.precision, training.matmul)
    return core_speed(training, device, calibration)


def attention_speed(training: Training, device: Device, calibration: Calibration) -> Speed:
    """The speed of attention by its kernel; on 8-bit numbers of the 8-bit peak the share of the 16-bit one."""
    kernel = training.attention_kernel or ("sdpa" if training.kernels == "eager" else None)
    speed = core_speed(training, device, calibration)
    speed = replace(speed, attention_share=calibration.attention_share(kernel))
    if not training.fp8_dot_product_attention:
        return speed
    peak = Speed.of(device, calibration, training.precision, "fp8").peak_flops_per_s
    return replace(speed, peak_flops_per_s=peak, flops_per_s=peak * calibration.matrix_fraction)
