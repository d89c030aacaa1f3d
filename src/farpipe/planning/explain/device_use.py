"""Use of a plan's devices: FLOP/s achieved and at most (MFU), and device-hours."""

from dataclasses import dataclass

from farpipe.core.units import format_percent
from farpipe.planning.cost import causal_share, step_flops
from farpipe.planning.cost.speed import peak_flops_per_s
from farpipe.planning.planner.plan import Plan


@dataclass(frozen=True)
class DeviceUse:
    """Rates of a plan's devices, as achieved and at most."""

    num_devices: int
    step_flops: float
    """FLOPs of the model in one step; what is computed twice counts once, attention in full."""
    causal_share: float
    """Share of them that is left where attention counts only what its causal mask keeps."""
    peak_flops_per_s: float
    """Peak of all devices together, dense, at the rate of the matrix products."""
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

    @property
    def mfu_text(self) -> str:
        """Both MFUs in words."""
        full = self.model_flops_utilisation
        causal = format_percent(full * self.causal_share)
        return (
            f"MFU {format_percent(full)} with attention in full, as torchtitan counts it; {causal} with its causal half"
        )

    def device_hours(self, num_tokens: float) -> float:
        """Hours of one device for `num_tokens`, in steps as predicted."""
        return num_tokens / self.tokens_per_s * self.num_devices / 3600


def use_of(plan: Plan) -> DeviceUse:
    """The use that `plan` makes of its devices."""
    job, training = plan.job, plan.job.training
    peaks = {site.name: peak_flops_per_s(site.device, training) for site in job.cluster.sites}
    return DeviceUse(
        sum(plan.devices.values()),
        step_flops(job.model, training.sequence_length, training.global_batch, frozen=training.lora is not None),
        causal_share(job.model, training.sequence_length, frozen=training.lora is not None),
        sum(number * peaks[name] for name, number in plan.devices.items()),
        plan.prediction.step_s,
        plan.prediction.tokens_per_s,
    )
