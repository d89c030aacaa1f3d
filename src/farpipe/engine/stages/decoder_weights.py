"""Files of weights as Hugging Face has them, and the Llama that farpipe's own decoder becomes there.

Files are safetensors, one (``model.safetensors``) or several with an index (``model.safetensors.index.json``). Nothing
is unpickled. The names of parameters here are those of the whole model, whatever stage they are in.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from farpipe.core.errors import InputError, RunError
from farpipe.core.spec import Model
from farpipe.core.spec.hugging_face import CONFIG_NAME, config_of
from farpipe.core.spec.hugging_face_count import FILE_NAME, INDEX_NAME
from farpipe.core.strict import nearest, parse_json, read_text

MAX_SHARD_BYTES: Final = 4 << 30
CARRIED: Final = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("generation_config.json", "added_tokens.json", "chat_template.jinja"),
)
"""Files that are copied from the model that a training began with."""
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_EMBEDDING: Final = "model.embed_tokens.weight"
_OUTER: Final = {"embedding.weight": _EMBEDDING, "norm.gain": "model.norm.weight", "head.weight": "lm_head.weight"}
_NORMS: Final = {"attention_norm.gain": "input_layernorm.weight", "mlp_norm.gain": "post_attention_layernorm.weight"}
_LINEAR: Final = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_WEIGHTS: Final = _NORMS | {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _LINEAR.items()}
_BIASES: Final = {f"{ours}.bias": f"{theirs}.bias" for ours, theirs in _LINEAR.items()}
_QKV_BIASES: Final = [f"attention.{part}.bias" for part in ("query", "key", "value")]
_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)")


def their_name(name: str, model: Model) -> str:
    """The name in Hugging Face's files of a parameter of ours; a tied head is the embedding there."""
    if name == "head.weight" and model.tied_embeddings:
        return _EMBEDDING
    if name in _OUTER:
        return _OUTER[name]
    match = _LAYER.fullmatch(name)
    inner = (_WEIGHTS | _BIASES).get(match[2]) if match else None
    if match is None or inner is None:
        raise InputError(f"the parameter {name!r} has no counterpart in a model of Hugging Face's Llama family")
    return f"model.layers.{match[1]}.{inner}"


def is_own_name(name: str) -> bool:
    """True for a parameter's name in farpipe's own decoder."""
    return name in _OUTER or ((match := _LAYER.fullmatch(name)) is not None and match[2] in _WEIGHTS | _BIASES)


class Files:
    """The safetensors files of a folder and which tensor is in which of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index: dict[str, str] | None = None
        if not (folder / FILE_NAME).exists():
            self._index = _read_index(folder)

    def read(self, names: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors called `names`, one after the other, file by file."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of(name), []).append(name)
        for file, wanted in by_file.items():
            yield from _read_tensors(self.folder / file, wanted)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        if self._index is not None:
            return list(self._index)
        try:
            with safe_open(self.folder / FILE_NAME, framework="pt") as file:
                return list(file.keys())
        except SafetensorError as error:
            raise InputError(f"{self.folder / FILE_NAME}: not a whole safetensors file: {error}") from None

    def path_of(self, name: str) -> Path:
        """The file that has a tensor; InputError if none has."""
        return self.folder / self._file_of(name)

    def _file_of(self, name: str) -> str:
        if self._index is None:
            return FILE_NAME
        if name not in self._index:
            raise InputError(f"{self.folder / INDEX_NAME}: there is no tensor {name}{nearest(name, self._index)}")
        return self._index[name]


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_NAME
    if not path.exists():
        raise InputError(f"{folder}: there is neither {FILE_NAME} nor {INDEX_NAME}; pickled weights are not read")
    data = parse_json(read_text(path), str(path))
    table = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(table, dict) or not all(
        isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors") for file in table.values()
    ):
        raise InputError(f"{path}: weight_map: expected a table from tensors to files of this folder")
    return table


def _read_tensors(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            known = {*file.keys()}
            for name in names:
                if name not in known:
                    raise InputError(f"{path}: there is no tensor {name}{nearest(name, known)}")
                yield name, file.get_tensor(name).clone()  # a mapped page would change with the file
    except SafetensorError as error:
        raise InputError(f"{path}: not a whole safetensors file: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None


def save_model(tensors: Mapping[str, Tensor], model: Model, folder: Path | str, *, dtype: str = "float32") -> None:
    """Write all parameters of `model`, by our names, as a folder that Hugging Face's libraries load.

    `tensors` may read lazily: one file's worth is held at a time. `dtype` is one of DTYPES. InputError when a parameter
    is missing; see `new_folder`.
    """
    names = expected_names(model)
    missing = [name for name in names if name not in tensors]
    if missing:
        raise InputError(f"there is no parameter {missing[0]!r} to export ({len(missing)} of {len(names)} are missing)")
    with new_folder(folder) as new:
        write_tensors(((their_name(name, model), tensors[name]) for name in names), new, dtype)
        (new / CONFIG_NAME).write_text(json.dumps(config_of(model, dtype), indent=2) + "\n")


@contextmanager
def new_folder(folder: Path | str) -> Iterator[Path]:
    """A folder to write to, which is called `folder` when the context ends well: it is there whole or not at all.

    InputError when `folder` has something in it, RunError when the disk is full.
    """
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder}: has something in it; choose another folder or remove this one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            new = Path(temporary) / "model"
            new.mkdir()
            yield new
            if folder.is_dir():
                folder.rmdir()
            new.replace(folder)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{folder}: can't be written: {getattr(error, 'strerror', None) or error}") from None


def expected_names(model: Model) -> list[str]:
    """Our names of all parameters that an export has, in the model's order; a tied head is not among them."""
    inner = [*_WEIGHTS, *(_BIASES if model.bias else _QKV_BIASES if model.qkv_bias else ())]
    layers = [f"layers.{layer}.{name}" for layer in range(model.num_layers) for name in inner]
    head = [] if model.tied_embeddings else ["head.weight"]
    return ["embedding.weight", *layers, "norm.gain", *head]


def write_tensors(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, dtype: str, max_shard_bytes: float = MAX_SHARD_BYTES
) -> None:
    """Write tensors by name, in `dtype`, in files of at most so many bytes or one tensor, with an index if several."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total_bytes = 0

    def flush() -> None:
        path = folder / f"{len(shards)}.part"
        save_file(held, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors leaves it to its owner alone
        shards.append([*held])
        held.clear()

    for name, tensor in tensors:
        written = tensor.detach().to("cpu", DTYPES[dtype]).contiguous()
        if held and sum(other.nbytes for other in held.values()) + written.nbytes > max_shard_bytes:
            flush()
        held[name] = written
        total_bytes += written.nbytes
    flush()
    _name_shards(folder, shards, total_bytes)


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Give the files their names, which say how many there are, and write the index of several."""
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = FILE_NAME if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        body = {"metadata": {"total_size": total_bytes}, "weight_map": index}
        (folder / INDEX_NAME).write_text(json.dumps(body, indent=2) + "\n")


def carry_over(source: Path | str, folder: Path) -> None:
    """Copy the files of a model that a training does not change, tokenizers above all."""
    for name in CARRIED:
        path = Path(source) / name
        if path.is_file():
            shutil.copyfile(path, folder / name)
