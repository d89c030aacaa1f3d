"""Settings of Megatron-LM, NeMo and Megatron-Bridge by one set of names: those of Megatron-LM's options."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.interop.interpolation import Given, interpolated
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
    "ds_sequence_parallel_size": "context_parallel_size",
    "model_parallel_size": "tensor_model_parallel_size",
    "pipe_parallel_size": "pipeline_model_parallel_size",
    "pad_vocab_size_to": "padded_vocab_size",
    "deepspeed_activation_checkpointing": "checkpoint_activations",
    "use_llama2_rotary_position_embeddings": "use_rotary_position_embeddings",
}
"""Names of NeMo and Megatron-Bridge, and earlier ones, for the options that they are."""
_NO_DECODERS: Final = re.compile(r"(?:[^/]*_)?(bert|t5|ict|retro|mamba|hybrid|vision|vlm|mimo)(?:_[^/]*)?\.py")
"""Programs that train other models than a decoder alone."""
_OTHER_CLASS: Final = re.compile(
    r"\.(bert|t5|mamba|ssm|hyena|hybrid|vlm?|multimodal|llava|mllama|vision|retro)\w*\.", re.IGNORECASE
)
"""Modules of NeMo and Megatron-Bridge whose models are no decoders alone."""
_OTHER_MODEL: Final = "its model is no decoder alone; its layers are counted as a decoder's"
_BACKENDS: Final = ("", "flash", "fused", "unfused", "local", "auto")
"""Megatron-Core's AttnBackend by number."""
_ZERO_STAGE: Final = re.compile(r'"zero_optimization"\s*:\s*\{[^}]*?"stage"\s*:\s*([^\s,}]+)')
_SHORT: Final = ("-N", "-n")
"""Options of one letter that count: numbers of machines and tasks of srun."""


def is_megatron(text: str) -> bool:
    """True if a script or a list of options looks like Megatron-LM's."""
    return any(re.search(rf"{mark}\b", text) for mark in MARKS)


def settings_of_script(
    text: str,
    source: str,
    known: Mapping[str, str] | None = None,
    marks: Sequence[str] = MARKS,
    aliases: Mapping[str, str] = ALIASES,
) -> Settings:
    """The options of the training command in a shell script or a plain list of options; it has one of `marks`.

    InputError where there is no such command; of several the last one is read, and a note says so.
    """
    script = read_script(text, {**_slurm_variables(text), **(known or {})})
    if isinstance(known, Given):
        known.asked |= script.asked
    command = _command(script, source, marks)
    options = [*_directives(text), *_options(command), *_deepspeed_stage(text, script)]
    lines = _lines_of_options(text)
    values: dict[str, Setting] = {}
    for option, value in options:
        line, name = lines.get(option), _name(option, aliases)
        before = values.get(name)
        values[name] = Setting(value, option + (f", line {line}" if line else ""))
        if before is not None and before.value != value:
            script.notes.append(f"{option} is there more than once: {before.value}, then {value}; the last one counts")
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"):
        if (value := script.value(name)) is not None:
            values[name] = Setting(value, name)
    programs = [name for word in command if _NO_DECODERS.fullmatch(name := word.rpartition("/")[2])]
    shapes = {name: f"{name}: {_OTHER_MODEL}" for name in programs}
    return Settings(source, values, notes=script.notes, shapes=shapes, unset=script.open_names)


def _command(script: Script, source: str, marks: Sequence[str]) -> list[str]:
    commands = [*map(flags_of, script.commands)]
    found = [words for words in commands if any(mark in words for mark in marks)]
    if found and all(words[0].startswith("--") for words in found):  # a list of options, one a line
        return [word for words in commands if words[0].startswith("--") for word in words]
    if not found:  # options in variables, for another script
        values = [words for words in map(flags_of, script.values) if any(word.startswith("--") for word in words)]
        if not values:
            raise InputError(f"{source}: no command with options of a training, such as {marks[0]}, was found")
        return [word for words in values for word in words]
    if len({tuple(words) for words in found}) > 1 and found[0][0] != "echo":
        script.notes.append(f"{len(found)} commands have options of a training; the last one was read")
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


def _name(option: str, aliases: Mapping[str, str] = ALIASES) -> str:
    name = option.lstrip("-").replace("-", "_")
    return aliases.get(name, name)


def settings_of_tables(data: Any, source: str, aliases: Mapping[str, str] = ALIASES) -> Settings:
    """The settings of a file of tables by their own names, wherever they stand; of two the one nearer to the top."""
    if not isinstance(data, Mapping):
        raise InputError(f"{source}: expected a table at the top")
    settings = Settings(source, {})
    for path, value in sorted(_leaves(interpolated(data)), key=lambda leaf: len(leaf[0])):
        if value is not None:
            name = _name_at(path, aliases)
            found = Setting(value, ".".join(path))
            first = settings.values.setdefault(name, found)
            if first.value is False and value is True and not first.origin.endswith(path[-1]):
                settings.values[name] = found  # the switch by its other, later name
            elif str(first.value) != str(value):
                settings.rivals.setdefault(name, []).append(found)
            if path[-2:] == ("model", "_target_") and _OTHER_CLASS.search(str(value)):
                settings.shapes["_target_"] = f"{found.origin}: {value}: {_OTHER_MODEL}"
    return settings


_IN_TABLES: Final[dict[tuple[str, ...], str]] = {
    ("optim", "name"): "optimizer_name",
    ("tokenizer", "vocab_size"): "tokenizer_vocab_size",
    ("dataset", "seq_length"): "sequence_length",
}
"""Names that mean something else in their table."""


def _name_at(path: tuple[str, ...], aliases: Mapping[str, str]) -> str:
    name = _IN_TABLES.get(tuple(path[-2:]), path[-1].lstrip("-").replace("-", "_"))
    return aliases.get(name, name)


def settings_by_path(data: Mapping[str, Any], source: str) -> Settings:
    """The settings of a file of tables by their whole paths (``training.steps``), which tell equal names apart."""
    paths = {".".join(path): value for path, value in _leaves(data) if value is not None}
    return Settings(source, {path: Setting(value, path) for path, value in paths.items()})


def _leaves(data: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in data.items():
        place = (*path, str(key))
        if isinstance(value, Mapping) and str(value.get("_target_")).endswith(".AttnBackend"):
            yield place, _backend(value)
        elif isinstance(value, Mapping):
            yield from _leaves(value, place)
        else:
            yield place, value


def _backend(value: Mapping[Any, Any]) -> str:
    """Name of an AttnBackend as Megatron-Bridge dumps it: a class and a number."""
    numbers = value.get("_args_")
    number = numbers[0] if isinstance(numbers, list) and numbers else 0
    return _BACKENDS[number] if number in range(len(_BACKENDS)) else ""
