"""Number of parameters of a model of Hugging Face, by the files of its weights or else by transformers' own class."""

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.spec.model import Model
from farpipe.core.strict import parse_json, read_text
from farpipe.core.units import format_large

TOLERANCE: Final = 0.01
"""Largest relative difference between the parameters that are counted and those of the shape that is planned."""
_MAX_VECTORS: Final = 8
"""Widths of vectors in a layer (norms, biases) that a Model may have more or fewer of than the weights."""
FILE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
OLD_BUFFERS: Final = (r"rotary_emb\.inv_freq", r"attn\.(masked_)?bias$", r"attention\.(masked_)?bias$")
"""Names of tensors in older files that are computed today."""
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_FURTHER: Final = re.compile(r"(^|[._])mtp([._]|$)")
_HEAD: Final = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_SCALES: Final = re.compile(
    r"(scales?|scale_inv|scale_2|zeros|zero_point|g_idx|absmax|quant_map|quant_state\.\w+|weight_shape|SCB|weight_format)$"
)
"""Names of what belongs to narrow weights and is no parameter."""
_FORMATS: Final = (
    *("gptq", "awq", "bitsandbytes", "mxfp4"),
    *("fp8", "fbgemm_fp8", "finegrained_fp8", "compressed-tensors", "modelopt"),
)
"""Formats of narrow weights whose tensors are counted, by `quant_method`; packed are those of _WIDTHS alone."""
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a parameter by the type that a config says."""
_WIDTHS: Final = {"I32": 32, "U8": 8}
"""Bits of the numbers that parameters are packed in, by their type in a file."""
_POINTER: Final = b"version https://git-lfs"
_LENGTH: Final = struct.Struct("<Q")
_MAX_HEADER_BYTES: Final = 100 << 20
"""Largest header: as much as safetensors itself allows."""
_LIMIT_S: Final = 120.0
"""Longest wait for transformers' count; it takes 5 s of CPU, nearly all of them to import it."""
_COUNTING: Final = (sys.executable, "-m", "farpipe.engine.stages.count_parameters")
"""Process that counts by transformers' class: planning loads no torch."""


def count_parameters(config: Mapping[str, Any], path: Path, model: Model) -> tuple[int, str] | None:
    """The number of parameters of the model with the `config` at `path`, beside its weights if it has any, and who
    counts so; None where there is nothing to count by. Layers behind those of `model`, which predict further tokens,
    are left out."""
    index, quantization = _index(path.parent), narrow_weights(config)
    files = [path.parent / name for name in (sorted({*index["weight_map"].values()}) if index else [FILE_NAME])]
    if _is_countable(quantization) and all(map(_is_there, files)):
        tensors = (tensor for file in files for tensor in _tensors(file))
        return sum(_size(*one, quantization) for one in tensors if _is_counted(one[0], model)), "its weights have"
    by_index = _by_index(index, config, model) if index and not quantization else None
    if by_index is not None and is_about(model, by_index):
        return by_index, "its index says"
    number = _of_transformers(json.dumps(config, sort_keys=True))
    if number is not None:
        return number, "transformers makes one of"
    return None if by_index is None else (by_index, "its index says")


def is_about(model: Model, counted: int) -> bool:
    """True if this is the number of parameters of `model`, up to norms and biases, which weigh in narrow toy models."""
    vectors = _MAX_VECTORS * model.hidden * model.num_layers
    return abs(model.num_params - counted) <= max(TOLERANCE * counted, vectors)


def expect_count(model: Model, counted: tuple[int, str] | None, source: str) -> None:
    """InputError where `model` has another number of parameters than was counted."""
    if counted is None or is_about(model, counted[0]):
        return
    number, where = counted
    raise InputError(
        f"{source}: read as a model of {format_large(model.num_params)} parameters, but {where} "
        f"{format_large(number)}: a variant of {model.name} that farpipe does not know"
    )


def _is_there(file: Path) -> bool:
    """True for a file of weights; a pointer that git has left in its place is none."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(_POINTER)) != _POINTER


def _index(folder: Path) -> dict[str, Any] | None:
    """The index of several files; None where there is none, or no list of tensors in it."""
    if not (path := folder / INDEX_NAME).is_file():
        return None
    index = parse_json(read_text(path), str(path))
    table = index.get("weight_map") if isinstance(index, dict) else None
    is_list = isinstance(table, dict) and all(isinstance(name, str) for name in table.values())
    return index if is_list and table else None


def _by_index(index: Mapping[str, Any], config: Mapping[str, Any], model: Model) -> int | None:
    """Parameters by the total bytes that the index says; None where it has more than the planned layers."""
    if not all(_is_counted(name, model) for name in index["weight_map"]):
        return None
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    width = _BYTES.get(str(config.get("dtype", config.get("torch_dtype"))))
    return int(size / width) if isinstance(size, int | float) and size > 0 and width else None


def narrow_weights(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table of a config on weights of 8 or 4 bits; empty where they are plain."""
    table = config.get("quantization_config") or config.get("compression_config") or {}
    return table if isinstance(table, Mapping) else {"quant_method": str(table)}


def _is_countable(quantization: Mapping[str, Any]) -> bool:
    """True if it is known how many parameters a tensor of these weights has."""
    return not quantization or quantization.get("quant_method") in _FORMATS


def read_header(path: Path) -> bytes:
    """The length and the table at the beginning of a safetensors file."""
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise InputError(f"{path}: damaged: not the beginning of a safetensors file")
        return start + file.read(length)


def _tensors(file: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Name, type and shape of the tensors in a file of safetensors; InputError where it is none."""
    try:
        header: Any = json.loads(read_header(file)[_LENGTH.size :])
        for name, tensor in header.items():
            if name != "__metadata__":
                yield name, str(tensor["dtype"]), [int(number) for number in tensor["shape"]]
    except (OSError, InputError, ValueError, TypeError, KeyError, AttributeError):
        raise InputError(f"{file}: not a whole safetensors file") from None


def _is_counted(name: str, model: Model) -> bool:
    """True for the tensor of a layer that is planned, and for ends; a tied head is the embedding once more."""
    layer = _LAYER.search(name)
    is_further = _FURTHER.search(name) or (layer is not None and int(layer[1]) >= model.num_layers)
    is_old = any(re.search(old, name) for old in OLD_BUFFERS)
    return not (is_further or is_old or (model.tied_embeddings and _HEAD.search(name)))


def _size(name: str, dtype: str, shape: list[int], quantization: Mapping[str, Any]) -> int:
    """Parameters in a tensor: its elements, or those that are packed in them."""
    number = 1
    for length in shape:
        number *= length
    if not quantization:
        return number
    if _SCALES.search(name):
        return 0
    width = _WIDTHS.get(dtype)
    return number if width is None else number * width // _bits(quantization)


def _bits(quantization: Mapping[str, Any]) -> int:
    """Bits of a parameter that is packed with others: 4 where nothing else is said."""
    if quantization.get("load_in_8bit"):
        return 8
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        bits = (group.get("weights") or {}).get("num_bits") if isinstance(group, Mapping) else None
        if isinstance(bits, int) and bits > 0:
            return bits
    bits = quantization.get("bits", quantization.get("w_bit"))
    return bits if isinstance(bits, int) and bits > 0 else 4


@lru_cache(maxsize=64)
def _of_transformers(config: str) -> int | None:
    """The count of transformers' class for `config`, kept in the user's cache; None where there is no such class."""
    try:
        key = hashlib.sha256(f"{version('transformers')} {version('torch')} {config}".encode()).hexdigest()
    except PackageNotFoundError:
        return None
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farpipe" / "parameters" / key
    with suppress(OSError, ValueError):
        return int(kept.read_text())
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            _COUNTING, input=config, capture_output=True, text=True, timeout=_LIMIT_S, env=environment, check=True
        )
        number = int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(str(number))
    return number
