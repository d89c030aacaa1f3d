"""Files of settings: the framework that a file is of, and all files of a training as one draft of a job."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from farpipe.core.catalog import device_row
from farpipe.core.errors import InputError
from farpipe.core.spec import rack_share
from farpipe.core.strict import parse_json, parse_toml, read_text, shaped
from farpipe.interop.cells import inner, unknown_kind
from farpipe.interop.deepspeed import is_neox, read_deepspeed, read_neox
from farpipe.interop.hugging_face import read_model_config, read_trainer
from farpipe.interop.interpolation import Given, with_variables
from farpipe.interop.logs import is_log
from farpipe.interop.megatron import read_script_of_megatron, read_tables_of_megatron
from farpipe.interop.megatron_names import is_megatron
from farpipe.interop.printed_arguments import arguments_of, read_arguments
from farpipe.interop.settings import Draft, Setting
from farpipe.interop.torchtitan import read_python_of_torchtitan, read_saved_torchtitan, read_torchtitan
from farpipe.interop.torchtitan_python import is_python_of_torchtitan
from farpipe.interop.yaml_files import yaml_documents

_TABLES: Final = (".toml", ".json", ".yaml", ".yml")
Form = Literal["auto", "megatron", "torchtitan", "nemo", "deepspeed", "hugging-face", "torch-csv"]
_MARKS: Final = {
    "torchtitan": ("model_spec",),
    "hugging-face": (
        *("model_type", "per_device_train_batch_size", "num_processes", "compute_environment", "output_dir"),
        *("gradient_checkpointing", "max_seq_length", "distributed_type", "model_name_or_path", "base_model"),
    ),
    "deepspeed": ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"),
    "nemo": ("trainer", "train", "model"),
}
"""Keys at the top of a file of tables by which the framework is known, in this order, with one of those beside them."""
_TITAN: Final = (
    *("job", "model", "training", "parallelism", "optimizer", "lr_scheduler", "activation_checkpoint", "checkpoint"),
    *("metrics", "profiling", "compile", "comm", "experimental", "float8", "mx", "quantize", "validation"),
    *("memory_estimation", "fault_tolerance", "debug"),
)
"""Tables of a TOML of torchtitan, which has several."""
_BESIDE: Final = {
    "torchtitan": ("training", "parallelism", "optimizer", "job", "activation_checkpoint", "metrics", "model"),
    "hugging-face": (
        *("architectures", "hidden_size", "num_hidden_layers", "n_layer", "n_embd", "d_model", "vocab_size"),
        *("text_config", "transformers_version", "torch_dtype", "dtype", "learning_rate", "bf16", "fp16", "fsdp"),
        *("fsdp_config", "deepspeed", "deepspeed_config", "gradient_accumulation_steps", "num_train_epochs", "optim"),
        *("max_steps", "num_machines", "mixed_precision", "use_peft", "dataset_name", "base_model", "sequence_len"),
        *("per_device_eval_batch_size", "save_steps", "logging_steps", "warmup_ratio", "tf32", "packing", "max_length"),
        *("micro_batch_size", "parallelism_config", "attn_implementation", "use_cpu", "machine_rank"),
    ),
    "deepspeed": (
        *("gradient_accumulation_steps", "bf16", "fp16", "optimizer", "scheduler", "gradient_clipping", "pipeline"),
        *("steps_per_print", "wall_clock_breakdown", "activation_checkpointing", "tensor_parallel", "num_layers"),
        *("prescale_gradients", "communication_data_type", "zero_allow_untested_optimizer", "flops_profiler", "stage"),
    ),
    "nemo": ("optim", "optimizer", "data", "exp_manager", "log", "resume", "recipe", "num_layers", "hidden_size"),
}
"""Keys that only tell a framework beside one of its marks, or inside of one that is a table."""


def read_draft(paths: Sequence[Path], form: Form = "auto", known: Mapping[str, str] | None = None) -> Draft:
    """The job of the files at `paths` together; `known` has values for variables that a script takes from outside.

    InputError for a file that is of no known framework, and where two files contradict each other.
    """
    whole, given = None, Given(known or {})
    for path in paths:
        with shaped(str(path), "settings of a training"):
            draft = _read(path, form, given)
        whole = draft if whole is None else _joined(whole, draft)
    assert whole is not None, "at least one file"
    whole.changes += [
        f"{origin}: {name} has more settings, and was not given"
        for name, origin in whole.other_files.items()
        if name not in {path.name for path in paths}
    ]
    whole.notes += [
        f"--set {name} was not used: no file takes a variable of this name from outside" for name in given.unused
    ]
    return whole


def _read(path: Path, form: Form, known: Given) -> Draft:
    source = str(path)
    is_megatrons = form in ("auto", "megatron") and path.suffix not in _TABLES
    if is_megatrons and path.is_file() and (printed := arguments_of(path)):
        return read_arguments(printed, source)
    text = read_text(path)
    if path.suffix == ".toml":
        tables = parse_toml(text, source)
        if form == "auto" and len({*_TITAN} & tables.keys()) < 2:
            raise unknown_kind(source, _what(tables))
        return read_torchtitan(tables, source)
    if path.suffix in _TABLES:
        data = parse_json(text, source) if path.suffix == ".json" else _one_document(text, source)
        data, notes = with_variables(data, known)
        draft = _of_tables(data, source, form)
        draft.notes += notes
        return draft
    if path.suffix == ".py" and form in ("auto", "torchtitan") and is_python_of_torchtitan(text):
        return read_python_of_torchtitan(text, source, known.get("config"))
    if not is_megatrons or not is_megatron(text):
        if is_log(path):
            raise InputError(
                f"{source}: this log prints no arguments of Megatron-LM to make a job from: give the settings that it "
                f"ran with; for its steps import it alone, or `farpipe check JOB --log {source}`"
            )
        raise unknown_kind(source, "")
    return read_script_of_megatron(text, source, known)


def _one_document(text: str, source: str) -> Any:
    documents = [one for one in yaml_documents(text, source) if one is not None]
    if len(documents) > 1:
        raise InputError(f"{source}: {len(documents)} documents; write each of them into a file of its own")
    return documents[0] if documents else None


def _of_tables(data: Any, source: str, form: Form) -> Draft:
    if not isinstance(data, Mapping):
        raise unknown_kind(source, f" ({type(data).__name__} at the top, where settings are a table)")
    if form in ("auto", "deepspeed") and is_neox(data):
        draft = _joined(*read_neox(data, source))
        draft.form = "GPT-NeoX"
        return draft
    found = form if form != "auto" else next((name for name in _MARKS if _is_told(name, data)), None)
    if found == "torchtitan":
        return read_saved_torchtitan(data, source)
    if found == "deepspeed":
        return read_deepspeed(data, source)
    if found == "hugging-face":
        is_model = "model_type" in data and not {*data} & {"base_model", "model_name_or_path"}
        return read_model_config(data, source) if is_model else _of_trainer(data, source)
    if found in ("nemo", "megatron") or is_megatron(json.dumps(data, default=str)):
        return read_tables_of_megatron(data, source, "NeMo" if found == "nemo" else "Megatron-LM")
    raise unknown_kind(source, _what(data))


def _is_told(form: str, data: Mapping[Any, Any]) -> bool:
    """True if at least two keys tell this framework, one of them its own."""
    marks = [key for key in _MARKS[form] if key in data]
    within = [key for mark in marks if isinstance(table := data[mark], Mapping) for key in table]
    known = {*marks, *{*_BESIDE[form]}.intersection(map(str, (*data, *within)))}
    is_vocabulary = all(type(value) is int for value in data.values()) and 2 * len(known) < len(data)
    return bool(marks) and len(known) > 1 and not is_vocabulary


def _what(data: Mapping[Any, Any]) -> str:
    """Words for a table that no reader knows."""
    kind, version = inner(data, "kind"), inner(data, "apiVersion")
    if isinstance(kind, str) and isinstance(version, str):
        what = f"a {kind[:40]} of Kubernetes, {version[:60]}"
        return f" ({what}: only records of jobs that ran are read, `kubectl get ... -o json`)"
    return f" (keys {', '.join(str(key)[:40] for key in [*data][:6])}; --format names a framework)"


def _of_trainer(data: Mapping[str, Any], source: str) -> Draft:
    """Arguments of the Trainer, which may hold those of DeepSpeed."""
    inner = data.get("deepspeed")
    if not isinstance(inner, Mapping):
        return read_trainer(data, source)
    outer = {key: value for key, value in data.items() if key != "deepspeed"}
    return _joined(read_trainer(outer, source), read_deepspeed(inner, f"{source}: deepspeed"))


def _joined(one: Draft, other: Draft) -> Draft:
    """Both drafts as one; InputError where they contradict each other. A whole model goes before one's name."""
    for draft, whole in ((one, other), (other, one)):
        if "num_layers" in whole.tables["model"]:
            draft.tables["model"].pop("preset", None)
    for name, table in other.tables.items():
        for key, found in table.items():
            known = one.tables[name].get(key)
            if known is not None and known.value != found.value and not (known.is_open or found.is_open):
                raise InputError(
                    f"{name}.{key}: {known.value!r} by {known.origin}, but {found.value!r} by {found.origin}"
                )
            if known is None or known.is_open:
                one.tables[name][key] = found
    for field in ("num_devices", "num_devices_per_machine", "replica_batch", "accumulation"):
        known, found = getattr(one, field), getattr(other, field)
        if known is not None and found is not None and known.value != found.value:
            raise InputError(f"{known.value} by {known.origin}, but {found.value} by {found.origin}; leave one of them")
        setattr(one, field, known or found)
    one.form = one.form if one.form == other.form else f"{one.form} and {other.form}"
    one.notes += other.notes
    one.not_understood += other.not_understood
    one.without_effect += other.without_effect
    one.unset |= other.unset
    one.changes += other.changes
    one.other_files |= other.other_files
    one.shapes |= other.shapes
    one.unreadable += other.unreadable
    return one


_WITHOUT_FLASH: Final = "has no FlashAttention 2"


def _lacks_flash_attention(device: str) -> bool:
    with suppress(ValueError):  # the job's reader names a device that is not in the catalogue
        return not device_row(device).flash_attention
    return False


def draft_of_devices(draft: Draft, num_devices: int | None, device: str = "") -> Draft:
    """The draft with the number and the kind of devices from outside, and all that follows from them."""
    if num_devices is not None:
        draft.num_devices = Setting(num_devices, "--site")
        draft.tables["layout"].pop("data", None)
    with shaped(draft.form, "settings of a training"):
        draft.settle()
    said = draft.tables["training"].get("flash_attention")
    if _lacks_flash_attention(device) and (said is None or said.value):
        if said is not None and not said.is_open:
            draft.notes.append(f"{said.origin}: {device} {_WITHOUT_FLASH}: the scores of attention are kept")
        draft.put("training", "flash_attention", value=False, origin=f"{device} {_WITHOUT_FLASH}")
    if draft.num_devices is not None and (inside := rack_share(device, draft.num_devices.value)):
        draft.num_devices_per_machine = Setting(inside, "NVLink reaches over a rack")
    return draft
