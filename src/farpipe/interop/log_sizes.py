"""Sizes that a training's log tells of, beside those of the job that it is held against: devices, degrees, precision.

A log of other devices, another layout or another model is no measurement of the job: then no error of a prediction is
told.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.spec import Job
from farpipe.planning import Plan

Sizes = dict[str, Any]
"""Sizes by key of the job (`num_devices` and `num_params` are of all of it)."""

_DOTTED: Final = re.compile(r"\b(\w+) \.{3,} (\S+)")
"""A line of the arguments that Megatron-LM and DeepSpeed print."""
_DEGREES: Final = {
    "tensor": ("tensor_model_parallel_size", "tensor", "tp"),
    "pipeline": ("pipeline_model_parallel_size", "pipeline", "pp"),
    "context": ("context_parallel_size", "context", "cp"),
    "data": ("data_parallel_size", "data"),
    "expert": ("expert_model_parallel_size", "expert", "ep"),
}
_ARGUMENTS: Final = {name: key for key, (name, *_) in _DEGREES.items()} | {
    "micro_batch_size": "microbatch_size",
    "train_micro_batch_size_per_gpu": "microbatch_size",
    "num_attention_heads": "num_heads",
    "world_size": "num_devices",
    "params_dtype": "precision",
    "fp8": "matmul",
}
_PRECISIONS: Final = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_FIRST_LINE: Final = re.compile(r"\b(tensor|pipeline|context|data|expert)-(?:model-)?parallel[ -]size: (\d+)")
_MESH: Final = re.compile(r"\b(pp|dp\w*|cp|tp|ep)=(\d+)")
_NAMED_MESH: Final = re.compile(r"device mesh with [\[(]([^\])]*)[\])], [\[(]([\d, ]+)[\])]")
_WHOLE: Final = (
    ("num_params", re.compile(r"\bsize: ([\d,]+) total parameters")),
    ("global_batch", re.compile(r"Total train batch size \(w\. parallel.*\) = ([\d,]+)")),
)
"""torchtitan's model; the batch of transformers' Trainer, whose parameters may be those of a shard."""
_BILLIONS: Final = re.compile(r"Total number of parameters in billions: ([\d.]+)")
TELLING: Final = r"\.{3} |parallel[ -]size|total param|in billions|Total train"
"""Words of which every line has one that has a size."""
_PARAMS_APART: Final = 0.02
"""Share by which numbers of parameters may differ: logs count a padded vocabulary, and round."""


def sizes_in(line: str) -> Sizes:
    """The sizes in a line of a log."""
    found: Sizes = {}
    if "..." in line and (match := _DOTTED.search(line)):
        found |= dict(_argument(match[1], match[2]))
    if "parallel" in line:
        found |= {key: int(size) for key, size in _FIRST_LINE.findall(line)}
    if "device mesh" in line:
        found |= _mesh(line)
    for key, pattern in _WHOLE:
        if match := pattern.search(line):
            found[key] = int(match[1].replace(",", ""))
    if match := _BILLIONS.search(line):
        found["num_params"] = round(float(match[1]) * 1e9)
    return found


def _argument(name: str, value: str) -> Iterator[tuple[str, Any]]:
    key = _ARGUMENTS.get(name)
    if key == "precision":
        known = _PRECISIONS.get(value.removeprefix("torch."))
        yield from [(key, known)] if known else []
    elif key == "matmul":
        yield key, "same" if value in ("None", "False") else "fp8"
    elif key is not None and value.isdecimal():
        yield key, int(value)


def _mesh(line: str) -> Sizes:
    """Degrees of torchtitan's device mesh; replicas and shards of them are `data`."""
    pairs = [(name, int(size)) for name, size in _MESH.findall(line)]
    if match := _NAMED_MESH.search(line):
        names = re.findall(r"\w+", match[1])
        pairs = list(zip(names, map(int, re.findall(r"\d+", match[2])), strict=False))
    degrees = {key: next((size for name, size in pairs if name in names), 1) for key, names in _DEGREES.items()}
    if not pairs or any("_ep" in name for name, _ in pairs):  # parts of data that experts share
        return {}
    for name, size in pairs:
        degrees["data"] *= size if name.startswith("dp") else 1
    return degrees


def pinned_by(sizes: Mapping[str, Any], job: Job) -> tuple[Job, str]:
    """The job with the degrees and the microbatch that it leaves open and its log tells of, and these in words."""
    pins = {key: sizes[key] for key in _DEGREES if key in sizes and getattr(job.layout, key) is None}
    told, training = [f"layout.{key} = {value}" for key, value in pins.items()], job.training
    size = sizes.get("microbatch_size")
    if size and training.microbatch_size is None and job.data.packing is None:
        training = training.model_copy(update={"microbatch_size": size})
        told.append(f"training.microbatch_size = {size}")
    layout = job.layout.model_copy(update=pins)
    return job.model_copy(update={"layout": layout, "training": training}), ", ".join(told)


def sizes_of(job: Job) -> Sizes:
    """The sizes of a job that its file says, by which its log can be known."""
    at, training, model = job.layout, job.training, job.model
    degrees = (at.pipeline or 1) * (at.tensor or 1) * (at.context or 1) * (at.data or 1)
    all_devices = sum(site.num_devices for _, site in job.used_sites())
    given = {key: getattr(at, key) for key in _DEGREES} | {
        "num_devices": degrees if at.data else all_devices,
        "microbatch_size": training.microbatch_size,
        "num_params": None if training.lora else model.num_params,
    }
    given |= {key: getattr(training, key) for key in ("global_batch", "sequence_length", "precision", "matmul")}
    given |= {key: getattr(model, key) for key in ("num_layers", "hidden", "num_heads")}
    return {key: value for key, value in given.items() if value is not None}


def sizes_of_plan(plan: Plan) -> Sizes:
    """The sizes of a plan, none of them open."""
    degrees = {key: getattr(plan.layout, key) for key in _DEGREES}
    known = {"num_devices": sum(plan.devices.values())}
    if plan.job.data.packing is None:
        known["microbatch_size"] = plan.layout.microbatch_size
    return sizes_of(plan.job) | degrees | known


def differences(log: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(the log's, the job's) of every size that both have and that is not the same."""
    both = {key: (log[key], job[key]) for key in job if key in log}
    return {key: pair for key, pair in both.items() if not _is_same(key, *pair)}


def _is_same(key: str, found: Any, known: Any) -> bool:
    if key == "num_params":
        return bool(abs(found - known) <= _PARAMS_APART * known)
    is_close = key == "matmul" and ((found, known) == ("same", "tf32") or ("fp8" in found and "fp8" in known))
    return bool(found == known) or is_close  # Megatron-LM's fp8 has its recipe in another argument


class OtherTrainingError(InputError):
    """A log of other sizes than the job's (exit 3): there is no error of a prediction to tell."""

    def __init__(self, source: str, found: Mapping[str, tuple[Any, Any]]) -> None:
        """`found`: as of `differences`."""
        self.found = dict(found)
        lines = "".join(f"\n  {key}: {log} in the log, {job} in the job" for key, (log, job) in found.items())
        super().__init__(
            f"{source}: the log is of another training, so the two can't be compared:{lines}\ngive the job of this "
            "log, or change these in the job (`farpipe import` reads the settings that it ran with)"
        )


def expect_same(log: Mapping[str, Any], job: Mapping[str, Any], source: str) -> None:
    """OtherTrainingError where the log tells of other sizes than the job."""
    if found := differences(log, job):
        raise OtherTrainingError(source, found)
