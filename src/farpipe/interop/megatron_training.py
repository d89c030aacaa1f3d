"""Settings of Megatron-LM of how a model is trained: batches, attention, optimizer, ZeRO, precision, recomputation."""

from typing import Any, Final

from farpipe.core.spec.recompute import OPERATIONS
from farpipe.interop.kinds import as_count, as_flag
from farpipe.interop.settings import Draft, Plain, Settings

_RECIPES: Final = {"mxfp8": "mxfp8"}
"""Recipes of Transformer Engine for which farpipe has a number format of its own; others count as ``fp8``."""
_SHARDING: Final = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_TRAINING: Final[Plain] = {
    "sequence_length": ("seq_length", as_count),
    "global_batch": ("global_batch_size", as_count),
    "microbatch_size": ("micro_batch_size", as_count),
    "num_steps": ("train_iters", as_count),
    "learning_rate": ("lr", float),
    "weight_decay": ("weight_decay", float),
}


def put_training(settings: Settings, draft: Draft) -> None:
    """Put [training] into `draft`."""
    _training(settings, draft)
    _flash_attention(settings, draft)
    _optimizer(settings)
    _precision(settings, draft)
    _numbers(settings, draft)
    _recompute(settings, draft)


def _training(settings: Settings, draft: Draft) -> None:
    draft.copy(settings, "training", _TRAINING)
    length = settings.take("sequence_length", as_count)
    if length and length != draft.value("training", "sequence_length"):  # Megatron-Bridge: the model's is its longest
        draft.put("training", "sequence_length", length, settings.origin("sequence_length"))
    clip = settings.take("clip_grad", float, default=1.0)
    draft.put("training", "clip_norm", clip or "none", settings.origin("clip_grad"))
    both = settings.take("betas", lambda value: [float(value[0]), float(value[1])], default=[0.9, 0.999])
    betas = [settings.take(f"adam_beta{n}", float, both[n - 1]) for n in (1, 2)]
    draft.put("training", "betas", betas, settings.origin("adam_beta1", "adam_beta2", "betas"))
    dropped = [settings.take(name, float, 0.1) for name in ("attention_dropout", "hidden_dropout")]
    draft.put("training", "dropout", any(dropped), settings.origin("hidden_dropout", "attention_dropout"))
    draft.put("training", "zero", _zero(settings), settings.origin(*_ZERO_NAMES))
    if draft.value("training", "zero") in (2, 3):
        draft.put("training", "framework", "megatron", "Megatron-FSDP")
    draft.put("training", "sequence_parallel", settings.flag("sequence_parallel"), settings.origin("sequence_parallel"))
    overlap = settings.flag("overlap_grad_reduce")
    draft.put("training", "overlap", overlap, settings.origin("overlap_grad_reduce"))
    settings.rivals.pop("overlap_param_gather", None)  # Megatron-Bridge's optimizer has a copy of the ddp table's
    gathers = settings.take("overlap_param_gather", as_flag, default=False)
    if overlap and not gathers and draft.value("training", "zero") == 1:
        origin = settings.origin("overlap_param_gather", "overlap_grad_reduce")
        draft.put("training", "overlap_param_gather", value=False, origin=origin)
    graphs = settings.flag("enable_cuda_graph") or settings.take("cuda_graph_impl", str, "none") != "none"
    scope = settings.take("cuda_graph_scope", _names, default=[])
    is_part = graphs and bool(scope) and not {"full", "full_iteration", "moe"} & set(scope)
    origin = settings.origin("enable_cuda_graph", "cuda_graph_impl", "cuda_graph_scope")
    draft.put("training", "cuda_graphs", "part" if is_part else graphs, origin)


_FLASH: Final = (
    *("use_flash_attn", "use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder"),
    "use_flash_attention",
)
"""Switches of Megatron-LM, Megatron-DeepSpeed and NeMo that turn FlashAttention on."""
_UNFUSED: Final = ("unfused", "local")
_KERNELS: Final = {
    "use_flash_attn_v1": "flash-1",
    "use_flash_attn_triton": "flash-1",
    "use_flash_attn_v2": "flash-2",
}
"""Kernels of attention by the switches that name them; Transformer Engine takes the fastest that it finds."""
_OFF_CHANGES: Final = {
    "fp8_wgrad": "gradients of weights are computed in 16 bit",
    "overlap_p2p_comm": "the pipeline's messages are waited for",
    "overlap_p2p_communication": "the pipeline's messages are waited for",
}
"""Changes of a step by the switch that makes them where it is off."""
_PLAIN_OPTIMIZERS: Final = (
    *("adam", "adamw", "fused_adam", "distributed_fused_adam", "mcore_distributed_optim", "megatron_fused_adam"),
)
"""Optimizers that keep two numbers of 32 bit for a parameter."""


def _flash_attention(settings: Settings, draft: Draft) -> None:
    """Megatron's own layers keep the scores of attention, and so do Transformer Engine's without its kernels."""
    on = next((name for name in _FLASH if settings.flag(name)), None)
    off = {
        "attention_backend": settings.take("attention_backend", str, "auto") in _UNFUSED,
        "transformer_impl": settings.take("transformer_impl", str, "") == "local",
        "use_legacy_models": settings.flag("use_legacy_models"),
        "transformer_engine": not settings.take("transformer_engine", as_flag, default=True)
        and not settings.flag("mcore_gpt"),
        "deepspeed": settings.flag("deepspeed"),
        "NVTE_FLASH_ATTN": {settings.take(f"NVTE_{kind}_ATTN") for kind in ("FLASH", "FUSED")} == {"0"},
    }
    found = [name for name, is_off in off.items() if is_off]
    is_kept = bool(found) and (on is None or found[0] == "attention_backend")
    draft.put("training", "flash_attention", not is_kept, settings.origin(*(found if is_kept else [on or "", *off])))
    if not is_kept and on in _KERNELS:
        draft.put("training", "attention_kernel", _KERNELS[on], settings.origin(on))
    if not is_kept and settings.take("attention_backend", str, "auto") == "fused":
        draft.put("training", "attention_kernel", "cudnn", settings.origin("attention_backend"))


def _optimizer(settings: Settings) -> None:
    for name in ("optimizer", "optimizer_name", "optimizer_type"):
        if str(settings.take(name, str, "adam")).lower() not in _PLAIN_OPTIMIZERS:
            settings.change(name, "the optimizer's state and work are counted as Adam's")


_DISTRIBUTED_OPTIMIZERS: Final = ("distributed_fused_adam", "mcore_distributed_optim")
"""Optimizers of NeMo that divide their state."""
_ZERO_NAMES: Final = (
    *("data_parallel_sharding_strategy", "use_torch_fsdp2", "use_megatron_fsdp", "use_distributed_optimizer"),
    *("zero_stage", "fsdp", "optimizer_name"),
)


def _zero(settings: Settings) -> int:
    """Stage of ZeRO of the optimizer and the FSDP that are chosen."""
    distributed = settings.flag("use_distributed_optimizer")
    strategy = settings.take("data_parallel_sharding_strategy", str, "optim_grads_params")
    distributed = distributed or settings.take("optimizer_name") in _DISTRIBUTED_OPTIMIZERS
    if kind := settings.take("fsdp_sharding_strategy", str):  # of NeMo
        if kind == "hybrid":
            settings.change("fsdp_sharding_strategy", "state is divided among some of the replicas only")
        return {"full": 3, "hybrid": 3, "grad": 2}.get(kind, 3) if settings.flag("fsdp") else int(distributed)
    if settings.flag("use_torch_fsdp2") or settings.take("fsdp") in (True, "true", "True"):
        return 3
    if settings.flag("use_megatron_fsdp"):
        return _SHARDING.get(strategy, 3)
    if settings.flag("deepspeed") and "zero_stage" not in settings.values:
        settings.refer("deepspeed_config")
    return int(settings.take("zero_stage", as_count, default=0) if settings.flag("deepspeed") else distributed)


def _precision(settings: Settings, draft: Draft) -> None:
    named = str(settings.take("precision", str, "") or settings.take("mixed_precision", str, ""))
    narrow = next((kind for kind in ("bf16", "fp16") if settings.flag(kind) or kind in named), None)
    narrow = narrow or ("fp16" if named in ("16", "16-mixed") else "fp32")
    draft.put("training", "precision", narrow, settings.origin(narrow, "bf16", "fp16", "precision", "mixed_precision"))
    recipe = settings.take("fp8_recipe", str, "delayed")
    form = str(settings.take("fp8_format", str, "")).lower()
    if form not in ("", "false", "none"):
        origin = settings.origin("fp8_recipe", "fp8_format")
        draft.put("training", "matmul", _RECIPES.get(recipe, "fp8"), origin)
    if settings.take("fp4_format", str, "") not in ("", "false", "none"):
        draft.put("training", "matmul", "nvfp4", settings.origin("fp4_format"))


def _numbers(settings: Settings, draft: Draft) -> None:
    """Switches that the job has by the same name, and the numbers in which gradients are summed."""
    if settings.take("moe_token_dispatcher_type", str, "") == "flex":
        draft.put("training", "moe_token_dispatcher_type", "flex", settings.origin("moe_token_dispatcher_type"))
    for flag in (
        *("fp8_param_gather", "overlap_moe_expert_parallel_comm", "tp_comm_overlap"),
        *("fp8_dot_product_attention", "activation_func_fp8_input_store", "fp8_output_proj"),
    ):
        if settings.flag(flag):
            draft.put("training", flag, value=True, origin=settings.origin(flag))
    for name, what in _OFF_CHANGES.items():
        if not settings.take(name, as_flag, default=True):
            settings.change(name, what)
    settings.flag("cpu_offloading")
    if offloaded := settings.take("cpu_offloading_num_layers", int):
        origin = settings.origin("cpu_offloading_num_layers")
        draft.put("training", "cpu_offloading_num_layers", offloaded, origin)
    if (fused := settings.take("cross_entropy_loss_fusion", as_flag)) is not None:
        draft.put("training", "cross_entropy_loss_fusion", fused, settings.origin("cross_entropy_loss_fusion"))
    in_bf16 = settings.flag("grad_reduce_in_bf16") or settings.take("grad_sync_dtype", str, "") in ("bf16", "bfloat16")
    if not settings.take("grad_reduce_in_fp32", as_flag, default=True) or in_bf16:
        origin = settings.origin("grad_reduce_in_bf16", "grad_sync_dtype", "grad_reduce_in_fp32")
        draft.put("training", "grad_reduce_in_fp32", value=False, origin=origin)


def _recompute(settings: Settings, draft: Draft) -> None:
    granularity = settings.take("recompute_granularity")
    method = settings.take("recompute_method", str, "uniform")
    num_layers = settings.take("recompute_num_layers", as_count, default=1)
    names = settings.take("recompute_modules", _names, default=["core_attn"])
    if settings.flag("recompute_activations"):
        granularity = "selective"
    old = ("checkpoint_activations", "activations_checkpoint_method")  # Megatron-LM 2, Megatron-DeepSpeed
    if granularity is None and (settings.flag(old[0]) or settings.take(old[1]) is not None):
        granularity = "full"
    origin = settings.origin("recompute_granularity", "recompute_activations", *old)
    each = (draft.value("model", "num_layers") or 0) / draft.degree("pipeline")
    if granularity == "full" and method == "block" and num_layers == 0:
        granularity = None
    elif granularity == "full" and (num_layers < each if method == "block" else num_layers > 1):
        settings.changes.append(
            f"{origin} full with --recompute-method {method} --recompute-num-layers {num_layers}: taken as every layer"
        )
    if granularity == "selective":
        known = [name for name in names if name in OPERATIONS]
        unknown = [name for name in names if name not in OPERATIONS]
        settings.changes += [f"--recompute-modules: {name}: kept, not computed again" for name in unknown]
        draft.put("training", "recompute", " ".join(known) or "none", origin)
    else:
        draft.put("training", "recompute", "full" if granularity == "full" else "none", origin)


def _names(value: Any) -> list[str]:
    return value.split() if isinstance(value, str) else [str(name) for name in value]
