"""Efficiency of devices: a few constants of one law, from the catalogue's efficiency.toml."""

import datetime
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from farpipe.core.spec import Device, Rate

REFERENCE: Final = "a100-80gb"
"""The device that the law was fitted on."""
UNMEASURED: Final[dict[str, Any]] = {
    "measured": False,
    "num_rows": 0,
    "compared": (),
    "kinds": (),
    "longest": 8192,
    "attention_kernels": (),
}
"""Calibration of a device that was never compared."""

FITTED_REPLICAS: Final = 8
"""Replicas whose waiting for each other the constants contain."""


@dataclass(frozen=True)
class Calibration:
    """The constants of the law for one device."""

    matrix_fraction: float
    """Share of the 16-bit peak rate that an endless matrix product reaches."""
    tf32_fraction: float
    """The same of the TF32 rate."""
    fp32_fraction: float
    """The same of the plain 32-bit rate."""
    fp8_fraction: float
    """The same of the 8-bit rate; scaling and casting are part of it."""
    mxfp8_fraction: float
    """The same of the 8-bit rate with a scale for every 32 numbers."""
    nvfp4_fraction: float
    """The same of the 4-bit rate."""
    attention_fraction: float
    """Share of the 16-bit peak rate that the fastest kernel of attention reaches over long sequences; 0: that of
    products as small as its blocks."""
    attention_kernels: tuple[tuple[str, float], ...]
    """Names of the kernels that differ from it, and the same of these."""
    wave_elements: float
    """Elements of a result that the device works on at once; a product of as many takes twice its ideal time."""
    depth_elements: float
    """Inner size at which filling and draining a tile takes as long as its multiplications."""
    score_passes: float
    """Passes of the scores through memory in the forward without flash attention; twice that in the backward."""
    eager_score_passes: float
    """The same in 32 bit, for which Megatron-LM and apex have no fused softmax."""
    eager_score_grad_passes: float
    """Number of their passes in the backward then."""
    eager_traffic: float
    """Factor on the traffic between products in kernels of one operation each."""
    memory_fraction: float
    """Share of the nominal memory bandwidth."""
    machine_link_fraction: float
    """Share of the nominal rate inside a machine that collectives reach."""
    flex_link_fraction: float
    """The same that a token dispatcher made for experts reaches (``moe_token_dispatcher_type = "flex"``)."""
    machine_link_devices: float
    """Devices that have the whole rate at the same time; more of them share it (PCIe). 0: however many there are."""
    site_link_fraction: float
    """Share of the nominal rate between machines."""
    host_link_bytes_per_s: float
    """Rate of copies to the host's memory, and of those back, beside computation."""
    collective_start_s: float
    """Start of one collective."""
    hidden_collective_fraction: float
    """Share of the backward's tensor-parallel collectives that runs beside products of weight gradients."""
    overlap_fraction: float
    """Share of a rank's computing time beside which collectives of the replicas can run."""
    overlap_slowdown: float
    """Part of a hidden collective's time by which the computation beside it takes longer: it has fewer multiprocessors
    and less memory bandwidth meanwhile."""
    layer_launch_s: float
    """The host's time to launch one layer's forward; its backward takes twice that."""
    expert_launch_s: float
    """The host's time for a layer's experts in addition to it: router, permutation, exchange, grouped products."""
    expert_sync_s: float
    """Idle time of the device in a layer's forward after the host has asked how many tokens each expert gets."""
    collective_launch_s: float
    """The host's time for one collective and each of its devices: all wait for the slowest of their hosts."""
    softmax_launch_s: float
    """The host's time for a layer's softmax in addition where one kernel does not compute it."""
    action_overhead_s: float
    """Fixed time of one F or I besides its computation."""
    stage_change_s: float
    """The same in addition on ranks of several stages that wait for what they send (see `stage.changes_stages`)."""
    step_overhead_s: float
    """Fixed time of one optimizer step."""
    replica_lateness: float
    """Mean lateness of a replica, as a share of a step's computation; see `slowest`."""
    loss_passes: float
    """Number of times that the loss reads or writes the 32-bit logits, in each direction."""
    fused_loss_passes: float
    """The same where one kernel makes the loss and its gradient."""
    fused_loss: bool
    """True if trainings on the device do so unless they say otherwise."""
    measured: bool
    """True if steps or layers measured on this very device were compared with what the constants predict."""
    num_rows: int
    """Measurements of this device that the constants were fitted to; 0: none."""
    compared: tuple[Rate, ...]
    """Rates of matrix products that measurements of this very device were compared for."""
    kinds: tuple[str, ...]
    """Kinds of models and layouts that they had and that were met within 12 % in the mean, besides dense ones with
    whole sequences."""
    longest: int
    """Tokens of the longest sequences that they had; of the law's, where there are none."""
    source: str
    date: datetime.date

    def fraction(self, rate: Rate) -> float:
        """Share of the device's peak at `rate` that an endless product reaches."""
        return float(getattr(self, f"{rate}_fraction", self.matrix_fraction))

    def passes_of_loss(self, *, fused: bool | None) -> float:
        """Number of times that the 32-bit logits cross memory, in each direction; None: as is usual on the device."""
        return self.fused_loss_passes if (self.fused_loss if fused is None else fused) else self.loss_passes

    def slowest(self, num_replicas: int) -> float:
        """Share of a step's computation for which the slowest of `num_replicas` keeps the others waiting.

        Lateness is taken to be exponentially distributed, for its causes (hot devices, packets sent again, other
        processes) have a long tail: the mean of the largest of n such numbers is n's harmonic number of means. Up to
        FITTED_REPLICAS it is part of the other constants, which were fitted to steps of machines of so many devices.
        """
        return self.replica_lateness * (_harmonic(max(num_replicas, FITTED_REPLICAS)) - _harmonic(FITTED_REPLICAS))

    def attention_share(self, kernel: str | None) -> float:
        """Share of the 16-bit peak that a kernel of attention reaches; None: the fastest."""
        return dict(self.attention_kernels).get(kernel or "", self.attention_fraction)

    def crowd(self, num_devices: int) -> float:
        """Factor by which `num_devices` that talk inside a machine at once slow each other down."""
        return max(1.0, num_devices / self.machine_link_devices) if self.machine_link_devices else 1.0


def _harmonic(n: int) -> float:
    """1 + 1/2 + ... + 1/n, by Euler's expansion: within 1e-6 from 8 on."""
    return math.log(n) + 0.5772156649 + 1 / (2 * n) - 1 / (12 * n * n)


def calibration_of(device: Device) -> Calibration:
    """The constants of `device`: its own row, or the reference's scaled to its peak rate and marked as not measured.

    What a device works on at once is taken to grow with its peak rate; all else is relative and is kept.
    """
    rows = _rows()
    reference = Calibration(**rows[REFERENCE])
    if device.name in rows:
        return Calibration(**(rows[REFERENCE] | UNMEASURED | rows[device.name]))
    scale = max(device.peak_flops.values()) / _reference_peak()
    return Calibration(
        **(
            vars(reference)
            | {
                "wave_elements": reference.wave_elements * scale,
                **UNMEASURED,
                "source": f"the law of {REFERENCE}, scaled to the peak rate of {device.name}",
            }
        )
    )


def _reference_peak() -> float:
    from farpipe.core.catalog import device_row

    return max(device_row(REFERENCE).peak_flops.values())


@cache
def _rows() -> Mapping[str, dict[str, Any]]:
    file = resources.files("farpipe.core.catalog").joinpath("efficiency.toml")
    rows = tomllib.loads(file.read_text(encoding="utf-8"))
    lists = ("compared", "kinds")
    made = {name: row | {key: tuple(row.get(key, ())) for key in lists} for name, row in rows.items()}
    return {
        name: row | {"attention_kernels": tuple(row.get("attention_kernels", {}).items())} for name, row in made.items()
    }
