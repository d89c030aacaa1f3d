"""Checkpoints on disk: what each rank holds in a safetensors file, and a manifest that says that they are whole.

    checkpoints/step-20/rank-0.safetensors    pieces of the whole model's tensors, with a digest of each
    checkpoints/step-20/rank-1.safetensors
    checkpoints/step-20/manifest.json         farpipe/checkpoint/1: step, what was trained, size and digest of the
                                              files, digest of itself

Tensors carry the names that they have in the whole model, and a piece says where it begins, so a checkpoint can be read
under another number of stages, ranks, replicas or twins: ``name@7`` begins at element 7 of the flattened tensor,
``name@4,0`` is a box of it whose first element has these places. Every file appears under its name only when
it is complete and on the disk, and the manifest comes last: a folder without one is not a checkpoint. Nothing is
pickled; torch's own distributed checkpoints keep their index in a pickled file.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farpipe.core.errors import InputError
from farpipe.core.spec import Model
from farpipe.core.spec.hugging_face_count import read_header
from farpipe.engine.checkpoint.boxes import Box, box_at, boxes_of_run, common, sizes_of, within, without
from farpipe.engine.checkpoint.manifest import FileEntry, Manifest
from farpipe.engine.checkpoint.whole_file import is_here
from farpipe.engine.stages.decoder_weights import is_own_name, their_name

_START: Final = re.compile(r"[0-9]{1,18}(,[0-9]{1,18}){0,7}")


@dataclass(frozen=True)
class Piece:
    """Part of a tensor of the whole model that one rank holds: a run of the flattened tensor's elements, or a box."""

    name: str
    """``weight/``, ``exp_avg/`` or ``exp_avg_sq/`` and the parameter's name in the whole model."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    """First element of a run; of a box see `offset`."""
    values: Tensor
    """[num_elements], or of a box [size per dimension]: a live view; written to when a checkpoint is read."""
    is_mine: bool = True
    """True if this rank is the one that puts it into checkpoints."""
    offset: tuple[int, ...] | None = None
    """Place of a box's first element, per dimension; None for a run."""

    @property
    def key(self) -> str:
        """Name of the piece in a file."""
        at = (self.start,) if self.offset is None else self.offset
        return self.name if self.is_whole else f"{self.name}@{','.join(map(str, at))}"

    @property
    def is_whole(self) -> bool:
        """True if it is the whole tensor."""
        return self.values.numel() == prod(self.shape)

    @property
    def stored(self) -> Tensor:
        """A live view as files have it: in the tensor's shape if it is whole."""
        values = self.values.detach()
        return values.reshape(self.shape) if self.is_whole else values

    def parts(self) -> list[tuple[Box, Tensor]]:
        """The piece as boxes, with views of their values."""
        return _parts(self.shape, (self.start,) if self.offset is None else self.offset, self.values)


def _parts(shape: Sequence[int], offset: Sequence[int], values: Tensor) -> list[tuple[Box, Tensor]]:
    """A box of a tensor of `shape`, or the boxes of a run: `offset` has one number, or one per dimension."""
    if len(offset) > 1:
        return [(box_at(offset, values.shape), values)]
    boxes = boxes_of_run(shape, offset[0], offset[0] + values.numel())
    views = torch.split(values.view(-1), [prod(sizes_of(box)) for box in boxes]) if boxes else ()
    return [(box, view.view(sizes_of(box))) for box, view in zip(boxes, views, strict=True)]


def digest(tensor: Tensor) -> str:
    """SHA-256 of the tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


class _Place(NamedTuple):
    """Location of a piece in the files."""

    offset: tuple[int, ...]
    """One number for a run, one per dimension for a box."""
    sizes: tuple[int, ...]
    """Shape in the file."""
    path: Path
    key: str
    sha256: str


class Checkpoint:
    """A checkpoint to read from. Only the tensors that are asked for are read, and each is held against its digest."""

    def __init__(self, folder: Path, manifest: Manifest, elsewhere: Sequence[Path] = ()) -> None:
        """InputError names the file that is damaged. Files that are not here count only when they are needed.

        `elsewhere`: folders with files of the same checkpoint that `folder` may lack.
        """
        self.folder, self.manifest = folder, manifest
        self._places: dict[str, list[_Place]] = {}
        for entry in self.manifest.files:
            paths = [place / entry.name for place in (folder, *elsewhere)]
            path = next((path for path in paths if len(paths) > 1 and is_here(path, entry)), paths[0])
            if not path.exists():
                continue
            for name, place in _places(path, entry):
                self._places.setdefault(_name_now(name, manifest.trained.model), []).append(place)

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Read the values of all `pieces`; InputError names the file that is damaged or missing."""
        for piece in pieces:
            wanted = piece.parts()
            for place in self._places.get(piece.name, []):
                wanted = _take(wanted, place, piece.shape)
            if wanted:
                raise InputError(f"{self.folder}: {self._missing(piece)}")

    def names(self, kind: str) -> set[str]:
        """Parameters of which the files have pieces of a kind, such as ``weight``."""
        return {parameter for place, _, parameter in (name.partition("/") for name in self._places) if place == kind}

    def _missing(self, piece: Piece) -> str:
        absent = [entry for entry in self.manifest.files if not (self.folder / entry.name).exists()]
        if not absent:
            return f"has no {piece.name} of shape {list(piece.shape)}"
        names = ", ".join(f"{entry.name} (written at {entry.site})" for entry in absent)
        return f"{piece.name} is in a file that is not here; copy from the other sites: {names}"


def _name_now(name: str, model: Model) -> str:
    """The name that a tensor of a model of Hugging Face has since transformers computes them; farpipe had its own."""
    kind, _, parameter = name.partition("/")
    if model.hugging_face is None or not is_own_name(parameter):
        return name
    return f"{kind}/{their_name(parameter, model)}"


def _places(path: Path, entry: FileEntry) -> list[tuple[str, _Place]]:
    """(tensor's name, place) of all pieces in a file."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            raise InputError(f"{path}: damaged: {num_bytes} bytes, {entry.num_bytes} were written")
        if hashlib.sha256(read_header(path)).hexdigest() != entry.header_sha256:
            raise InputError(f"{path}: damaged: its table is not what was written")
        with safe_open(path, "pt") as file:
            digests = file.metadata() or {}
            shapes: dict[str, Sequence[int]] = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: can't be read: {error}") from None
    found: list[tuple[str, _Place]] = []
    for key, shape in shapes.items():
        name, _, start = key.partition("@")
        offset = tuple(map(int, start.split(","))) if _START.fullmatch(start) else (0,)
        if (start and not _START.fullmatch(start)) or len(offset) not in (1, len(shape)):
            raise InputError(f"{path}: {key}: not the name of a piece of a tensor")
        found.append((name, _Place(offset, tuple(shape), path, key, digests.get(key, ""))))
    return found


def _take(wanted: list[tuple[Box, Tensor]], place: _Place, shape: Sequence[int]) -> list[tuple[Box, Tensor]]:
    """Read what is wanted of a tensor of `shape` and in `place`; what is still wanted. Pieces may overlap."""
    if len(place.offset) not in (1, len(shape)):
        raise InputError(f"{place.path}: damaged: {place.key} is no piece of a tensor of shape {list(shape)}")
    without_memory = torch.empty(place.sizes, device="meta")
    if not any(common(box, other) for box, _ in wanted for other, _ in _parts(shape, place.offset, without_memory)):
        return wanted
    for other, values in _parts(shape, place.offset, _read(place)):
        left: list[tuple[Box, Tensor]] = []
        for box, target in wanted:
            if (both := common(box, other)) is None:
                left.append((box, target))
                continue
            target[within(box, both)] = values[within(other, both)].to(target)
            left += [(rest, target[within(box, rest)]) for rest in without(box, both)]
        wanted = left
    return wanted


def _read(place: _Place) -> Tensor:
    """The values of a piece."""
    try:
        with safe_open(place.path, "pt") as file:
            tensor: Any = file.get_tensor(place.key)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{place.path}: can't be read: {error}") from None
    if digest(tensor) != place.sha256:
        raise InputError(f"{place.path}: damaged: {place.key} is not what was written")
    values: Tensor = tensor
    return values
