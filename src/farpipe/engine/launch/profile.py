"""Measure what a model's stages, or chunks, take here: ``farpipe profile``. Needs no torch in this process.

As many processes as there will be ranks here measure at the same time, so that what they share (memory bandwidth,
caches, cores) is shared in the figures as well.
"""

import os
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, Final, NamedTuple, Self

import numpy as np

from farpipe.core.errors import RunError
from farpipe.core.spec import Model, Training
from farpipe.core.strict import validate
from farpipe.engine.launch.launcher import launch
from farpipe.engine.run_settings import DeviceKind
from farpipe.engine.stages.profile_request import KINDS, STACK_NAMES, ChunkTimes, ProfileRequest, StackTimes
from farpipe.planning.cost.chunk_laws import Floats, Law, fit_law
from farpipe.planning.cost.chunk_profile import ChunkProfile, MeasuredLaw, PartCosts
from farpipe.planning.cost.profile import PartTimes, Profile, model_shape

REQUEST_VARIABLE: Final = "FARPIPE_PROFILE_REQUEST"
"""Environment variable with the measuring processes' request."""
ATTEMPTS: Final = 2
"""Measurements, each twice as long as the one before, until noise hides no part."""
RESOLUTION: Final = 0.01
"""Share of one layer's time below which a difference is noise."""
_UNSEEN: Final = 3
"""One point in this number is kept from the fits, to measure their error."""


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
    Where noise hides a part it measures again, for longer. Raises InputError for a precision that doesn't train here,
    RunError when a process dies (out of memory), or a layer or the head still can't be distinguished from noise.
    """
    microbatch_size = microbatch_size or training.microbatch_size or 1
    training = training.model_copy(update={"microbatch_size": microbatch_size, "global_batch": microbatch_size})
    for attempt in range(ATTEMPTS):
        request = ProfileRequest(model=model, training=training, device=device, seconds=seconds * 2**attempt)
        found = [validate(StackTimes, times, f"process {n}") for n, times in enumerate(measure(request, num_processes))]
        parts = part_times(found)
        if not parts["at_most"]:
            break
    _expect_measured(parts["at_most"])
    return Profile(
        device=device_name,
        shape=model_shape(model),
        precision=training.precision,
        recompute="none" if training.recompute == "auto" else training.recompute,
        microbatch_size=microbatch_size,
        sequence_length=training.sequence_length,
        optimizer_s_per_param=median(times.optimizer_s_per_param for times in found),
        **parts,
        cpu_share=min(times.cpu_share for times in found),
    )


def _expect_measured(hidden: Sequence[str]) -> None:
    """RunError where noise hid what takes much of a step."""
    lost = [name for name in hidden if not name.startswith("embedding")]
    if lost:
        raise RunError(
            f"nothing was written: {', '.join(lost)} came out as 0 s or less, {ATTEMPTS} times; other work on this "
            "machine hides it: measure while it does nothing else, or with a larger training.microbatch_size"
        )


def share_cores(num_processes: int) -> bool:
    """True if these processes have less than a core each."""
    return num_processes > len(os.sched_getaffinity(0))


def measure(request: ProfileRequest, num_processes: int) -> list[Any]:
    """Return every process's measurements, as JSON data; the request says whether the processes share cores."""
    request = request.model_copy(update={"share_cores": share_cores(num_processes)})
    command = [sys.executable, "-m", "farpipe.engine.launch.profile_main"]
    environment = {REQUEST_VARIABLE: request.model_dump_json()}
    return launch(lambda _: command, num_processes, log_dir=None, env=environment)


def part_times(found: list[StackTimes]) -> dict[str, Any]:
    """The times of the parts from those of the stacks, each the median over the processes.

    A layer is half of what three take more than one; embedding and head are what they add to one layer; what then
    remains of one layer's F and I is the fixed time of an action. Noise can make a small difference negative: then the
    figure is in `at_most`, and it is as much as the noise was seen to be, RESOLUTION of a layer at least.
    """
    parts: dict[str, dict[str, float]] = {"embedding": {}, "layer": {}, "head": {}}
    fixed, hidden = list[float](), list[str]()
    for kind in KINDS:
        one, three, embedding, head = (median(getattr(t, name)[kind] for t in found) for name in STACK_NAMES)
        for part, seconds in (("embedding", embedding - one), ("layer", (three - one) / 2), ("head", head - one)):
            parts[part][kind] = seconds if seconds > 0 else max(-seconds, RESOLUTION * one)
            hidden += [f"{part}.{kind}"] if seconds <= 0 else []
        fixed += [one - parts["layer"][kind]] if kind != "weight_grad_s" else []
    overhead = max(sum(fixed) / len(fixed), 0.0)
    times = {name: PartTimes(**times) for name, times in parts.items()}
    return times | {"action_overhead_s": overhead, "at_most": tuple(hidden)}


def profile_chunks(
    model: Model,
    training: Training,
    device_name: str,
    *,
    device: DeviceKind = "cpu",
    num_processes: int = 1,
    seconds: float = 20.0,
) -> ChunkProfile:
    """The laws of chunks with `num_processes` processes measuring at once, for `seconds` and start-up.

    Raises InputError for a precision that doesn't train here, RunError when a process dies (out of memory).
    """
    request = ProfileRequest(model=model, training=training, device=device, seconds=seconds, sequences=True)
    found = [validate(ChunkTimes, times, "process") for times in measure(request, num_processes)]
    return chunk_profile(found, model, training, device_name)


def chunk_profile(found: list[ChunkTimes], model: Model, training: Training, device_name: str) -> ChunkProfile:
    """The laws fitted to what the processes measured, each slice the median over the processes.

    A layer is half of what three take more than one, the embedding and the head what they add to one layer, what then
    remains of one layer is the fixed time of an action.
    """
    forward, backward, held = _fit(found, "forward"), _fit(found, "backward"), _Held.of(found)
    parts = {
        name: PartCosts(
            forward=MeasuredLaw.of(forward.laws[name]),
            backward=MeasuredLaw.of(backward.laws[name]),
            held_bytes=max(0.0, size),
        )
        for name, size in held.parts.items()
    }
    return ChunkProfile(
        device=device_name,
        shape=model_shape(model),
        precision=training.precision,
        longest=int(max(found[0].tokens)),
        boundary_bytes=held.between,
        recomputed_bytes=held.recomputed,
        slice_bytes=held.of_slice,
        recomputed_slice_bytes=held.recomputed_slice,
        action_forward_s=forward.action_s,
        action_backward_s=backward.action_s,
        errors=forward.errors | backward.errors,
        cpu_share=min(times.cpu_share for times in found),
        **parts,
    )


class _Held(NamedTuple):
    """Bytes per token between forward and backward."""

    parts: dict[str, float]
    """Bytes of the layer, the embedding and the head."""
    between: float
    """The part of one layer's bytes that further layers do not add."""
    recomputed: float
    of_slice: float
    recomputed_slice: float

    @classmethod
    def of(cls, found: list[ChunkTimes]) -> Self:
        held = {name: median(times.held_bytes[name] for times in found) for name in found[0].held_bytes}
        layer = max(0.0, (held["three_layers"] - held["one_layer"]) / 2)
        between = max(0.0, held["one_layer"] - layer)
        parts = {
            "layer": layer,
            "embedding": held["embedding_and_layer"] - layer,
            "head": held["layer_and_head"] - layer,
        }
        stacks = ("recomputed", "three_layers_of_a_slice", "recomputed_slice")
        return cls(parts, between, *(max(0.0, (held[stack] - between) / 3) for stack in stacks))


class _Fit(NamedTuple):
    """Laws of the layer, the embedding and the head, for forwards or for backwards."""

    laws: dict[str, Law]
    action_s: float
    """Fixed time of an action."""
    errors: dict[str, float]
    """Errors at the slices that the fit did not see."""


def _fit(found: list[ChunkTimes], kind: str) -> _Fit:
    one_process = found[0]
    tokens, pairs = np.array(one_process.tokens), np.array(one_process.pairs)
    split_pairs, calls = np.array(one_process.split_pairs), np.array(one_process.further_calls)
    seen = np.arange(tokens.size) % _UNSEEN != _UNSEEN - 1
    one, three, embedding, head = (_medians(found, kind, name) for name in _NAMES)
    layer = fit_law(tokens[seen], pairs[seen], (three - one)[seen] / 2, split_pairs[seen], calls[seen])
    laws = {"layer": layer}
    for name, stack in (("embedding", embedding), ("head", head)):
        laws[name] = fit_law(tokens[seen], np.zeros(int(seen.sum())), (stack - one)[seen])
    layer_s = layer.seconds(tokens, pairs, split_pairs, calls)
    action_s = max(0.0, median((one - layer_s)[seen].tolist()))
    off = np.abs((3 * layer_s + action_s) / three - 1)[~seen]
    return _Fit(laws, action_s, {f"{kind}, mean": float(off.mean()), f"{kind}, largest": float(off.max())})


_NAMES: Final = ("one_layer", "three_layers", "embedding_and_layer", "layer_and_head")


def _medians(found: list[ChunkTimes], kind: str, stack: str) -> Floats:
    rows = [times.forward_s[stack] if kind == "forward" else times.backward_s[stack] for times in found]
    return np.asarray(np.median(np.array(rows), axis=0))
