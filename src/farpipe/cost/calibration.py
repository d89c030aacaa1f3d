"""How much of its nominal speed a device reaches: a few constants of one law, from the catalogue's efficiency.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from farpipe.spec import Device

REFERENCE: Final = "a100-80gb"
"""The device that the law was fitted on."""


@dataclass(frozen=True)
class Calibration:
    """The constants of the law; `tested` tells whether they were compared with measured steps of this device."""

    matrix_fraction: float
    """Share of the peak rate that an endless matrix product reaches."""
    wave_elements: float
    """Elements of a result that the device works on at once; a product of as many takes twice its ideal time."""
    depth_elements: float
    """Inner size at which filling and draining a tile takes as long as its multiplications."""
    memory_fraction: float
    """Share of the nominal memory bandwidth."""
    machine_link_fraction: float
    """Share of the nominal rate inside a machine that collectives reach."""
    site_link_fraction: float
    """Share of the nominal rate between machines."""
    collective_start_s: float
    """Start of one collective."""
    hidden_collective_fraction: float
    """Share of the backward's tensor-parallel collectives that runs beside products of weight gradients."""
    layer_launch_s: float
    """The host's time to launch one layer's forward; its backward takes twice that."""
    collective_launch_s: float
    """What one collective adds to it."""
    action_overhead_s: float
    """Fixed time of one F or I besides its computation."""
    step_overhead_s: float
    """Fixed time of one optimizer step."""
    loss_passes: float
    """How often the loss reads or writes the 32-bit logits, in each direction."""
    tested: bool
    source: str


def calibration_of(device: Device) -> Calibration:
    """The constants of `device`: its own row, or the reference's scaled to its peak rate and marked untested.

    What a device works on at once is taken to grow with its peak rate; all else is relative and is kept.
    """
    rows = _rows()
    reference = Calibration(**rows[REFERENCE])
    if device.name in rows:
        return Calibration(**(rows[REFERENCE] | {"tested": False} | rows[device.name]))
    scale = max(device.peak_flops.values()) / _reference_peak()
    return Calibration(
        **(
            vars(reference)
            | {
                "wave_elements": reference.wave_elements * scale,
                "tested": False,
                "source": f"the law of {REFERENCE}, scaled to the peak rate of {device.name}",
            }
        )
    )


def _reference_peak() -> float:
    from farpipe.catalog import device_row

    return max(device_row(REFERENCE).peak_flops.values())


@cache
def _rows() -> Mapping[str, dict[str, Any]]:
    file = resources.files("farpipe.catalog").joinpath("efficiency.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))
