"""Requests of jobs to the planner: what a job.toml says about its speed is in the kind, and so in the quote."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from farpipe.core.catalog import model_row
from farpipe.core.errors import InputError
from farpipe.core.spec import Job, Model, Request, load_job, load_model, preset_model
from farpipe.core.strict import parse_toml, read_text, seen_from, validate
from farpipe.fleet.job import Kind

SUFFIXES: Final = (".json", ".toml")
_IN_KIND: Final = frozenset({"sequence_length", "global_batch", "num_steps"})
_TIMELESS: Final = frozenset(
    {
        *("learning_rate", "betas", "weight_decay", "clip_norm", "seed"),
        *("warmup_steps", "decay", "decay_steps", "final_learning_rate"),
        *("evaluate_every_steps", "evaluation_batches"),
        *("checkpoint_every_steps", "checkpoint_every_minutes", "keep_checkpoints"),
    }
)
"""Keys of [training] that change no step's time: jobs that differ in them alone share their quotes."""


def read_kind(text: str, folder: Path, length: int | None, batch: int | None) -> tuple[Kind, int | None]:
    """Kind of a job whose model is called `text`, and the number of steps that its file says, if it does.

    `text` is a preset, or a file seen from `folder`: a config of Hugging Face (.json), a TOML with [model], or a job,
    whose other tables count too; a sequence `length` and a `batch` that are given replace the job's. ValueError, or
    InputError in a file, says what is wrong.
    """
    if Path(text).suffix not in SUFFIXES:
        return Kind(model_row(text).name, *_both(length, batch, text)), None
    path = seen_from(folder, text)
    table = parse_toml(read_text(path), str(path)) if path.suffix == ".toml" else {}
    if {"model", "training"} <= table.keys():
        given = {"training.sequence_length": length, "training.global_batch": batch}
        job = load_job(path, {key: value for key, value in given.items() if value is not None})
        return kind_of(job, path.name), job.training.num_steps
    model, sizes = load_model(path), _both(length, batch, text)
    return Kind(_name(model, path.name), *sizes, request=_text({"model": model.model_dump()})), None


def kind_of(job: Job, name: str = "custom") -> Kind:
    """Kind of a job as its job.toml describes it, its cluster apart; `name`: of its model, if that has none.

    InputError where it pins sites, which are the fleet's choice.
    """
    if job.layout.sites is not None:
        raise InputError("layout.sites: the fleet chooses the sites; leave it out")
    training = job.training.model_dump(exclude_defaults=True, exclude=set(_IN_KIND | _TIMELESS))
    given: dict[str, Any] = {"model": job.model.model_dump(), "training": training}
    given["layout"] = job.layout.model_dump(exclude_defaults=True)
    if job.data.packing is not None:
        given["data"] = job.data.model_dump(exclude_defaults=True)
    if job.schedule is not None:
        given["schedule"] = job.schedule
    used = {key: value for key, value in given.items() if value}
    sizes = job.training.sequence_length, job.training.global_batch
    return Kind(_name(job.model, name), *sizes, request=_text(used))


@lru_cache(maxsize=1024)
def request_of(kind: Kind) -> Request:
    """The request to the planner for a kind of job; one object for a kind while it is in use."""
    given: dict[str, Any] = json.loads(kind.request) if kind.request else {"model": preset_model(kind.model)}
    sizes = {"sequence_length": kind.sequence_length, "global_batch": kind.global_batch}
    return validate(Request, given | {"training": given.get("training", {}) | sizes}, f"a job with {kind.model}")


def model_of(kind: Kind) -> Model:
    """The model of a kind of job."""
    return request_of(kind).model


def _both(length: int | None, batch: int | None, text: str) -> tuple[int, int]:
    if length is None or batch is None:
        raise ValueError(f"{text} does not say sequence_length and global_batch, as a job.toml would; give both")
    return length, batch


def _name(model: Model, name: str) -> str:
    return name if model.name == "custom" else model.name


def _text(given: dict[str, Any]) -> str:
    return json.dumps(given, sort_keys=True, separators=(",", ":"), allow_nan=False)
