"""Limits of farpipe's own engine, stated once: `plan` tells it, `train` plans under it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product, starmap
from math import prod
from typing import TYPE_CHECKING, Any, Final

from farpipe.core.errors import InputError
from farpipe.core.spec import Job, Lora, Model, Training, possible_modules
from farpipe.core.spec.experts_by_number import kind_of
from farpipe.core.spec.hugging_face import balances_experts, quantization_of, type_of
from farpipe.core.spec.lora import PARTS
from farpipe.core.spec.recompute import OF_TRANSFORMERS, operations_of
from farpipe.planning.cost import Layout, settle
from farpipe.planning.planner.candidates import context_degrees, tensor_degrees
from farpipe.planning.planner.site_sets import identical

if TYPE_CHECKING:
    from farpipe.planning.planner.plan import Plan
    from farpipe.planning.workload import BatchPlan

RUNNABLE: Final[dict[str, int]] = {"tensor": 1, "context": 1, "expert": 1}
"""Degrees that the engine can run no other value of, but for those of some models."""
WITH_TENSOR: Final = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi", "phi3"),
    *("gpt_neox", "starcoder2", "glm4", "smollm3"),
)
"""Types of transformers' models whose layers the engine divides over tensor-parallel processes, each tested."""
WITH_CONTEXT: Final = (*WITH_TENSOR, "mixtral", "qwen3_moe", "deepseek_v3", "olmo2", "olmoe", "gpt2")
"""Types whose sequences the engine divides over context-parallel processes, by Ulysses, each tested."""
WITH_EXPERT: Final = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe")
"""Types whose experts the engine divides over processes of a site, each tested."""
TENSOR_WITH_EXPERT: Final = ("mixtral", "qwen3_moe", "glm4_moe")
"""Those of them whose attention it divides over tensor-parallel processes, beside whole experts; each tested."""
WITH_ROUTER_BIAS: Final = (
    *("deepseek_v3", "axk1", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hy_v3", "minimax_m2", "solar_open"),
)
"""Types whose routers have a correction bias for every expert."""
UNCUT: Final = ("opt", "bloom", "falcon")
"""Types that can't be cut into stages: the check before a training refuses them, as it does others of their kind."""
NOT_ON_CHUNKS: Final = ("deepseek_v3", "gemma3_text", "gpt2", "qwen3_next")
"""Types whose attention can't be computed on chunks, each tested; the check before a training refuses more."""
TRAINABLE: Final = ("fp32", "bf16")
"""Precisions without loss scaling."""
ABLE: Final = {"dropout": False, "matmul": "same", "activation_func_fp8_input_store": False} | {
    "cpu_offloading_num_layers": 0,
    "cuda_graphs": False,
    "overlap_param_gather": None,
    "zero_group_size": None,
}
"""The values of a training's keys that the engine has, of those with one alone."""
EXPERTS: Final = ("linear_fc1", "linear_fc2")
"""Linear maps that are those of experts, where a model has any."""
PLANNED_ONLY: Final = (
    *("latent_attention", "attention_bias", "qk_norm", "attention_sinks"),
    *("sliding_window", "mtp_num_layers"),
)
"""Keys of a model without experts that only the cost model knows; transformers and users' modules know more."""


def training_obstacles(
    training: Training, *, shares_weights: bool, has_router_bias: bool, is_own_module: bool
) -> dict[str, str]:
    """The part of a training that the engine can't run, as ``training.dropout = true``, and what to say instead.

    `shares_weights`: whether replicas of this model can share its weights, as with ZeRO-2 and 3. `has_router_bias`:
    whether its routers have biases that can be moved. `is_own_module`: whether it is the user's, whose dropout layers
    are known; attention's kernels in models of transformers draw by themselves.
    """
    found = {}
    if training.precision not in TRAINABLE:
        found[f'training.precision = "{training.precision}"'] = 'training.precision = "bf16"'
    if training.zero in (2, 3) and not shares_weights:
        found[f"training.zero = {training.zero}"] = "training.zero = 1"
    if training.recompute == "op":
        found['training.recompute = "op"'] = 'training.recompute = "full"'
    if training.grad_reduce_in_fp32 is False and training.precision != "fp16":
        found["training.grad_reduce_in_fp32 = false"] = "training.grad_reduce_in_fp32 = true"
    if training.moe_router_bias_update_rate and not has_router_bias:
        found["training.moe_router_bias_update_rate"] = "training.moe_router_bias_update_rate = 0"
    for key, able in ABLE.items():
        if getattr(training, key) != able and not (key == "dropout" and is_own_module):
            remedy = f"no training.{key}" if able is None else f"training.{key} = {json.dumps(able)}"
            found[f"training.{key} = {json.dumps(getattr(training, key))}"] = remedy
    return found


def _adapter_obstacles(lora: Lora | None, model: Model) -> dict[str, str]:
    """Obstacles to training adapters, and what to say instead."""
    if lora is None:
        return {}
    found = {}
    if model.experts is not None and any(lora.adapts(module) for module in EXPERTS):
        beside = {part for module in EXPERTS for part in (module, *PARTS[module])}
        others = [name for name in lora.target_modules or possible_modules(model) if name not in beside]
        if lora.target_modules is None:
            others = [name for name in others if name not in PARTS]
        found["adapters beside experts"] = f"training.lora.target_modules = {json.dumps(others)}"
    if lora.base_weights != "same":
        found[f'training.lora.base_weights = "{lora.base_weights}"'] = 'training.lora.base_weights = "same"'
    return found


def plan_obstacle(plan: "Plan") -> tuple[str, str]:
    """The part of a plan that the engine can't run, and what to change in the job; both empty where it can run all.

    The second alone is empty where the job itself can be trained, each site in a layout of its own.
    """
    is_ours = not plan.job.model.is_of_transformers and plan.job.model.module is None
    special = [f"model.{key}" for key in PLANNED_ONLY if is_ours and getattr(plan.job.model, key)]
    model = dict.fromkeys(special, "model.hugging_face, the folder of such a model")
    free, groups = divided(plan.job), groups_documents(plan.job)
    degrees = [key for key in RUNNABLE if getattr(plan.layout, key) != RUNNABLE[key] and key not in free]
    shares_weights = not is_ours and plan.job.data.packing is None and plan.job.training.lora is None
    training = settle(plan.job.training, plan.layout)
    has_bias = _type_of(plan.job.model) in WITH_ROUTER_BIAS
    of_training = training_obstacles(
        training,
        shares_weights=shares_weights,
        has_router_bias=has_bias,
        is_own_module=plan.job.model.module is not None,
    )
    of_training |= _adapter_obstacles(training.lora, plan.job.model)
    layout = {f"{key} = {getattr(plan.layout, key)}": f"layout.{key} = {RUNNABLE[key]}" for key in degrees}
    at = plan.layout
    tensor, context = (1 if key in degrees else getattr(at, key) for key in ("tensor", "context"))
    layout |= {} if groups else _twin_obstacles(plan.job, training, replace(at, tensor=tensor, context=context))
    kinds = [kind for kind in UNCUT if kind == _type_of(plan.job.model)]
    uncut = {f"a model of type {kind!r}": "another type, or model.module with stages of your own" for kind in kinds}
    kind = _type_of(plan.job.model)
    if plan.job.data.packing is not None and (plan.job.model.module is not None or kind in NOT_ON_CHUNKS):
        model[f"data.packing with {'model.module' if kind is None else f'a model of type {kind!r}'}"] = (
            "no data.packing"
        )
    layout |= _of_separate_sites(plan.job, training, plan.layout)
    layout |= _without_barrier(plan.job, training)
    if plan.job.model.is_of_transformers and plan.job.model.hugging_face is None:
        model |= _of_experts(plan)
    changes = (
        model | uncut | _narrow(plan.job.model) | _of_balancing(plan.job) | _of_dropout(plan.job) | layout | of_training
    )
    return ", ".join(changes), ", ".join(change for change in dict.fromkeys(changes.values()) if change)


def _of_separate_sites(job: Job, training: Training, layout: Layout) -> dict[str, str]:
    """Obstacles to sites that are runs of their own, and what to say instead."""
    key = "local_steps" if training.local_steps is not None else "elastic" if training.elastic else ""
    has_one_each = layout.data_inside == 1
    able = {"local_steps": (0, 1, 2, 3), "elastic": (0, 2, 3)} if has_one_each else dict.fromkeys([key], (2, 3))
    if key and len(layout.replica_sites) < 2:
        by_site = key == "local_steps" and not any(starmap(identical, combinations(job.cluster.sites, 2)))
        return {f"training.{key} with no replicas at two sites": "" if by_site else 'layout.replicas = "across"'}
    if key and training.zero not in able[key]:
        return {f"training.{key} with training.zero = {training.zero}": f"training.zero = {able[key][0]}"}
    return {}


def _without_barrier(job: Job, training: Training) -> dict[str, str]:
    """Obstacles to steps without a barrier, and what to say instead."""
    others = {
        "data.packing": job.data.packing is not None,
        "training.local_steps": training.local_steps is not None,
        "training.elastic": training.elastic,
        "a table [publish]": job.publish is not None,
    }
    found = [name for name, is_there in others.items() if is_there and not training.barrier]
    return {f"training.barrier = false with {name}": "training.barrier = true" for name in found}


def _of_experts(plan: "Plan") -> dict[str, str]:
    """Obstacles to a model with experts that is given by numbers, and what to say instead."""
    found = {}
    try:
        kind_of(plan.job.model)
    except InputError as error:
        found[str(error)] = "model.hugging_face, the folder of such a model"
    operations = [name for recompute in plan.recompute for name in operations_of(recompute)]
    if alone := [name for name in operations if name not in OF_TRANSFORMERS]:
        found[f"recomputing {alone[0]} by itself"] = 'training.recompute = "full"'
    if plan.job.training.lora is not None:
        found["training.lora beside random weights"] = "model.hugging_face, the folder of a trained model"
    return found


def _of_dropout(job: Job) -> dict[str, str]:
    """Obstacles to masks that follow from a microbatch's number, and what to say instead."""
    lora = job.training.lora
    what = "training.dropout" if job.training.dropout else "training.lora.dropout" if lora and lora.dropout else ""
    others = {"data.packing": job.data.packing is not None, "training.elastic": job.training.elastic}
    remedies = {"data.packing": "no data.packing", "training.elastic": "training.elastic = false"}
    return {f"{what} with {key}": remedies[key] for key, is_set in others.items() if what and is_set}


def _narrow(model: Model) -> dict[str, str]:
    """Weights of 8 or 4 bits, which can be planned, but not read."""
    try:
        kind = "" if model.hugging_face is None else quantization_of(model.hugging_face)
    except InputError:  # a plan that is read elsewhere
        kind = ""
    return (
        {f"weights in {kind} (quantization_config)": "a folder with 16-bit weights in model.hugging_face"}
        if kind
        else {}
    )


def _of_balancing(job: Job) -> dict[str, str]:
    """Obstacles to the loss that balances experts, and what to say instead."""
    by_key = {"training.wire_type": job.training.wire_type != "none", "data.packing": job.data.packing is not None}
    remedies = {"training.wire_type": 'training.wire_type = "none"', "data.packing": "no data.packing"}
    try:
        is_balanced = job.model.hugging_face is not None and balances_experts(job.model.hugging_face)
    except InputError:  # a plan that is read elsewhere
        is_balanced = False
    what = "with the loss that balances experts (output_router_logits)"
    return {f"{key} {what}": remedies[key] for key, is_set in by_key.items() if is_set and is_balanced}


def batch_obstacle(job: Job, plan: "BatchPlan") -> tuple[str, str]:
    """The part of a plan of one batch that the engine can't run, and what to pin for the best that it can; both empty
    where it can."""
    tensor, context, is_shared = plan.layout.layout.tensor, plan.layout.costs.context, "context" in divided(job)
    found = {}
    if plan.places and (plan.use != "one site" or not is_shared):
        found["groups of devices of several context degrees"] = "layout.context = 1"
    elif not plan.places and context > 1 and (not is_shared or job.model.num_kv_heads % context):
        found[f"context = {context}"] = "layout.context = 1"
    if tensor > 1:
        found[f"tensor = {tensor}"] = "layout.tensor = 1"
    if plan.zero > 1:
        found[f"training.zero = {plan.zero}"] = "training.zero = 1"
    if not found:
        return "", ""
    open_ones = {  # the next best plan may have what this one has not
        "layout.context = 1": job.layout.context is None and not is_shared,
        "layout.tensor = 1": job.layout.tensor is None,
        "training.zero = 1": job.training.zero == "auto",
    }
    pins = dict.fromkeys([*found.values(), *(pin for pin, is_open in open_ones.items() if is_open)])
    return ", ".join(found), ", ".join(pins)


def groups_documents(job: Job) -> bool:
    """True if each document of a training on chunks gets a number of devices of its own: in one stage at one site whose
    replicas and context are left open."""
    at, sites = job.layout, [site for _, site in job.used_sites()]
    is_open = {at.data, at.context} == {None} and at.pipeline == 1 and {at.tensor, at.virtual} <= {None, 1}
    has_choice = is_open and job.data.packing == "elastic" and "context" in divided(job)
    return has_choice and len(sites) == 1 and sites[0].num_devices > 1


def divided(job: Job) -> tuple[str, ...]:
    """The degrees by which the engine divides this job's model over processes of a rank."""
    if job.training.lora is not None:
        return ()
    kind, is_whole = _type_of(job.model), job.data.packing is None
    tensor = (*WITH_TENSOR, *TENSOR_WITH_EXPERT)
    by = {"context": WITH_CONTEXT} | ({"tensor": tensor, "expert": WITH_EXPERT} if is_whole else {})
    return tuple(key for key, kinds in by.items() if kind in kinds)


def _type_of(model: Model) -> str | None:
    """The type of a model of transformers; None for others, and where its folder is not."""
    if not model.is_of_transformers:
        return None
    try:
        return kind_of(model) if model.hugging_face is None else type_of(model.hugging_face)
    except InputError:  # a plan that is read elsewhere
        return None


def _twin_obstacles(job: Job, training: Training, layout: Layout) -> dict[str, str]:
    """Obstacles to dividing layers and sequences over `layout.tensor` x `layout.context` processes, and what to say
    instead."""
    degrees = {key: getattr(layout, key) for key in ("tensor", "context") if getattr(layout, key) > 1}
    found, size = {}, prod(degrees.values())
    if layout.tensor > 1 and training.sequence_parallel is not True:
        found["training.sequence_parallel = false"] = "training.sequence_parallel = true"
    shared = {"model.num_kv_heads": job.model.num_kv_heads}
    if job.data.packing is None:
        shared["training.sequence_length"] = training.sequence_length
    for name, count in shared.items():
        if count % size:
            change = f"layout.{[*degrees][-1]} = 1"
            found[f"{' x '.join(degrees)} = {size}, which does not divide {name} = {count}"] = change
    if layout.context > 1 and layout.context_exchange != "ulysses" and job.model.divides_heads(size):
        found['context_exchange = "ring"'] = 'layout.context_exchange = "ulysses"'
    if layout.tensor > 1 and job.model.experts is not None:
        found |= _beside_tensor(job.model.experts.num_experts, training, layout)
    return found


def _beside_tensor(num_experts: int, training: Training, layout: Layout) -> dict[str, str]:
    """Obstacles to experts beside layers that `layout.tensor` processes share, and what to say instead."""
    found, shares = {}, layout.num_shares * layout.tensor
    if layout.expert_tensor > 1:
        by_expert = f"layout.expert = {shares}"
        change = "layout.tensor = 1" if num_experts % shares else by_expert
        found[f"experts that layout.tensor = {layout.tensor} processes divide"] = change
    if training.moe_router_bias_update_rate:
        found[f"training.moe_router_bias_update_rate with layout.tensor = {layout.tensor}"] = "layout.tensor = 1"
    return found


def _runs_all(job: Job, tensor: Sequence[int], context: Sequence[int]) -> bool:
    """True if the engine can run each of these degrees with each, as far as the planner may choose them."""
    free, training = divided(job), job.training.model_copy(update={"sequence_parallel": True})
    if max(tensor) > 1 and job.layout.tensor is None and job.model.experts is not None:
        return False  # the planner would divide each expert as well
    if max(tensor) > 1 and ("tensor" not in free or job.training.sequence_parallel is False):
        return False
    pairs = [(t, c) for t, c in product(tensor, context) if c == 1 or job.model.divides_heads(t * c)]
    layouts = [Layout(1, 1, t, 1, 1, 1, (), c, "ulysses") for t, c in pairs]
    is_shared = max(context) > 1 and "context" not in free
    return not is_shared and not any(_twin_obstacles(job, training, at) for at in layouts)


def within_engine(job: Job) -> tuple[Job, str]:
    """The job with what the user left open pinned to what the engine can run, and these pins in words.

    What the user has pinned to another value stays; `plan_obstacle` tells of it.
    """
    pins, pinned = job.layout, dict[str, Any]()
    if job.training.local_steps is not None and pins.replicas is None:
        pinned["replicas"] = "across"
    tensor = tensor_degrees(job, [site for _, site in job.used_sites()])
    context = context_degrees(job, job.cluster.num_devices)
    if pins.tensor is None and not _runs_all(job, tensor, [pins.context or 1]):
        pinned["tensor"], tensor = RUNNABLE["tensor"], [RUNNABLE["tensor"]]
    if pins.context is None and max(context) > 1 and not _runs_all(job, tensor, context):
        pinned["context"] = RUNNABLE["context"]
    elif (
        max(context) > 1
        and pins.context_exchange is None
        and "context" in divided(job)
        and job.model.divides_heads((pins.tensor or 1) * (pins.context or 1))
    ):
        pinned["context_exchange"] = "ulysses"
    if pins.expert is None and job.model.experts is not None and "expert" not in divided(job):
        pinned["expert"] = RUNNABLE["expert"]
    told = ", ".join(f"layout.{key} = {json.dumps(value)}" for key, value in pinned.items())
    return job.model_copy(update={"layout": pins.model_copy(update=pinned)}), told
