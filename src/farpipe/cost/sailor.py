"""Reading the profiles of Sailor (eth-easl/sailor, MIT licence): seconds of every layer of a model on a device.

Its file has tables ``{model: {device: {microbatch size: {tensor degree: {layer: [forward, backward, update]}}}}}``.
Layer 0 is the embedding, the last one the head; a final norm that stands between is counted to the head. It tells the
backward as a whole: in a Profile the gradients of inputs and weights are taken to share it in halves, which no order
without split backward depends on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farpipe.cost.profile import PartTimes, Profile, model_shape
from farpipe.errors import InputError
from farpipe.spec import Model, Training
from farpipe.strict import nearest, parse_json, read_text

Rows = Sequence[Sequence[float]]


def import_sailor(
    path: Path | str,
    model_name: str,
    device_name: str,
    model: Model,
    training: Training,
    device: str,
    tensor: int = 1,
) -> Profile:
    """The Profile of the table called `model_name` and `device_name`, for `model` on the job's `device`.

    Of the microbatch sizes that were measured with this tensor degree the training's is taken, or the largest.
    InputError names what is missing, or a table whose number of layers is not the model's.
    """
    tables = parse_json(read_text(path), str(path))
    sizes = _table(_table(tables, model_name, "model", path), device_name, "device", path)
    whole = _of_degree(sizes, tensor, f"{path}: {model_name}: {device_name}")
    if not whole:
        where = "one device" if tensor == 1 else f"{tensor} devices"
        raise InputError(
            f"{path}: {model_name}: {device_name}: nothing was measured on {where} (tensor degree {tensor})"
        )
    wanted = training.microbatch_size
    size = wanted if wanted in whole else max(whole)
    rows = _rows(whole[size], f"{path}: {model_name}: {device_name}: {size}")
    before, after = 1, len(rows) - 1 - model.num_layers
    if after not in (1, 2):
        raise InputError(
            f"{path}: {model_name}: {len(rows)} layers with embedding and head; the job's model has {model.num_layers}"
        )
    layers, end = rows[before : before + model.num_layers], rows[before + model.num_layers :]
    return Profile(
        device=device,
        shape=model_shape(model),
        precision=training.precision,
        recompute="none",
        microbatch_size=size,
        sequence_length=training.sequence_length,
        embedding=_part([rows[0]]),
        layer=_part(layers, len(layers)),
        head=_part(end),
        optimizer_s_per_param=sum(row[2] for row in layers) * tensor / (len(layers) * model.num_layer_params),
        action_overhead_s=0.0,
        tensor=tensor,
    )


def _table(tables: Any, name: str, what: str, path: Path | str) -> Mapping[str, Any]:
    if not isinstance(tables, dict):
        raise InputError(f"{path}: expected tables of Sailor's profiler")
    if name not in tables:
        raise InputError(f"{path}: there is no {what} {name!r}{nearest(name, tables)}; it has {', '.join(tables)}")
    found: Mapping[str, Any] = tables[name]
    return found


def _of_degree(sizes: Any, tensor: int, place: str) -> dict[int, Any]:
    """The tables of layers by microbatch size."""
    try:
        return {int(size): degrees[str(tensor)] for size, degrees in sizes.items() if str(tensor) in degrees}
    except (AttributeError, TypeError, ValueError):
        raise InputError(f"{place}: expected tables by microbatch size and tensor degree") from None


def _rows(layers: Mapping[str, Any], place: str) -> Rows:
    try:
        rows = [[float(cell) for cell in layers[key]] for key in sorted(layers, key=int)]
    except (TypeError, ValueError):
        raise InputError(f"{place}: expected numbers of layers with forward, backward and update") from None
    if not rows or any(len(row) != 3 or min(row) < 0 for row in rows):
        raise InputError(f"{place}: expected three times for every layer, none negative")
    return rows


def _part(rows: Rows, count: int = 1) -> PartTimes:
    forward, backward = (sum(row[column] for row in rows) / count for column in (0, 1))
    return PartTimes(forward_s=forward, input_grad_s=backward / 2, weight_grad_s=backward / 2)
