"""Measure what the stages of a model take on this machine: ``farpipe profile``. Needs no torch in this process.

As many processes as there will be ranks here measure at the same time, so that what they share (memory bandwidth,
caches, cores) is shared in the figures as well.
"""

import sys
from statistics import median
from typing import Any, Final

from farpipe.cost.profile import PartTimes, Profile, model_shape
from farpipe.run.launch import launch
from farpipe.runtime.profile_request import KINDS, STACK_NAMES, ProfileRequest, StackTimes
from farpipe.runtime.run_spec import DeviceKind
from farpipe.spec import Model, Training
from farpipe.strict import validate

REQUEST_VARIABLE: Final = "FARPIPE_PROFILE_REQUEST"
"""Environment variable with the measuring processes' request."""


def profile(
    model: Model,
    training: Training,
    device_name: str,
    *,
    device: DeviceKind = "cpu",
    microbatch_size: int | None = None,
    num_processes: int = 1,
    seconds: float = 6.0,
) -> Profile:
    """The times of `model`'s parts with `num_processes` processes measuring at once, for `seconds` and start-up.

    `device_name` is what the cluster calls this device; `microbatch_size` is the training's if not given, else 1.
    Raises InputError for a precision that doesn't train here, RunError when a process dies (out of memory).
    """
    microbatch_size = microbatch_size or training.microbatch_size or 1
    training = training.model_copy(update={"microbatch_size": microbatch_size, "global_batch": microbatch_size})
    request = ProfileRequest(model=model, training=training, device=device, seconds=seconds)
    found = [validate(StackTimes, times, f"process {n}") for n, times in enumerate(measure(request, num_processes))]
    return Profile(
        device=device_name,
        shape=model_shape(model),
        precision=training.precision,
        recompute="none" if training.recompute == "auto" else training.recompute,
        microbatch_size=microbatch_size,
        sequence_length=training.sequence_length,
        optimizer_s_per_param=median(times.optimizer_s_per_param for times in found),
        **part_times(found),
    )


def measure(request: ProfileRequest, num_processes: int) -> list[Any]:
    """Return every process's measurements, as JSON data."""
    command = [sys.executable, "-m", "farpipe.run.profile_main"]
    environment = {REQUEST_VARIABLE: request.model_dump_json()}
    return launch(lambda _: command, num_processes, log_dir=None, env=environment)


def part_times(found: list[StackTimes]) -> dict[str, Any]:
    """The times of the parts from those of the stacks, each the median over the processes.

    A layer is half of what three take more than one; embedding and head are what they add to one layer; what then
    remains of one layer's F and I is the fixed time of an action. Noise can make a small difference negative: zero.
    """
    parts: dict[str, dict[str, float]] = {"embedding": {}, "layer": {}, "head": {}}
    fixed = []
    for kind in KINDS:
        one, three, embedding, head = (median(getattr(t, name)[kind] for t in found) for name in STACK_NAMES)
        layer = max((three - one) / 2, 0.0)
        parts["embedding"][kind], parts["head"][kind] = max(embedding - one, 0.0), max(head - one, 0.0)
        parts["layer"][kind] = layer
        fixed += [one - layer] if kind != "weight_grad_s" else []
    overhead = max(sum(fixed) / len(fixed), 0.0)
    return {name: PartTimes(**times) for name, times in parts.items()} | {"action_overhead_s": overhead}
