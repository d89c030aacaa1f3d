"""Profiles from the times that stand in a job: what was not measured is modelled, and so is how a backward divides."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from farpipe.cost import compute, memory
from farpipe.cost.calibration import Calibration, calibration_of
from farpipe.cost.compute import Times
from farpipe.cost.layout import Layout, settle
from farpipe.cost.profile import PartTimes, Profile, model_shape
from farpipe.spec import Job, Measured, Site, Training
from farpipe.spec.measured import MeasuredPart
from farpipe.units import format_percent

_MODELLED: Final = {
    "embedding": compute.embedding_times,
    "layer": compute.layer_times,
    "head": compute.head_times,
}


def profiles_of(job: Job) -> tuple[Profile, ...]:
    """A Profile of every device that `job` has measured times of; times of one device, so only for tensor degree 1."""
    return tuple(device.profile() for device in _devices(job))


def tell_measured(job: Job, replaced: Collection[str] = ()) -> Iterator[str]:
    """Assumptions about the measured times of `job`, for people; `replaced` devices are left out."""
    for device in (device for device in _devices(job) if device.site.device.name not in replaced):
        for part, table in device.tables.items():
            if table.backward_s is not None:
                share = device.input_share(table)
                yield (
                    f"The measured backward of the {part} on {table.device} is divided as the cost model divides it: "
                    f"{format_percent(share)} gradient of the input, {format_percent(1 - share)} of the weights."
                )


def _devices(job: Job) -> Iterator["_Device"]:
    """Every measured device of the cluster, at the first site that has it."""
    for name in dict.fromkeys(table.device for table in job.measured):
        site = next((site for site in job.cluster.sites if site.device.name == name), None)
        if site is not None:
            tables = {table.part: table for table in job.measured if table.device == name}
            yield _Device(job, site, tables, calibration_of(site.device))


@dataclass(frozen=True)
class _Device:
    """The measured times of one device, by what was measured."""

    job: Job
    site: Site
    tables: dict[MeasuredPart, Measured]
    calibration: Calibration

    def profile(self) -> Profile:
        """Times of the layer's microbatch; the fixed time of an action is part of what was measured."""
        size = self.tables["layer"].microbatch_size
        speed = self.site.device.memory_bandwidth_bytes_per_s * self.calibration.memory_fraction
        return Profile(
            device=self.site.device.name,
            shape=model_shape(self.job.model),
            precision=self._training.precision,
            recompute=self._training.recompute,
            microbatch_size=size,
            sequence_length=self._training.sequence_length,
            embedding=self._part("embedding", size),
            layer=self._part("layer", size),
            head=self._part("head", size),
            optimizer_s_per_param=memory.adam_bytes(self._training.precision) / speed,
            action_overhead_s=0.0,
        )

    def input_share(self, table: Measured) -> float:
        """The gradient of the input's share of the modelled backward."""
        times = self._modelled(table.part, table.microbatch_size)
        return times.input_grad_s / (times.input_grad_s + times.weight_grad_s)

    def _part(self, part: MeasuredPart, size: int) -> PartTimes:
        table = self.tables.get(part)
        if table is None:
            times = self._modelled(part, size)
        else:
            times = self._measured(table).times(size / (table.microbatch_size * table.num_layers))
        return PartTimes(forward_s=times.forward_s, input_grad_s=times.input_grad_s, weight_grad_s=times.weight_grad_s)

    def _measured(self, table: Measured) -> Times:
        if table.backward_s is None:
            return Times(table.forward_s, table.input_grad_s or 0.0, table.weight_grad_s or 0.0)
        share = self.input_share(table)
        return Times(table.forward_s, table.backward_s * share, table.backward_s * (1 - share))

    def _modelled(self, part: MeasuredPart, size: int) -> Times:
        layout = Layout(pipeline=1, data=1, tensor=1, virtual=1, microbatch_size=size, num_microbatches=1)
        training = settle(self._training, layout)
        return _MODELLED[part](self.job.model, training, layout, self.site, self.calibration)

    @property
    def _training(self) -> Training:
        """The training as it was measured: where recomputation is left open, without any."""
        training = self.job.training
        return training.model_copy(update={"recompute": "none"}) if training.recompute == "auto" else training
