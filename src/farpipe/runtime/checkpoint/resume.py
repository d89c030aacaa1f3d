"""Step that a run goes on from: all ranks together choose the newest checkpoint that every one of them can read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farpipe.errors import InputError
from farpipe.runtime.checkpoint.checkpointer import trained_by
from farpipe.runtime.checkpoint.files import Checkpoint, Manifest, Piece
from farpipe.runtime.checkpoint.folders import (
    CHECKPOINTS_NAME,
    MANIFEST_NAME,
    abandon_after,
    folder_of,
    remove_incomplete,
    whole_checkpoints,
)
from farpipe.runtime.peers import Peers
from farpipe.runtime.run_spec import RunSpec

_HINT: Final = "start another training in another directory"


@dataclass(frozen=True)
class Start:
    """First step of a run, and the checkpoint that it starts from."""

    step: int = 0
    folder: Path | None = None
    """The checkpoint that was read."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that could not be used, with the reason."""


def resume(run: RunSpec, state: Sequence[Piece], peers: Peers, run_dir: Path, batches_sha256: str) -> Start:
    """Read the newest good checkpoint into `state`: one of the run itself, or else of the one that it goes on from.

    Newer ones of the run itself are put aside. InputError when there are checkpoints but none that can be used, or
    when `run.resume` has none. Where nothing is found, what looks like the rest of a checkpoint is put aside as well.
    """
    own = run_dir / CHECKPOINTS_NAME
    start = _read_newest(run, state, peers, own, "its own checkpoints", batches_sha256)
    if start is not None:
        abandon_after(own, start.step)
        remove_incomplete(own)
    else:
        start = _read_other(run, state, peers, batches_sha256)
        abandon_after(own, -1)
    peers.exchange("resumed", b"", waiting_for="the others to put old checkpoints aside")
    return start or Start()


def _read_other(run: RunSpec, state: Sequence[Piece], peers: Peers, batches_sha256: str) -> Start | None:
    """From the checkpoints of another run; None where the run names none."""
    if run.resume is None:
        return None
    other = Path(run.resume)
    start = _read_newest(run, state, peers, other, "the checkpoints to go on from", batches_sha256)
    if start is None:
        raise InputError(f"{other}: there is no checkpoint to go on from")
    return start


def _read_newest(
    run: RunSpec, state: Sequence[Piece], peers: Peers, place: Path, what: str, batches_sha256: str
) -> Start | None:
    """None when nobody has a checkpoint at `place`."""
    found, damaged = find_manifests(place)
    mine = {"manifests": {step: manifest.to_json() for step, (_, manifest) in found.items()}, "damaged": damaged}
    answers = peers.exchange(f"found {what}", json.dumps(mine).encode(), waiting_for=f"what the others have of {what}")
    told = [json.loads(answer) for answer in answers]
    texts = {int(step): text for answer in told for step, text in answer["manifests"].items()}
    damages = {int(step): reason for answer in told for step, reason in answer["damaged"].items()}
    problems: list[str] = []
    for step in sorted((step for step in texts.keys() | damages if step < run.num_steps), reverse=True):
        if step in damages:  # another rank may still have a good copy
            problems.append(damages[step])
        if step not in texts:
            continue
        manifest = Manifest.from_json(texts[step], f"the manifest of step {step}")
        folder = found[step][0] if step in found else folder_of(_folder(place), step)
        mine_read = _read(run, state, folder, manifest, batches_sha256)
        answers = peers.exchange(
            f"read {what} {step}", mine_read.encode(), waiting_for=f"the others to read step {step}"
        )
        problem = next((answer.decode() for answer in answers if answer), None)
        if problem is None:
            if step not in found:  # the crash came between two ranks' writing it, or this copy is damaged
                manifest.save(folder)
            return Start(step, folder, tuple(problems))
        problems.append(problem)
    if problems:
        raise no_usable(problems)
    if texts or damages:
        raise all_done(place, max(texts.keys() | damages), run.num_steps)
    return None


def no_usable(problems: Sequence[str]) -> InputError:
    """Error for checkpoints of which none is good: to begin at step 0 would be another training."""
    return InputError(
        "no checkpoint can be used:\n  " + "\n  ".join(problems) + "\nnothing was changed; copy a good checkpoint "
        "there, or start another training in another directory"
    )


def all_done(place: Path, newest: int, num_steps: int) -> InputError:
    """Error for a run that has no step left to do."""
    return InputError(
        f"{place}: the checkpoint after {newest} steps has all {num_steps} steps of this run; ask for more with --steps"
    )


def _folder(place: Path) -> Path:
    """Folder of the checkpoints, given that folder or the run directory around it."""
    inner = place / CHECKPOINTS_NAME
    return inner if inner.is_dir() else place


def find_manifests(place: Path) -> tuple[dict[int, tuple[Path, Manifest]], dict[int, str]]:
    """Of all checkpoints at `place`, or of the one that it is, by step: (folder, manifest), and why others are damaged.

    InputError when `place` is one checkpoint whose manifest is damaged.
    """
    if (place / MANIFEST_NAME).exists():
        manifest = Manifest.load(place)
        return {manifest.step: (place, manifest)}, {}
    found: dict[int, tuple[Path, Manifest]] = {}
    damaged: dict[int, str] = {}
    for step in whole_checkpoints(_folder(place)):
        folder = folder_of(_folder(place), step)
        try:
            manifest = Manifest.load(folder)
            if manifest.step != step:
                raise InputError(f"{folder / MANIFEST_NAME}: is of step {manifest.step}, not {step}")
            found[step] = folder, manifest
        except InputError as error:
            damaged[step] = str(error)
    return found, damaged


def _read(run: RunSpec, state: Sequence[Piece], folder: Path, manifest: Manifest, batches_sha256: str) -> str:
    """Read a checkpoint into `state`; why that can't be, or an empty string."""
    try:
        check_same(run, manifest, folder, batches_sha256)
        Checkpoint(folder, manifest).fill(state)
    except InputError as error:
        return str(error)
    return ""


def check_same(run: RunSpec, manifest: Manifest, folder: Path, batches_sha256: str) -> None:
    """InputError when a checkpoint is of another training than `run`."""
    now, then = trained_by(run), manifest.trained
    for key in type(now).model_fields:
        if getattr(now, key) != getattr(then, key):
            raise InputError(f"{folder}: is of a training with another {key}; {_HINT}")
    if batches_sha256 != manifest.batches_sha256:
        raise InputError(f"{folder}: the training text is no longer the same; bring it back, or {_HINT}")
