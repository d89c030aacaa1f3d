"""Profiles of which only some parts were measured: the cost model gives the others, and divides whole backwards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from farpipe.core.spec import Job, Site
from farpipe.planning.cost import compute, memory
from farpipe.planning.cost.calibration import calibration_of
from farpipe.planning.cost.exchange import Times
from farpipe.planning.cost.layout import Layout, settle
from farpipe.planning.cost.profile import PartTimes, Profile, model_shape

_MODELLED: Final = {
    "embedding": compute.embedding_times,
    "layer": compute.layer_times,
    "head": compute.head_times,
}


@dataclass(frozen=True)
class MeasuredPart:
    """Seconds of one microbatch through a layer, the embedding or the head."""

    forward_s: float
    backward_s: float
    weight_grad_s: float | None = None
    """Part of the backward that W takes; None: the share that it has in the cost model."""

    def times(self, modelled: Times) -> Times:
        """F, I and W; `modelled` are the cost model's."""
        share = modelled.weight_grad_s / (modelled.input_grad_s + modelled.weight_grad_s)
        weight_s = self.backward_s * share if self.weight_grad_s is None else self.weight_grad_s
        return Times(self.forward_s, self.backward_s - weight_s, weight_s)


def completed_profile(job: Job, site: Site, measured: Mapping[str, MeasuredPart]) -> Profile:
    """Profile of the site's device from `measured` parts, by name; the fixed time of an action is in them.

    Recomputation that the job leaves open was none when they were measured.
    """
    training = job.training
    training = training.model_copy(update={"recompute": "none"}) if training.recompute == "auto" else training
    size, calibration = training.microbatch_size or 1, calibration_of(site.device)
    layout = Layout(pipeline=1, data=1, tensor=1, virtual=1, microbatch_size=size, num_microbatches=1)
    parts = {}
    for name, law in _MODELLED.items():
        times = law(job.model, settle(training, layout), layout, site, calibration)
        times = measured[name].times(times) if name in measured else times
        seconds = {
            "forward_s": times.forward_s,
            "input_grad_s": times.input_grad_s,
            "weight_grad_s": times.weight_grad_s,
        }
        parts[name] = PartTimes.model_validate(seconds)
    speed = site.device.memory_bandwidth_bytes_per_s * calibration.memory_fraction
    return Profile(
        device=site.device.name,
        shape=model_shape(job.model),
        precision=training.precision,
        recompute=training.recompute,
        microbatch_size=size,
        sequence_length=training.sequence_length,
        embedding=parts["embedding"],
        layer=parts["layer"],
        head=parts["head"],
        optimizer_s_per_param=memory.adam_bytes(training) / speed,
        action_overhead_s=0.0,
    )
