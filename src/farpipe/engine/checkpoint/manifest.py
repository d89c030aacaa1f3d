"""Manifest of a checkpoint: finding those of a run, and whether they are of the same training. Needs no torch."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import AfterValidator, Field

from farpipe.core.document import Document
from farpipe.core.errors import InputError
from farpipe.core.spec import Lora, Model
from farpipe.core.spec.part import Natural, Part, SiteName, Text
from farpipe.core.strict import validate
from farpipe.core.units import counted
from farpipe.engine.checkpoint.folders import (
    CHECKPOINTS_NAME,
    MANIFEST_NAME,
    folder_of,
    sync_folder,
    whole_checkpoints,
)
from farpipe.engine.run_spec import RunSpec

DIGEST_KEY: Final = "sha256"
_FILE_NAME: Final = re.compile(r"rank-[0-9]{1,9}\.safetensors")
_HINT: Final = "start another training in another directory"


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"the file of a rank is called rank-0.safetensors or the like, found {name!r}")
    return name


class FileEntry(Part):
    """One rank's file, as the manifest knows it."""

    name: Annotated[Text, AfterValidator(_file_name)]
    site: SiteName
    num_bytes: Natural
    header_sha256: Text
    """Digest of the part before the tensors, which has their digests."""


class Trained(Part):
    """Training that a checkpoint belongs to. Going on with another model or other batches would be another training."""

    model: Model
    sequence_length: Natural
    global_batch: Natural
    seed: Natural
    lora: Annotated[Lora | None, Field(exclude_if=lambda given: given is None)] = None
    """Adapters, where all other weights are those that the training began with."""


class ModelFacts(Part):
    """Facts of a model beyond its `Model`, as text or digests by name: equal at all sites, and after every start."""

    transformers: str = ""
    """The version that read `config`: another one may know other keys."""
    config: dict[str, str] = Field(default_factory=dict)
    """Meaning of config.json, as JSON by key; of nested tables each key."""
    buffers: dict[str, str] = Field(default_factory=dict)
    """Tensors that every start reads from the model's files, since no checkpoint has them."""
    code: dict[str, str] = Field(default_factory=dict)
    """Files of a module of the user's own."""


class Manifest(Document, Part):
    """``manifest.json``: its presence says that all files were complete and on the disk."""

    FORMAT: ClassVar[str] = "farpipe/checkpoint/1"
    INDENT: ClassVar[int | None] = 1

    step: Natural
    """Steps that were done, and so the number of the next one."""
    farpipe: Text
    """The version that wrote it."""
    trained: Trained
    batches_sha256: str
    """Equal if every step gets the same sequences of the same text, whatever the microbatches; see Batches.digest."""
    files: tuple[FileEntry, ...] = Field(min_length=1)
    facts: ModelFacts = ModelFacts()
    """Empty in checkpoints of earlier versions."""

    def to_body(self) -> dict[str, Any]:
        """The content as JSON data, with a digest of itself."""
        body = self.model_dump(mode="json")
        return {**body, DIGEST_KEY: _digest_of_json({"format": self.FORMAT, **body})}

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        """The manifest in `body`; InputError unless its digest is there and matches."""
        written = body.pop(DIGEST_KEY, None)
        manifest = validate(cls, body, source)
        if written != _digest_of_json({"format": cls.FORMAT, **body}):
            raise InputError(f"{source}: damaged: its content does not match its {DIGEST_KEY}")
        return manifest

    def save(self, path: Path | str) -> None:
        """Write it into the folder `path`, whole or not at all, and the folder's entry to the disk."""
        super().save(Path(path) / MANIFEST_NAME)
        sync_folder(Path(path))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read that of the folder `path`; InputError when it is missing or damaged."""
        return super().load(Path(path) / MANIFEST_NAME)


def _digest_of_json(body: Mapping[str, Any]) -> str:
    """SHA-256 of `body` as JSON with sorted keys and no spaces, so that only what it says counts."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def trained_by(run: RunSpec) -> Trained:
    """Return the model, training and data that a checkpoint of `run` belongs to."""
    assert run.plan.model is not None
    assert run.plan.training is not None
    return Trained(
        model=run.plan.model,
        sequence_length=run.plan.training.sequence_length,
        global_batch=run.whole_batch or run.plan.training.global_batch,
        seed=run.plan.training.seed,
        lora=run.plan.training.lora,
    )


def folder_around(place: Path) -> Path:
    """Folder of the checkpoints, given that folder or the run directory around it."""
    inner = place / CHECKPOINTS_NAME
    return inner if inner.is_dir() else place


def find_manifests(place: Path) -> tuple[dict[int, tuple[Path, Manifest]], dict[int, str]]:
    """(folder, manifest) by step of the checkpoints at `place`, or of the one that it is, and why others are damaged.

    InputError when `place` is one checkpoint whose manifest is damaged.
    """
    if (place / MANIFEST_NAME).exists():
        manifest = Manifest.load(place)
        return {manifest.step: (place, manifest)}, {}
    found: dict[int, tuple[Path, Manifest]] = {}
    damaged: dict[int, str] = {}
    for step in whole_checkpoints(folder_around(place)):
        folder = folder_of(folder_around(place), step)
        try:
            manifest = Manifest.load(folder)
            if manifest.step != step:
                raise InputError(f"{folder / MANIFEST_NAME}: is of step {manifest.step}, not {step}")
            found[step] = folder, manifest
        except InputError as error:
            damaged[step] = str(error)
    return found, damaged


def check_same(run: RunSpec, manifest: Manifest, folder: Path, batches_sha256: str) -> None:
    """InputError when a checkpoint is of another training than `run`."""
    now, then = trained_by(run), manifest.trained
    for key in type(now).model_fields:
        if getattr(now, key) != getattr(then, key):
            raise InputError(f"{folder}: is of a training with another {key}; {_HINT}")
    if batches_sha256 != manifest.batches_sha256:
        raise InputError(f"{folder}: the training text is no longer the same; bring it back, or {_HINT}")


def no_usable(problems: Sequence[str]) -> InputError:
    """Error for checkpoints of which none is good: to begin at step 0 would be another training."""
    return InputError(
        "no checkpoint can be used:\n  " + "\n  ".join(problems) + "\nnothing was changed; copy a good checkpoint "
        "there, or start another training in another directory"
    )


def all_done(place: Path, newest: int, num_steps: int) -> InputError:
    """Error for a run that has no step left to do."""
    return InputError(
        f"{place}: the checkpoint after {counted(newest, 'step')} has all {num_steps} steps of this run; "
        "ask for more with --steps"
    )
