"""Step that a run goes on from: all ranks together choose the newest checkpoint that every one of them can read."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from farpipe.core.errors import InputError
from farpipe.engine.agreement import Agreement, changed_code, expect_same_facts, leaving_together
from farpipe.engine.checkpoint.files import Checkpoint, Piece
from farpipe.engine.checkpoint.folders import (
    CHECKPOINTS_NAME,
    MANIFEST_NAME,
    abandon_after,
    folder_of,
    incomplete_after,
    remove_incomplete,
)
from farpipe.engine.checkpoint.manifest import (
    Manifest,
    all_done,
    check_same,
    find_manifests,
    folder_around,
    no_usable,
)
from farpipe.engine.executor.peers import Peers
from farpipe.engine.run_spec import RunSpec


@dataclass(frozen=True)
class ResumePoint:
    """First step of a run, and the checkpoint that it starts from."""

    step: int = 0
    folder: Path | None = None
    """Folder of the checkpoint that was read."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that could not be used, with the reason."""
    tried: frozenset[int] = frozenset()
    """Steps of the checkpoints that were looked at, that of the checkpoint included."""
    changed: tuple[str, ...] = ()
    """Warnings of what has changed since the checkpoint was written, though the training may go on."""


@dataclass(frozen=True)
class Reader:
    """One rank's part in reading a checkpoint into `state`, which all ranks do together."""

    run: RunSpec
    state: Sequence[Piece]
    peers: Peers
    agreed: Agreement

    def read(self, folder: Path, manifest: Manifest, what: str) -> str:
        """Read it on all ranks; the first reason why one of them can't, or an empty string."""
        site = self.run.places.site(self.peers.rank)
        problem = _read(self.run, self.state, folder, manifest, self.agreed, site)
        name = f"{what} {manifest.step}"
        answers = self.peers.exchange(
            f"read {name}", problem.encode(), waiting_for=f"the others to read step {manifest.step}"
        )
        return next((answer.decode() for answer in answers if answer), "")


def resume(run: RunSpec, state: Sequence[Piece], peers: Peers, run_dir: Path, agreed: Agreement) -> ResumePoint:
    """Read the newest good checkpoint into `state`: one of the run itself, or else of the one that it goes on from.

    Newer ones of the run itself are put aside. InputError when there are checkpoints but none that can be used, when
    `run.resume` has none, or when more steps are done than `run` has. Where nothing is found, what looks like the rest
    of a checkpoint is put aside as well.
    """
    own, reader = run_dir / CHECKPOINTS_NAME, Reader(run, state, peers, agreed)
    point = _read_newest(reader, own, "its own checkpoints", is_own=True)
    parts = incomplete_after(own, point.step if point else -1)
    if point is not None:
        abandon_after(own, point.step)
        remove_incomplete(own)
    else:
        point = _read_other(reader)
        abandon_after(own, -1)
    answers = peers.exchange(
        "resumed", json.dumps(parts).encode(), waiting_for="the others to put old checkpoints aside"
    )
    parts = sorted({step for answer in answers for step in json.loads(answer)} - point.tried, reverse=True)
    unfinished = tuple(f"{folder_of(own, step)}: has files, but no {MANIFEST_NAME}" for step in parts)
    return dataclasses.replace(point, skipped=point.skipped + unfinished)


def _read_other(reader: Reader) -> ResumePoint:
    """The newest checkpoint of the run that this one goes on from; step 0 where the run names none."""
    if reader.run.resume is None:
        return ResumePoint()
    other = Path(reader.run.resume)
    point = _read_newest(reader, other, "the checkpoints to go on from")
    if point is None:
        raise InputError(f"{other}: there is no checkpoint to go on from")
    return point


def _read_newest(reader: Reader, place: Path, what: str, *, is_own: bool = False) -> ResumePoint | None:
    """The newest checkpoint at `place` that all ranks can read; None when there is none.

    One of all steps is read only where it `is_own`: what is left to do then is the run's summary.
    """
    found, damaged = find_manifests(place)
    mine = {"manifests": {step: manifest.to_json() for step, (_, manifest) in found.items()}, "damaged": damaged}
    waiting_for = f"what the others have of {what}"
    answers = reader.peers.exchange(f"found {what}", json.dumps(mine).encode(), waiting_for=waiting_for)
    problems: list[str] = []
    tried: set[int] = set()
    for step, text, damage in choose([json.loads(answer) for answer in answers], place, reader.run.num_steps, is_own):
        tried.add(step)
        problems += [damage] if damage else []  # another rank may still have a good copy
        if text is None:
            continue
        manifest = Manifest.from_json(text, f"the manifest of step {step}")
        folder = found[step][0] if step in found else folder_of(folder_around(place), step)
        if not (problem := reader.read(folder, manifest, what)):
            if step not in found:  # the crash came between two ranks' writing it, or this copy is damaged
                manifest.save(folder)
            changed = changed_code(reader.agreed.facts, manifest.facts)
            return ResumePoint(step, folder, tuple(problems), frozenset(tried), changed)
        problems.append(problem)
    if problems:
        with leaving_together(reader.peers):
            raise no_usable(problems)
    return None


class OfferedCheckpoint(NamedTuple):
    """A checkpoint that one of the ranks has."""

    step: int
    manifest: str | None
    """Text of its manifest; None where all copies are damaged."""
    damage: str | None
    """Reason why a copy is damaged, if one is."""


def choose(answers: Sequence[Mapping[str, Any]], place: Path, num_steps: int, is_own: bool) -> list[OfferedCheckpoint]:
    """The checkpoints to try, the newest first, from all ranks' ``manifests`` and ``damaged`` ones by step.

    InputError when no step is left to do: all checkpoints have `num_steps` or more, or, of the run's own, one has more.
    """
    texts = {int(step): text for answer in answers for step, text in answer["manifests"].items()}
    damages = {int(step): reason for answer in answers for step, reason in answer["damaged"].items()}
    if is_own and max(texts, default=0) > num_steps:
        raise all_done(place, max(texts), num_steps)
    steps = sorted(texts.keys() | damages, reverse=True)
    to_try = [
        OfferedCheckpoint(step, texts.get(step), damages.get(step)) for step in steps if step < num_steps + is_own
    ]
    if steps and not to_try:
        raise all_done(place, steps[0], num_steps)
    return to_try


def _read(run: RunSpec, state: Sequence[Piece], folder: Path, manifest: Manifest, agreed: Agreement, site: str) -> str:
    """Read a checkpoint into `state`; why that can't be, or an empty string."""
    try:
        check_same(run, manifest, folder, agreed.batches_sha256)
        expect_same_facts(run, agreed.facts, manifest.facts, site)
        Checkpoint(folder, manifest).fill(state)
    except InputError as error:
        return str(error)
    return ""
