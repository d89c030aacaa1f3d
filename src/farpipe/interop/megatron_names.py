"""Settings of Megatron-LM, NeMo and Megatron-Bridge by one set of names: those of Megatron-LM's options."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from farpipe.errors import InputError
from farpipe.interop.interpolation import interpolated
from farpipe.interop.settings import Setting, Settings
from farpipe.interop.shell import Script, flags_of, read_script, unset
from farpipe.interop.shell_words import Word

MARKS: Final = ("--num-layers", "--hidden-size", "--micro-batch-size", "--tensor-model-parallel-size", "--seq-length")
"""Options by one of which a command of Megatron-LM is known."""
ALIASES: Final = {
    "activations_checkpoint_granularity": "recompute_granularity",
    "context_parallel_comm_type": "cp_comm_type",
    "moe_expert_parallel_size": "expert_model_parallel_size",
    "topk": "moe_router_topk",
    "encoder_seq_length": "seq_length",
    "encoder_num_layers": "num_layers",
    "fp8": "fp8_format",
    "fp8_params": "fp8_param_gather",
    "gated_linear_unit": "swiglu",
    "gradient_clip_val": "clip_grad",
    "layernorm_epsilon": "norm_epsilon",
    "max_steps": "train_iters",
    "num_moe_experts": "num_experts",
    "overlap_grad_sync": "overlap_grad_reduce",
    "overlap_param_sync": "overlap_param_gather",
    "override_vocab_size": "vocab_size",
    "ub_tp_comm_overlap": "tp_comm_overlap",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "use_custom_fsdp": "use_megatron_fsdp",
    "model_parallel_size": "tensor_model_parallel_size",
    "pipe_parallel_size": "pipeline_model_parallel_size",
    "pad_vocab_size_to": "padded_vocab_size",
    "deepspeed_activation_checkpointing": "checkpoint_activations",
    "use_llama2_rotary_position_embeddings": "use_rotary_position_embeddings",
}
"""Names of NeMo and Megatron-Bridge, and earlier ones, for the options that they are."""
WITHOUT_EFFECT: Final = (
    *("save*", "load*", "log_*", "tensorboard*", "wandb*", "eval_*", "exit_*", "ckpt*", "dist_ckpt*", "async_save"),
    *("data_path", "data_cache*", "*_data_path", "*_data_prefix", "split", "mock_data", "num_workers", "dataloader*"),
    *("vocab_file", "merge_file", "tokenizer*", "tiktoken*", "init_method*", "use_mcore_models", "manual_gc*"),
    *("timing*", "profile*", "nccl_*", "distributed_timeout*", "distributed_backend", "no_load*", "no_save*"),
    *("lr_*", "min_lr", "override_opt*", "finetune", "reset_*", "eod_*", "rampup*", "transformer_impl", "adam_eps"),
    *("no_mmap*", "no_create_att*", "moe_*coeff", "moe_*loss*", "spec", "seed", "empty_unused*", "master_*", "rdzv*"),
    *("calculate_per_token_loss", "check_for_nan*", "no_check_for_nan*", "attention_softmax_in_fp32", "node_rank"),
    *("use_checkpoint_args", "ddp_*", "apply_layernorm_1p", "decoupled_*", "auto_detect*", "record_memory*", "name"),
    *(
        "_target_",
        "_call_",
        "_partial_",
        "_args_",
        "mock",
        "optimizer",
        "sgd_*",
        "num_dataset*",
        "train_samples",
        "fp8_amax*",
        "barrier*",
        "make_vocab*",
    ),
    *(
        "job_name",
        "time",
        "account",
        "partition",
        "qos",
        "output",
        "error",
        "hint",
        "cpus_per_task",
        "exclusive",
        "mem",
    ),
    *("constraint", "reservation", "open_mode", "comment", "mail_*", "requeue", "dependency", "chdir", "wckey"),
    *("max_restarts", "tee", "hostfile", "job_id", "jobid", "container_*", "kill_bind*", "no_container*", "mpi"),
    *("data_impl", "train_weighted*", "valid_weighted*", "initial_loss*", "loss_scale*", "hysteresis", "min_loss*"),
    *("train_tokens", "consumed_*", "kill_switch*", "abort_on*", "use_dist_ckpt", "local_rank", "logging_level"),
    *("accelerator", "logger", "enable_checkpointing", "use_distributed_sampler", "max_time", "time_limit", "limit_*"),
    *("val_check*", "create_*", "resume_*", "always_save*", "monitor", "filename", "results_dir", "max_epochs"),
    *("pre_process", "post_process", "persist_*", "gradient_as_bucket*", "bias_*_fusion", "masked_softmax_fusion"),
    *("gradient_accumulation_fusion", "grad_div_ar*", "native_amp*", "fp16_lm_cross*"),
    *("megatron_amp*", "grad_allreduce_chunk*", "sharp", "mcore_gpt", "transformer_engine", "fp8_e4m3", "fp8_hybrid"),
    *("fp8_margin", "fp8_interval", "fp8_wgrad", "use_cpu_init*", "onnx_safe", "apex_*", "batch_p2p*", "overlap_p2p*"),
    *(
        "sync_batch_comm",
        "norm_epsilon",
        "apply_query_key*",
        "verbose",
        "stdout",
        "library",
        "trace",
        "*_step",
        "ranks",
    ),
    *("gen_shape", "bucket_cap_mb", "contiguous_grad*", "splits_string", "skip_warmup", "exchange_indices*"),
    *(
        "data_prefix",
        "warmup_*",
        "constant_steps",
        "project",
        "explicit_log_dir",
        "buffer_size",
        "sync_cuda",
        "shuffle",
    ),
    *("benchmark", "tb_dir", "gc_interval", "*_ckpt", "replace_sampler*", "num_sanity*", "deterministic*", "run_id"),
    *("fp32_residual*", "use_scaled_init*", "do_layer_norm*", "headscale", "transformer_block_type", "openai_gelu"),
    *("normalize_attention*", "rotary_percentage", "apply_rope_fusion", "attention_type", "contiguous_param*"),
    *("seconds_to_sleep", "tp_only_amax*", "reduce_amax", "scale_positional*", "enable_model_summary", "fsdp_grad*"),
    *("fsdp_sharding*", "fsdp_sharded*", "use_emha", "index_mapping*", "every_n_*", "sentencepiece*", "validate_orig*"),
    *("attention_softmax*", "accumulate_allreduce*", "memory_centric*", "deepspeed_config", "deepspeed_mpi"),
    "use_tp_pp_dp*",
)
"""Options that change neither the seconds nor the bytes of a step, or by less than is counted here."""
_NO_DECODERS: Final = re.compile(r"(?:[^/]*_)?(bert|t5|ict|retro|mamba|hybrid|vision|vlm|mimo)(?:_[^/]*)?\.py")
"""Programs that train other models than a decoder alone."""
_ZERO_STAGE: Final = re.compile(r'"zero_optimization"\s*:\s*\{[^}]*?"stage"\s*:\s*([^\s,}]+)')
_SHORT: Final = ("-N", "-n")
"""Options of one letter that count: numbers of machines and tasks of srun."""


def is_megatron(text: str) -> bool:
    """True if a script or a list of options looks like Megatron-LM's."""
    return any(re.search(rf"{mark}\b", text) for mark in MARKS)


def without_effect(settings: Settings) -> list[str]:
    """Names of `settings` that change nothing of a step."""
    return [name for name in settings.values if any(fnmatchcase(name, pattern) for pattern in WITHOUT_EFFECT)]


def settings_of_script(text: str, source: str, known: Mapping[str, str] | None = None) -> Settings:
    """The options of the training command in a shell script or a plain list of options.

    InputError where there is no such command; of several the last one is read, and a note says so.
    """
    script = read_script(text, {**_slurm_variables(text), **(known or {})})
    command = _command(script, source)
    options = [*_directives(text), *_options(command), *_deepspeed_stage(text, script)]
    lines = _lines_of_options(text)
    values: dict[str, Setting] = {}
    for option, value in options:
        line = lines.get(option)
        values[_name(option)] = Setting(value, option + (f", line {line}" if line else ""))
    programs = [name for word in command if _NO_DECODERS.fullmatch(name := word.rpartition("/")[2])]
    problems = [f"{name}: its model is no decoder alone; its layers are counted as a decoder's" for name in programs]
    return Settings(source, values, notes=script.notes, problems=problems, unset=script.open_names)


def _command(script: Script, source: str) -> list[str]:
    commands = [*map(flags_of, script.commands)]
    found = [words for words in commands if any(mark in words for mark in MARKS)]
    if found and all(words[0].startswith("--") for words in found):  # a list of options, one a line
        return [word for words in commands if words[0].startswith("--") for word in words]
    if not found:  # options in variables, for another script
        values = [words for words in map(flags_of, script.values) if any(word.startswith("--") for word in words)]
        if not values:
            raise InputError(f"{source}: no command with options of Megatron-LM, such as {MARKS[0]}, was found")
        return [word for words in values for word in words]
    if len({tuple(words) for words in found}) > 1 and found[0][0] != "echo":
        script.notes.append(f"{len(found)} commands have options of Megatron-LM; the last one was read")
    return found[-1]


def _options(words: list[str]) -> Iterator[tuple[str, str | list[str] | None]]:
    """Options with their values; a switch has None."""
    option, values = "", list[str]()
    for word in [*words, "--"]:
        if not re.match(r"--?[A-Za-z]|--$", word):
            values.append(word)
            continue
        if values and any(value.endswith(".py") for value in values):  # the program, after options of its launcher
            values = values[: next(place for place, value in enumerate(values) if value.endswith(".py"))]
        if len(values) > 1:  # options of other variables follow those of one that is not set
            values = [values[0], *(value for value in values[1:] if not unset(value))]
        if option.startswith("--") or (option in _SHORT):
            yield option, values[0] if len(values) == 1 else (values or None)
        option, _, value = word.partition("=")
        values = [value] if value else []


def _directives(text: str) -> Iterator[tuple[str, str]]:
    for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE):
        yield from re.findall(r"(-{1,2}[A-Za-z][\w-]*)[=\s]+([^\s#-][^\s#]*)", line.partition(" #")[0])


def _slurm_variables(text: str) -> dict[str, str]:
    """Variables that Slurm sets by the directives of a batch script."""
    directives = {_name(option): value for option, value in _directives(text)}
    machines = next((directives[name] for name in ("nodes", "N") if name in directives), "")
    gpus = next((directives[name] for name in ("gpus_per_node", "gres") if name in directives), "").rpartition(":")[2]
    found = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), machines),
        **dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), gpus),
        "SLURM_NTASKS_PER_NODE": directives.get("ntasks_per_node", ""),
    }
    return {name: value for name, value in found.items() if value.isdigit()}


def _deepspeed_stage(text: str, script: Script) -> Iterator[tuple[str, str]]:
    """The stage of ZeRO in a configuration of DeepSpeed that the script writes."""
    if match := _ZERO_STAGE.search(text):
        yield "--zero-stage", " ".join(script.expand(Word.of(match[1]), quoted=True))


def _lines_of_options(text: str) -> dict[str, int]:
    """The last line on which each option stands outside a comment."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("#") or line.startswith("#SBATCH"):
            found.update(dict.fromkeys(re.findall(r"-{1,2}[A-Za-z][\w-]*", line), number))
    return found


def _name(option: str) -> str:
    name = option.lstrip("-").replace("-", "_")
    return ALIASES.get(name, name)


def settings_of_tables(data: Any, source: str, aliases: Mapping[str, str] = ALIASES) -> Settings:
    """The settings of a file of tables by their own names, wherever they stand; of two the one nearer to the top."""
    if not isinstance(data, Mapping):
        raise InputError(f"{source}: expected a table at the top")
    values: dict[str, Setting] = {}
    for path, value in sorted(_leaves(interpolated(data)), key=lambda leaf: len(leaf[0])):
        if value is not None:
            name = "optimizer_name" if path[-2:] == ("optim", "name") else path[-1].lstrip("-").replace("-", "_")
            values.setdefault(aliases.get(name, name), Setting(value, ".".join(path)))
    return Settings(source, values)


def settings_by_path(data: Mapping[str, Any], source: str) -> Settings:
    """The settings of a file of tables by their whole paths (``training.steps``), which tell equal names apart."""
    paths = {".".join(path): value for path, value in _leaves(data) if value is not None}
    return Settings(source, {path: Setting(value, path) for path, value in paths.items()})


def _leaves(data: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in data.items():
        place = (*path, str(key))
        if isinstance(value, Mapping):
            yield from _leaves(value, place)
        else:
            yield place, value
