"""What farpipe's own engine can run, stated once: `plan` tells it, `train` plans under it."""

from typing import Any, Final

from farpipe.cost import Layout
from farpipe.spec import Job, Model, Pins, Training

RUNNABLE: Final[dict[str, int]] = {"tensor": 1, "context": 1, "expert": 1}
"""Degrees that the engine can run no other value of: it does not divide layers over devices."""
SEARCHED: Final = ("tensor",)
"""Those of them that the planner chooses where the user does not."""
RUNNABLE_ZERO: Final = ("auto", 0, 1)
PLANNED_ONLY: Final = ("experts", "latent_attention", "attention_bias", "qk_norm", "attention_sinks")
"""Keys of a model that only the cost model knows."""


def engine_obstacle(layout: Layout) -> str:
    """What of a layout the engine can't run, as ``tensor = 8``; empty where it can run all of it."""
    return ", ".join(f"{key} = {getattr(layout, key)}" for key in RUNNABLE if getattr(layout, key) != RUNNABLE[key])


def training_obstacle(model: Model, training: Training) -> str:
    """What of a model and its training the engine can't run, as ``training.dropout = True``; empty if nothing."""
    found = [f"model.{key}" for key in PLANNED_ONLY if getattr(model, key)]
    found += [f"training.zero = {training.zero}"] if training.zero not in RUNNABLE_ZERO else []
    found += ["training.dropout = true"] if training.dropout else []
    found += [f'training.matmul = "{training.matmul}"'] if training.matmul != "same" else []
    return ", ".join(found)


def within_engine(job: Job) -> tuple[Job, str]:
    """The job with what the user left open pinned to what the engine can run, and these pins in words.

    A degree that the user has pinned to another value stays; `engine_obstacle` tells of it.
    """
    open_keys = [key for key in SEARCHED if getattr(job.layout, key) is None]
    pinned: dict[str, Any] = {key: RUNNABLE[key] for key in open_keys}
    layout: Pins = job.layout.model_copy(update=pinned)
    told = ", ".join(f"layout.{key} = {value}" for key, value in pinned.items())
    return job.model_copy(update={"layout": layout}), told
