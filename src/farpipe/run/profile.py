"""Measure what the stages of a model take on this machine: ``farpipe profile``. Needs no torch in this process.

As many processes as there will be ranks here measure at the same time, so that what they share (memory bandwidth,
caches, cores) is shared in the figures as well.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

from farpipe.cost.profile import PartTimes, Profile, model_shape
from farpipe.errors import FarpipeError
from farpipe.run.launch import launch
from farpipe.runtime.run_spec import DeviceKind
from farpipe.spec import Model, Training
from farpipe.spec.part import Part, Positive, Text
from farpipe.strict import parse_json, read_text, validate, write_text

REQUEST_NAME: Final = "request.json"
KINDS: Final = ("forward_s", "input_grad_s", "weight_grad_s")


class ProfileRequest(Part):
    """What the measuring processes are asked to measure."""

    model: Model
    training: Training
    device: DeviceKind
    seconds: Positive
    """How long the stacks are run."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file that `profile` has written."""
        return validate(cls, parse_json(read_text(path), str(path)), str(path))


class StackTimes(Part):
    """What one process measured: seconds of one microbatch through small stacks, by name and kind."""

    one_layer: dict[Text, float]
    three_layers: dict[Text, float]
    embedding_and_layer: dict[Text, float]
    layer_and_head: dict[Text, float]
    optimizer_s_per_param: float


STACK_NAMES: Final = ("one_layer", "three_layers", "embedding_and_layer", "layer_and_head")


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
    found = _measure(request, num_processes)
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


def _measure(request: ProfileRequest, num_processes: int) -> list[StackTimes]:
    """What every process measured. Their logs stay when one of them fails, for the error names them."""
    folder = Path(tempfile.mkdtemp(prefix="farpipe-profile-"))
    keep = False
    try:
        write_text(folder / REQUEST_NAME, request.model_dump_json())
        command = [sys.executable, "-m", "farpipe.run.profile_main", str(folder)]
        launch(lambda _: command, num_processes, log_dir=folder)
        return [_load_times(folder / f"rank-{rank}.json") for rank in range(num_processes)]
    except FarpipeError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _load_times(path: Path) -> StackTimes:
    return validate(StackTimes, json.loads(read_text(path)), str(path))


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
