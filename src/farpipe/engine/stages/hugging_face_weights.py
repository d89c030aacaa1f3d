"""Weights of slices of transformers' models: read from safetensors, each rank only its own, and written back.

Names and layouts in files are those of transformers' ``save_pretrained``; where a model keeps its parameters in another
form (experts in one tensor), transformers' own conversions stand between.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from farpipe.core.errors import InputError
from farpipe.core.spec import Model
from farpipe.core.spec.experts_by_number import config_with_experts
from farpipe.core.spec.hugging_face import CONFIG_NAME, quantization_of
from farpipe.core.spec.hugging_face_count import OLD_BUFFERS, read_header
from farpipe.core.strict import parse_json
from farpipe.engine.stages.decoder import normal
from farpipe.engine.stages.decoder_weights import (
    MAX_SHARD_BYTES,
    Files,
    carry_over,
    new_folder,
    write_tensors,
)
from farpipe.engine.stages.hugging_face import HuggingFaceSlice, build, fill
from farpipe.engine.stages.slices import StageSlice
from farpipe.engine.stages.weight_grads import is_divided

_STD = 0.02
"""Standard deviation of random weights, for measuring times only."""
_COMPUTES_NOTHING: Final = (
    *("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache", "initializer_range"),
    *("id2label", "label2id", "problem_type", "return_dict", "output_hidden_states", "output_attentions"),
    *("bos_token_id", "eos_token_id"),
)
"""Keys of a config that change no number of a training that begins with weights from files."""
_BLOCK_BYTES: Final = 4096
_BLOCKS_OF_TENSOR: Final = 16
_BLOCKS_OF_MODEL: Final = 8192
"""Sampled blocks of a tensor and, but for one of each tensor, of a whole model: 1.3 s where a read takes 0.1 ms."""


def read_config(folder: Path | str) -> PreTrainedConfig:
    """The config of the model in `folder`; InputError where transformers does not know it."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: {CONFIG_NAME}: transformers can't read it: {error}") from None
    if kind := quantization_of(folder):
        raise InputError(
            f"{folder}: {CONFIG_NAME}: quantization_config: weights in {kind} can be planned, but not read"
        )
    text: PreTrainedConfig = config.get_text_config()
    return text


def config_of_model(model: Model) -> PreTrainedConfig:
    """The config of a model that transformers computes: that in its folder, or one made from its numbers."""
    if model.hugging_face is not None:
        return read_config(model.hugging_face)
    fields = config_with_experts(model)
    config: PreTrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return config


def config_facts(folder: Path | str) -> dict[str, str]:
    """Meaning of the config in `folder` to transformers, as JSON by key; of nested tables each key."""
    config = read_config(folder)
    kernels = {key: getattr(config, key, None) for key in ("_attn_implementation", "_experts_implementation")}
    return dict(
        _flat({key: value for key, value in config.to_dict().items() if key not in _COMPUTES_NOTHING} | kernels)
    )


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            is_whole = isinstance(value, float) and value.is_integer()  # 10000 and 10000.0 are one number
            yield f"{before}{key}", json.dumps(int(value) if is_whole else value, sort_keys=True, default=str)


def sampled_digests(folder: Path | str) -> dict[str, str]:
    """A digest of names, types, shapes and a sample of the numbers, by layer, and by tensor outside layers.

    Equal for the same tensors in other files. Layers of which a file is not whole, or not here, are left out.
    """
    files, found = Files(Path(folder)), dict[str, str]()
    names, by_file = files.names, defaultdict[Path, list[str]](list)
    for name in names:
        by_file[files.path_of(name)].append(name)
    num_blocks = max(1, min(_BLOCKS_OF_TENSOR, _BLOCKS_OF_MODEL // max(1, len(names))))
    for path, group in by_file.items():
        with suppress(OSError, InputError, ValueError, KeyError, TypeError):
            found |= _sampled(path, group, num_blocks)
    whole = [group for group in _groups(sorted(names)) if all(name in found for name in group)]
    return {_layer_of(group[0]): _digest("".join(found[name] for name in group).encode()) for group in whole}


def _sampled(path: Path, names: list[str], num_blocks: int) -> dict[str, str]:
    """A digest of each tensor: of all its bytes where they are few, otherwise of blocks spread over it."""
    header, found = read_header(path), {}
    table = parse_json(header[8:].decode(), str(path))
    if len(header) + max(table[name]["data_offsets"][1] for name in names) > path.stat().st_size:
        raise InputError(f"{path}: not whole")
    with path.open("rb", buffering=0) as file:
        for name in names:
            begin, end = table[name]["data_offsets"]
            parts = [f"{name} {table[name]['dtype']} {table[name]['shape']} ".encode()]
            for start, size in _blocks(end - begin, num_blocks):
                file.seek(len(header) + begin + start)
                parts.append(file.read(size))
            found[name] = _digest(b"".join(parts))
    return found


def _blocks(num_bytes: int, num_blocks: int) -> list[tuple[int, int]]:
    """(start, size) of blocks in the middles of equal parts; of everything where that is not more."""
    if num_bytes <= num_blocks * _BLOCK_BYTES:
        return [(0, num_bytes)]
    free = num_bytes - _BLOCK_BYTES
    return [(free * (2 * block + 1) // (2 * num_blocks), _BLOCK_BYTES) for block in range(num_blocks)]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def load(module: HuggingFaceSlice, folder: Path | str) -> None:
    """Fill the parameters of `module` from the files in `folder`, of which only the tensors of its slice are read.

    Of a parameter that is divided over processes (a DTensor) each reads its own part. InputError names a tensor that is
    missing or has another shape, and a file that is damaged, missing or written to meanwhile.
    """
    model, files = module.inner, Files(Path(folder))
    conversions = get_model_conversion_mapping(model)
    wanted = _wanted(model, files.names, conversions, module.shared_names)
    _expect_no_others(model, files.names, wanted, folder)
    tensors, before = _stored(files, wanted, module.part), _stamps(files, wanted)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings = LoadStateDictConfig(dtype=model.dtype, weight_mapping=conversions)  # type: ignore[arg-type]
    try:
        info, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
    except SafetensorError as error:
        raise InputError(f"{folder}: not a whole safetensors file: {error}") from None
    if module.part.has_embedding and module.part.has_head:
        model.tie_weights()
    if changed := _stamps(files, wanted) - before:
        raise InputError(f"{min(changed)[0]}: was written to while it was read; start again when it is whole")
    _expect_all(model, info, folder)


def _stamps(files: Files, wanted: Mapping[str, str]) -> set[tuple[Path, int, int, int]]:
    """Every file that is needed, with what changes when it is written to."""
    found = {path: path.stat() for path in {files.path_of(name) for name in wanted.values()}}
    return {(path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def _wanted(
    model: PreTrainedModel, names: Iterable[str], conversions: list[Any], shared: Mapping[str, str]
) -> dict[str, str]:
    """Names of the tensors that `model` needs: as transformers shall see them -> in the files."""
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    state = model.state_dict()
    tied = {head for head, table in shared.items() if table in state}  # read once, as the embedding's
    found: dict[str, str] = {}
    for name in names:
        inner, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        for head, table in shared.items():
            if inner == table and head in state.keys() - tied:
                found[head] = name
        if (inner in state or name in state) and inner not in tied:
            found[name] = name
    return found


def _expect_no_others(model: PreTrainedModel, names: Iterable[str], wanted: Iterable[str], folder: Path | str) -> None:
    """InputError for a tensor of the slice's layers that their class does not have: another model would be trained."""
    known, ignored = {*wanted}, "|".join([*(model._keys_to_ignore_on_load_unexpected or ()), *OLD_BUFFERS])
    layers = {_layer_of(name) for name in known}
    for name in names:
        if name not in known and _layer_of(name) in layers and not re.search(ignored, name):
            kind = type(model).__name__
            raise InputError(f"{folder}: {kind} has no {name}; {CONFIG_NAME} is of another class than the files")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, read by parts as transformers reads its slices.

    The file is opened for each part, and the part copied: safetensors gives out mapped pages, which would be those of
    whatever is written over the file later, and lost where that is shorter.
    """

    path: Path
    name: str
    shape: list[int]
    dtype: str

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: Any) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            part: Tensor = file.get_slice(self.name)[index].clone()
        return part


def _stored(files: Files, wanted: Mapping[str, str], part: StageSlice) -> dict[str, StoredTensor]:
    """Tensors of a stage by name, none of which is read yet; InputError for a file that can't be."""
    by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name, stored in wanted.items():
        by_file[files.path_of(stored)].append((name, stored))
    found: dict[str, StoredTensor] = {}
    for path, rows in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name, stored in rows:
                    tensor = file.get_slice(stored)
                    found[name] = StoredTensor(path, stored, tensor.get_shape(), tensor.get_dtype())
        except SafetensorError as error:
            raise InputError(f"{path}: not a whole safetensors file, or not that of its index: {error}") from None
        except OSError as error:
            needed = f"the stage of layers {part.first_layer} to {part.end_layer - 1} needs it at this site"
            raise InputError(f"{path}: can't be read: {error.strerror or error}; {needed}") from None
    return found


def _expect_all(model: PreTrainedModel, info: Any, folder: Path | str) -> None:
    """InputError unless every parameter of the slice has its values."""
    hint = f"does {CONFIG_NAME} belong to these files?"
    if info.mismatched_keys:
        name, *shapes = min(info.mismatched_keys)
        raise InputError(f"{folder}: {name} is {list(shapes[0])}, but the model needs {list(shapes[1])}; {hint}")
    if info.conversion_errors:
        name, reason = next(iter(info.conversion_errors.items()))
        raise InputError(f"{folder}: {name} can't be made from the files: {reason}; {hint}")
    if empty := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise InputError(f"{folder}: there is no tensor {empty[0]}; {hint}")


def randomise(module: HuggingFaceSlice) -> None:
    """Fill the parameters with small random numbers, where only times count."""
    for name, parameter in list(module.named_parameters()):
        gain = 1.0 if parameter.ndim < 2 and not name.endswith("bias") else 0.0
        fill(parameter, torch.randn(parameter.shape, dtype=parameter.dtype) * _STD + gain)


def initialise(module: HuggingFaceSlice, seed: int, num_layers: int) -> None:
    """Fill the parameters, or this process's parts of them, from `seed` and their names alone, as the own decoder's.

    Matrices, those of experts too, are normal; what feeds the residual stream of `num_layers` layers is smaller.
    """
    for name, parameter in list(module.named_parameters()):
        if parameter.ndim < 2:
            values = torch.full(parameter.shape, 0.0 if name.endswith("bias") else 1.0)
        else:
            parts = {*name.split(".")} & {"o_proj", "down_proj"}
            values = normal(module.shared_names.get(name, name), parameter.shape, seed, num_layers if parts else None)
        values = values.to(parameter.dtype)
        fill(parameter, _own_part(values, parameter))


def _own_part(values: Tensor, parameter: Tensor) -> Tensor:
    """What this process has of a parameter's `values`, divided as it is."""
    if not is_divided(parameter):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    size, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    own = values[tuple(slice(begin, begin + length) for begin, length in zip(offset, size, strict=True))].clone()
    found: Tensor = DTensor.from_local(
        own, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return found


def parameter_shapes(config: PreTrainedConfig, trained: Collection[str] = ()) -> dict[str, torch.Size]:
    """The shape of every parameter of the whole model, by name; a tied head is not among them.

    Also of those buffers that are among the names in `trained`: biases of routers.
    """
    model = build(config, torch.float32)
    buffers = {name: buffer.shape for name, buffer in model.named_buffers() if name in trained}
    return {name: parameter.shape for name, parameter in model.named_parameters()} | buffers


def save(
    weights: Mapping[str, Tensor],
    shape: Model,
    folder: Path | str,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model as ``save_pretrained`` does, with config and tokenizer of the folder that its training began with.

    The config of a model that is given by numbers is made from these.

    `weights` by name, which may read lazily: those of one layer and one file are held at a time. See `new_folder`.
    """
    began_with = None if shape.hugging_face is None else Path(shape.hugging_face)
    model = build(config_of_model(shape), torch.float32)
    config = _written_config(shape)
    with new_folder(folder) as new:
        write_tensors(_in_files(model, weights, began_with), new, dtype, max_shard_bytes)
        (new / CONFIG_NAME).write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
        if began_with is not None:
            carry_over(began_with, new)


def _written_config(model: Model) -> dict[str, Any]:
    if model.hugging_face is None:
        return config_with_experts(model)
    config: dict[str, Any] = json.loads((Path(model.hugging_face) / CONFIG_NAME).read_text())
    return config


def _in_files(
    model: PreTrainedModel, weights: Mapping[str, Tensor], began_with: Path | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors by their names in files; buffers that are saved but not trained come from `began_with`, or are
    as they were made."""
    has_conversions = bool(get_model_conversion_mapping(model, add_legacy=False))
    parameters, buffers = ({name for name, _ in named} for named in (model.named_parameters(), model.named_buffers()))
    for names in _groups(name for name in weights if name in parameters | buffers):
        tensors = {name: weights[name] for name in names}
        yield from (revert_weight_conversion(model, tensors) if has_conversions else tensors).items()
    kept = (buffers & model.state_dict().keys()) - weights.keys()
    if began_with is not None:
        yield from Files(began_with).read(dict.fromkeys(sorted(kept)))
    else:
        yield from ((name, model.get_buffer(name)) for name in sorted(kept))


def _groups(names: Iterable[str]) -> list[list[str]]:
    """Names that belong together in files: those of a layer, and each of the others."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[_layer_of(name)].append(name)
    return list(found.values())


def _layer_of(name: str) -> str:
    """The beginning of a tensor's name that its layer's tensors share; all of it outside layers."""
    words = name.split(".")
    number = next((place for place, word in enumerate(words) if word.isdigit()), len(words))
    return ".".join(words[: number + 1])
