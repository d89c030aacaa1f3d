"""Use of a plan's devices (FLOP/s, MFU), and what a number of tokens takes with it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farpipe.plan import Plan


@dataclass(frozen=True)
class DeviceUse:
    """Rates of a plan's devices, as achieved and at most."""

    num_devices: int
    step_flops: float
    """FLOPs of the model in one step; what is computed twice counts once."""
    peak_flops_per_s: float
    """Of all devices together, dense."""
    step_s: float
    tokens_per_s: float

    @property
    def flops_per_device_s(self) -> float:
        """FLOP/s that one device achieves, mean over the devices."""
        return self.step_flops / self.step_s / self.num_devices

    @property
    def model_flops_utilisation(self) -> float:
        """MFU: what is achieved of the peak (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""
        return self.step_flops / self.step_s / self.peak_flops_per_s

    def device_hours(self, num_tokens: float) -> float:
        """Hours of one device for `num_tokens`, in steps as predicted."""
        return num_tokens / self.tokens_per_s * self.num_devices / 3600


def use_of(plan: "Plan") -> DeviceUse:
    """The use that `plan` makes of its devices."""
    from farpipe.cost import step_flops

    job = plan.job
    peaks = {site.name: site.device.peak_flops[job.training.precision] for site in job.cluster.sites}
    return DeviceUse(
        sum(plan.devices.values()),
        step_flops(job.model, job.training.sequence_length, job.training.global_batch),
        sum(number * peaks[name] for name, number in plan.devices.items()),
        plan.prediction.step_s,
        plan.prediction.tokens_per_s,
    )


def of_a_device(plan: "Plan", device: str | None = None) -> dict[str, Any]:
    """`device_flops`, `device_peak` and `num_devices` of a RunView, for `plan` on `device` (as in RunSpec)."""
    if device == "sleep":
        return {}
    use = use_of(plan)
    names = {site.device.name for site in plan.job.cluster.sites}
    as_planned = device in (None, "cuda") or names == {device}
    flops = {"device_flops": use.step_flops / use.num_devices, "num_devices": use.num_devices}
    return flops | ({"device_peak": use.peak_flops_per_s / use.num_devices} if as_planned else {})


def use_line(plan: "Plan", num_tokens: float | None) -> str:
    """MFU and rate per device in one line; then time and device-hours of `num_tokens`, by default the job's."""
    from farpipe.units import format_count, format_flops, format_hours, format_large, format_percent, format_seconds

    use, training = use_of(plan), plan.job.training
    tokens = num_tokens or training.num_steps * training.global_batch * training.sequence_length
    what = f"{format_large(tokens)} tokens" if num_tokens else f"{format_count(training.num_steps)} steps"
    return (
        f"{use.num_devices} devices, {format_flops(use.flops_per_device_s)} each (MFU "
        f"{format_percent(use.model_flops_utilisation)}); {what}: {format_seconds(tokens / use.tokens_per_s)}, "
        f"{format_hours(use.device_hours(tokens))} device-hours"
    )
