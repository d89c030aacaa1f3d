"""Use of a plan's devices (FLOP/s, MFU), and what a number of tokens takes with it."""

from dataclasses import dataclass
from typing import Any

from farpipe.cost import causal_share, step_flops
from farpipe.cost.speed import peak_flops_per_s
from farpipe.plan import Plan
from farpipe.plan.quote import money_data
from farpipe.units import (
    counted,
    format_about,
    format_count,
    format_flops,
    format_hours,
    format_large,
    format_percent,
    format_seconds,
)


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


def of_a_device(plan: Plan, device: str | None = None) -> dict[str, Any]:
    """`device_flops`, `causal_share`, `device_peak` and `num_devices` of a RunView, `device` as in RunSpec; no
    FLOPs with `data.packing`, where they follow from the documents of each step, nor of a module of the user's own."""
    if device == "sleep":
        return {}
    use = use_of(plan)
    if plan.job.data.packing is not None or plan.job.model.module is not None:
        return {"num_devices": use.num_devices}
    names = {site.device.name for site in plan.job.cluster.sites}
    as_planned = device in (None, "cuda") or names == {device}
    flops = {"device_flops": use.step_flops / use.num_devices, "num_devices": use.num_devices}
    flops |= {"causal_share": use.causal_share}
    return flops | ({"device_peak": use.peak_flops_per_s / use.num_devices} if as_planned else {})


def use_line(plan: Plan) -> str:
    """Devices of a plan, the rate of each and MFU, in one line; with `data.packing` FLOPs follow from each batch."""
    use = use_of(plan)
    if plan.job.data.packing is not None:
        return counted(use.num_devices, "device")
    return f"{use.num_devices} devices, {format_flops(use.flops_per_device_s)} each ({use.mfu_text})"


def cost_line(plan: Plan, num_tokens: float | None) -> str:
    """Time, device-hours and money of `num_tokens`, by default the job's, in one line."""
    use, training = use_of(plan), plan.job.training
    of_a_step = training.tokens_per_step if plan.job.data.packing is None else use.tokens_per_s * use.step_s
    tokens = num_tokens or training.num_steps * of_a_step
    what = f"{format_large(tokens)} tokens in steps" if num_tokens else f"{format_count(training.num_steps)} steps"
    took = f"{format_seconds(tokens / use.tokens_per_s)}, {format_hours(use.device_hours(tokens))} device-hours"
    step = format_about(use.step_s, is_rough=plan.is_rough)
    return f"{what} of {step} take {took}, {_price(plan, tokens)}"


def _price(plan: Plan, num_tokens: float) -> str:
    """USD of `num_tokens`, at least that where a rent or an egress has no price."""
    per_million = money_data(plan)["per_million_tokens"]
    if not per_million["total_usd"]:
        return "no prices given"
    missing = {word.split()[0] for word in per_million["unpriced"]} & {"rent", "egress"}
    return f"{'at least ' if missing else ''}{format_hours(per_million['total_usd'] * num_tokens / 1e6)} USD"
