"""Limits of farpipe's own engine, stated once: `plan` tells it, `train` plans under it."""

from typing import TYPE_CHECKING, Any, Final

from farpipe.cost import settle
from farpipe.spec import Job, Pins, Training

if TYPE_CHECKING:
    from farpipe.plan.plan import Plan

RUNNABLE: Final[dict[str, int]] = {"tensor": 1, "context": 1, "expert": 1}
"""Degrees that the engine can run no other value of: it does not divide layers over devices."""
SEARCHED: Final = ("tensor",)
"""Those of them that the planner chooses where the user does not."""
RUNNABLE_ZERO: Final = ("auto", 0, 1)
TRAINABLE: Final = ("fp32", "bf16")
"""Precisions without loss scaling."""
PLANNED_ONLY: Final = ("experts", "latent_attention", "attention_bias", "qk_norm", "attention_sinks")
"""Keys of a model that only the cost model knows."""


def training_obstacles(training: Training) -> dict[str, str]:
    """The part of a training that the engine can't run, as ``training.dropout = true``, and what to say instead."""
    found = {}
    if training.precision not in TRAINABLE:
        found[f'training.precision = "{training.precision}"'] = 'training.precision = "bf16"'
    if training.zero not in RUNNABLE_ZERO:
        found[f"training.zero = {training.zero}"] = "training.zero = 1"
    if training.dropout:
        found["training.dropout = true"] = "training.dropout = false"
    if training.matmul != "same":
        found[f'training.matmul = "{training.matmul}"'] = 'training.matmul = "same"'
    if training.cuda_graphs:
        found["training.cuda_graphs = true"] = "training.cuda_graphs = false"
    return found


def plan_obstacle(plan: "Plan") -> tuple[str, str]:
    """The part of a plan that the engine can't run, and the key of the job to change; both empty where it can run all.

    There is nothing to change where only the cost model knows the model.
    """
    model = [f"model.{key}" for key in PLANNED_ONLY if getattr(plan.job.model, key)]
    degrees = [key for key in RUNNABLE if getattr(plan.layout, key) != RUNNABLE[key]]
    of_training = training_obstacles(settle(plan.job.training, plan.layout))
    layout = {f"{key} = {getattr(plan.layout, key)}": f"layout.{key} = {RUNNABLE[key]}" for key in degrees}
    if plan.unlike:
        layout = {"ranks or replicas that differ": "no layout.groups", **layout}
    changes = layout | of_training
    return ", ".join([*model, *changes]), "" if model else ", ".join(changes.values())


def within_engine(job: Job) -> tuple[Job, str]:
    """The job with what the user left open pinned to what the engine can run, and these pins in words.

    A degree that the user has pinned to another value stays, as do groups of replicas; `plan_obstacle` tells of it.
    """
    open_keys = [key for key in SEARCHED if getattr(job.layout, key) is None and not job.layout.groups]
    pinned: dict[str, Any] = {key: RUNNABLE[key] for key in open_keys}
    alike = {"replicas": None} if job.layout.replicas == "unlike" else {}
    layout: Pins = job.layout.model_copy(update=pinned | alike)
    told = ", ".join(f"layout.{key} = {value}" for key, value in pinned.items())
    return job.model_copy(update={"layout": layout}), told
