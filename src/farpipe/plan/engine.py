"""Limits of farpipe's own engine, stated once: `plan` tells it, `train` plans under it."""

from typing import TYPE_CHECKING, Any, Final

from farpipe.cost import settle
from farpipe.errors import InputError
from farpipe.plan.candidates import context_degrees, tensor_degrees
from farpipe.spec import Job, Model, Pins, Training
from farpipe.spec.hugging_face import type_of

if TYPE_CHECKING:
    from farpipe.plan.plan import Plan

RUNNABLE: Final[dict[str, int]] = {"tensor": 1, "context": 1, "expert": 1}
"""Degrees that the engine can run no other value of, but for tensor parallelism of some models."""
WITH_TENSOR: Final = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi", "phi3"),
    *("gpt_neox", "starcoder2", "glm4", "smollm3"),
)
"""Types of transformers' models whose layers the engine divides over tensor-parallel processes, each tested."""
SEARCHED: Final = ("tensor", "context")
"""Degrees of RUNNABLE that the planner chooses where the user does not."""
TRAINABLE: Final = ("fp32", "bf16")
"""Precisions without loss scaling."""
PLANNED_ONLY: Final = ("experts", "latent_attention", "attention_bias", "qk_norm", "attention_sinks", "mtp_num_layers")
"""Keys of a model that only the cost model knows; transformers and users' modules know more."""


def training_obstacles(training: Training, *, shares_weights: bool) -> dict[str, str]:
    """The part of a training that the engine can't run, as ``training.dropout = true``, and what to say instead.

    `shares_weights`: whether replicas of this model can share its weights, as with ZeRO-2 and 3.
    """
    found = {}
    if training.precision not in TRAINABLE:
        found[f'training.precision = "{training.precision}"'] = 'training.precision = "bf16"'
    if training.zero in (2, 3) and not shares_weights:
        found[f"training.zero = {training.zero}"] = "training.zero = 1"
    if training.dropout:
        found["training.dropout = true"] = "training.dropout = false"
    if training.matmul != "same":
        found[f'training.matmul = "{training.matmul}"'] = 'training.matmul = "same"'
    if training.lora is not None:
        found["training.lora"] = "a training of all weights, without training.lora"
    if training.activation_func_fp8_input_store:
        name = "training.activation_func_fp8_input_store"
        found[f"{name} = true"] = f"{name} = false"
    if training.grad_reduce_in_fp32 is False and training.precision != "fp16":
        found["training.grad_reduce_in_fp32 = false"] = "training.grad_reduce_in_fp32 = true"
    if training.cpu_offloading_num_layers:
        found[f"training.cpu_offloading_num_layers = {training.cpu_offloading_num_layers}"] = (
            "training.cpu_offloading_num_layers = 0"
        )
    if training.cuda_graphs:
        found["training.cuda_graphs = true"] = "training.cuda_graphs = false"
    return found


def plan_obstacle(plan: "Plan") -> tuple[str, str]:
    """The part of a plan that the engine can't run, and the key of the job to change; both empty where it can run all.

    There is nothing to change where only the cost model knows the model.
    """
    is_ours = plan.job.model.hugging_face is None and plan.job.model.module is None
    special = PLANNED_ONLY if is_ours else ()
    model = [f"model.{key}" for key in special if getattr(plan.job.model, key)]
    free = ("tensor",) if divides_layers(plan.job) else ()
    degrees = [key for key in RUNNABLE if getattr(plan.layout, key) != RUNNABLE[key] and key not in free]
    shares_weights, training = not is_ours and plan.job.data.packing is None, settle(plan.job.training, plan.layout)
    of_training = training_obstacles(training, shares_weights=shares_weights)
    layout = {f"{key} = {getattr(plan.layout, key)}": f"layout.{key} = {RUNNABLE[key]}" for key in degrees}
    if free and plan.layout.tensor > 1:
        layout |= _tensor_obstacles(plan.job.model, training, plan.layout.tensor)
    changes = layout | of_training
    return ", ".join([*model, *changes]), "" if model else ", ".join(changes.values())


def divides_layers(job: Job) -> bool:
    """True if the engine trains this job's model with tensor parallelism, which needs sequence parallelism, too."""
    folder = job.model.hugging_face
    if folder is None or job.data.packing is not None:
        return False
    try:
        return type_of(folder) in WITH_TENSOR
    except InputError:  # a plan that is read where the folder is not
        return False


def _tensor_obstacles(model: Model, training: Training, tensor: int) -> dict[str, str]:
    """Obstacles to dividing layers over `tensor` processes, and what to say instead."""
    found = {}
    if training.sequence_parallel is not True:
        found["training.sequence_parallel = false"] = "training.sequence_parallel = true"
    shared = {"training.sequence_length": training.sequence_length, "model.num_kv_heads": model.num_kv_heads}
    for name, count in shared.items():
        if count % tensor:
            found[f"tensor = {tensor}, which does not divide {name} = {count}"] = "layout.tensor = 1"
    return found


def _may_choose_tensor(job: Job) -> bool:
    """True if the engine can run every tensor degree that the planner may choose."""
    if not divides_layers(job) or job.training.sequence_parallel is False:
        return False
    degrees = tensor_degrees(job, [site for _, site in job.used_sites()])
    training = job.training.model_copy(update={"sequence_parallel": True})
    return not any(_tensor_obstacles(job.model, training, degree) for degree in degrees)


def within_engine(job: Job) -> tuple[Job, str]:
    """The job with what the user left open pinned to what the engine can run, and these pins in words.

    A degree that the user has pinned to another value stays; `plan_obstacle` tells of it.
    """
    shares = len(context_degrees(job, job.cluster.num_devices)) > 1
    free = ("tensor",) if _may_choose_tensor(job) else ()
    open_keys = [key for key in SEARCHED if getattr(job.layout, key) is None and (shares or key != "context")]
    open_keys = [key for key in open_keys if key not in free]
    pinned: dict[str, Any] = {key: RUNNABLE[key] for key in open_keys}
    layout: Pins = job.layout.model_copy(update=pinned)
    told = ", ".join(f"layout.{key} = {value}" for key, value in pinned.items())
    return job.model_copy(update={"layout": layout}), told
