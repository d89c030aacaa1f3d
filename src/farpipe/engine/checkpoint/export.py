"""Export of a run's trained weights, out of its checkpoints."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from farpipe.core.errors import InputError
from farpipe.core.spec import Lora, Model
from farpipe.core.spec.hugging_face_count import FILE_NAME
from farpipe.core.strict import write_text
from farpipe.engine.checkpoint.files import Checkpoint, Piece
from farpipe.engine.checkpoint.folders import (
    CHECKPOINTS_NAME,
    MANIFEST_NAME,
    checkpoint_folders,
    folder_of,
    newest_of_run,
    run_around,
)
from farpipe.engine.checkpoint.manifest import Manifest, Trained
from farpipe.engine.figures.metrics import RUN_NAME
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.stages.decoder import Decoder, initialise
from farpipe.engine.stages.decoder_weights import new_folder, save_model, their_name, write_tensors
from farpipe.engine.stages.slices import SliceModule, StageSlice

_BASE_NAME: Final = "base"


class CheckpointWeights(Mapping[str, Tensor]):
    """Parameters of a checkpoint by their names in the whole model, in float32; read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, shapes: Mapping[str, torch.Size] | None = None) -> None:
        """`shapes` by name; None: those of farpipe's own decoder."""
        self._checkpoint, trained = checkpoint, checkpoint.manifest.trained
        self._shapes = shapes or parameter_shapes(trained.model, trained.sequence_length)

    def __getitem__(self, name: str) -> Tensor:
        """InputError when its file is damaged, or is at another site."""
        shape = self._shapes[name]
        values = torch.empty(shape)
        self._checkpoint.fill([Piece(f"weight/{name}", tuple(shape), 0, values.view(-1))])
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def parameter_shapes(model: Model, sequence_length: int) -> dict[str, torch.Size]:
    """The shape of every parameter of farpipe's own decoder, by name."""
    whole = _whole_decoder(model, sequence_length)
    return {name: parameter.shape for name, parameter in whole.named_parameters()}


def _whole_decoder(model: Model, sequence_length: int) -> Decoder:
    """farpipe's own decoder as one slice, whose parameters have no memory."""
    with torch.device("meta"):
        return Decoder(model, StageSlice(0, model.num_layers, True, True), sequence_length)


def export_to_hugging_face(source: Path | str, folder: Path | str, *, dtype: str = "float32") -> int:
    """Write the newest checkpoint of the run in `source`, or `source` if it is one itself; the steps it was trained.

    Of a training of adapters it is peft's folder. InputError when there is none, when a part of it is at another site,
    or when the model has no form in files of Hugging Face's.
    """
    checkpoint = _newest(Path(source))
    model = checkpoint.manifest.trained.model
    if checkpoint.manifest.trained.lora is not None:
        export_adapters(checkpoint, checkpoint.manifest.trained.lora, folder, dtype)
        return checkpoint.manifest.step
    if model.module is not None:
        raise InputError(f"{source}: a module of your own ({model.module}) has no form in files of Hugging Face's")
    if model.is_of_transformers:
        _export_transformers(checkpoint, model, folder, dtype)
    else:
        save_model(CheckpointWeights(checkpoint), model, folder, dtype=dtype)
    if trained_on_bytes(checkpoint):
        for name, text in byte_tokenizer().items():
            write_text(Path(folder) / name, text)
    return checkpoint.manifest.step


def _export_transformers(checkpoint: Checkpoint, model: Model, folder: Path | str, dtype: str) -> None:
    """Write a model that transformers computes."""
    from farpipe.engine.stages import hugging_face_weights as files  # takes seconds, which no other export needs

    shapes = files.parameter_shapes(files.config_of_model(model), checkpoint.names("weight"))
    files.save(CheckpointWeights(checkpoint, shapes), model, folder, dtype=dtype)


def export_adapters(checkpoint: Checkpoint, lora: Lora, folder: Path | str, dtype: str) -> None:
    """Write trained adapters as peft has them: ``PeftModel.from_pretrained(model, folder)`` reads them.

    The base of a model given by numbers, which exists nowhere else, is written beside them, as ``base``.
    """
    from farpipe.engine.stages import adapters

    trained = checkpoint.manifest.trained
    if trained.model.module is not None:
        raise InputError(f"{checkpoint.folder}: adapters of a module of your own have no form in files of peft's")
    whole = _whole_slice(trained.model, trained.sequence_length)
    config = adapters.peft_config(lora, names := adapters.adapted_names(whole, lora), whole)
    adapters.inject(whole, lora)
    shapes = {name: parameter.shape for name, parameter in whole.trained_parameters.items()}
    weights, name_of = CheckpointWeights(checkpoint, shapes), _their_names(trained.model)
    began_with = trained.model.hugging_face or str((Path(folder) / _BASE_NAME).resolve())
    with new_folder(folder) as new:
        write_tensors(((adapters.their_name(name_of(name)), weights[name]) for name in shapes), new, dtype, math.inf)
        (new / FILE_NAME).rename(new / "adapter_model.safetensors")
        config.target_modules = sorted({adapters.short_name(name_of(name)) for name in names})
        config.base_model_name_or_path, config.inference_mode = began_with, True
        config.save_pretrained(new)
        if trained.model.hugging_face is None:
            _write_base(trained, new / _BASE_NAME, dtype)


def _whole_slice(model: Model, sequence_length: int) -> SliceModule:
    """The whole model as one slice, whose parameters have no memory."""
    if not model.is_of_transformers:
        return _whole_decoder(model, sequence_length)
    from farpipe.engine.stages.hugging_face import HuggingFaceSlice, build
    from farpipe.engine.stages.hugging_face_weights import config_of_model

    part = StageSlice(0, model.num_layers, True, True)
    return HuggingFaceSlice(build(config_of_model(model), torch.float32), part)


def _their_names(model: Model) -> Callable[[str], str]:
    """Maps names of our modules and adapters to those in files of transformers and peft."""
    if model.hugging_face is not None:
        return str

    def their_module(name: str) -> str:
        """``layers.0.attention.query``, with what an adapter adds behind it, in Hugging Face's Llama."""
        place, mark, rest = name.partition(".lora_")
        return their_name(f"{place}.weight", model).removesuffix(".weight") + mark + rest

    return their_module


def _write_base(trained: Trained, folder: Path, dtype: str) -> None:
    """The weights that a training of a model given by numbers began with, which its seed makes again."""
    base = Decoder(trained.model, StageSlice(0, trained.model.num_layers, True, True), trained.sequence_length)
    initialise(base, trained.seed)
    save_model(dict(base.named_parameters()), trained.model, folder, dtype=dtype)


def trained_on_bytes(checkpoint: Checkpoint) -> bool:
    """True if tokens were bytes of text, which the run's ``run.json`` says; False if there is none."""
    run = run_around(checkpoint.folder) / RUN_NAME
    return (
        run.exists() and checkpoint.manifest.trained.model.hugging_face is None and RunSpec.load(run).plan.data.is_bytes
    )


def byte_tokenizer() -> dict[str, str]:
    """Files of a tokenizer of Hugging Face's whose token of a byte is its value, by name.

    Byte-level BPE without merges; each byte maps to a character as in GPT-2's ``bytes_to_unicode``.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {characters[byte]: byte for byte in range(256)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(config)}


def _newest(source: Path) -> Checkpoint:
    if not (source / MANIFEST_NAME).exists():
        newest = newest_of_run(source)
        if newest is None:
            raise InputError(
                f"{source}: neither a run with a whole checkpoint in {source / CHECKPOINTS_NAME} nor a checkpoint "
                "itself"
            )
        elsewhere = [folder_of(place, int(newest.name.split("-")[1])) for place in checkpoint_folders(source)]
        return Checkpoint(newest, Manifest.load(newest), elsewhere)
    return Checkpoint(source, Manifest.load(source))
