"""Measure what chunks of sequences take and hold on this machine: ``farpipe profile --sequences``."""

from statistics import median
from typing import Final, NamedTuple

import numpy as np

from farpipe.cost.chunk_laws import Floats, Law, fit_law
from farpipe.cost.chunk_profile import ChunkProfile, MeasuredLaw, PartCosts
from farpipe.cost.profile import model_shape
from farpipe.run.profile import measure
from farpipe.runtime.profile_request import ChunkTimes, ProfileRequest
from farpipe.runtime.run_spec import DeviceKind
from farpipe.spec import Model, Training
from farpipe.strict import validate

_UNSEEN: Final = 3
"""Of so many points one is kept from the fits, to tell how good they are."""


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
    forward, backward = (_fit(found, kind) for kind in ("forward", "backward"))
    held = {name: median(times.held_bytes[name] for times in found) for name in found[0].held_bytes}
    layer = max(0.0, (held["three_layers"] - held["one_layer"]) / 2)
    between = max(0.0, held["one_layer"] - layer)

    def of_layer(stack: str) -> float:
        return max(0.0, (held[stack] - between) / 3)

    sizes = {"layer": layer, "embedding": held["embedding_and_layer"] - layer, "head": held["layer_and_head"] - layer}
    parts = {
        name: PartCosts(
            forward=MeasuredLaw.of(forward.laws[name]),
            backward=MeasuredLaw.of(backward.laws[name]),
            held_bytes=max(0.0, size),
        )
        for name, size in sizes.items()
    }
    return ChunkProfile(
        device=device_name,
        shape=model_shape(model),
        precision=training.precision,
        longest=int(max(found[0].tokens)),
        boundary_bytes=between,
        recomputed_bytes=of_layer("recomputed"),
        slice_bytes=of_layer("three_layers_of_a_slice"),
        recomputed_slice_bytes=of_layer("recomputed_slice"),
        action_forward_s=forward.action_s,
        action_backward_s=backward.action_s,
        errors=forward.errors | backward.errors,
        **parts,
    )


class _Fit(NamedTuple):
    """Laws of the layer, the embedding and the head, for forwards or for backwards."""

    laws: dict[str, Law]
    action_s: float
    """Fixed time of an action."""
    errors: dict[str, float]
    """At the slices that the fit did not see."""


def _fit(found: list[ChunkTimes], kind: str) -> _Fit:
    tokens, pairs, split_pairs = (np.array(r) for r in (found[0].tokens, found[0].pairs, found[0].split_pairs))
    seen = np.arange(tokens.size) % _UNSEEN != _UNSEEN - 1
    one, three, embedding, head = (_medians(found, kind, name) for name in _NAMES)
    layer = fit_law(tokens[seen], pairs[seen], (three - one)[seen] / 2, split_pairs[seen])
    laws = {"layer": layer}
    for name, stack in (("embedding", embedding), ("head", head)):
        laws[name] = fit_law(tokens[seen], np.zeros(int(seen.sum())), (stack - one)[seen])
    layer_s = layer.seconds(tokens, pairs, split_pairs)
    action_s = max(0.0, median((one - layer_s)[seen].tolist()))
    off = np.abs((3 * layer_s + action_s) / three - 1)[~seen]
    return _Fit(laws, action_s, {f"{kind}, mean": float(off.mean()), f"{kind}, largest": float(off.max())})


_NAMES: Final = ("one_layer", "three_layers", "embedding_and_layer", "layer_and_head")


def _medians(found: list[ChunkTimes], kind: str, stack: str) -> Floats:
    rows = [times.forward_s[stack] if kind == "forward" else times.backward_s[stack] for times in found]
    return np.asarray(np.median(np.array(rows), axis=0))
