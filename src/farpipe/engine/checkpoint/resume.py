"""Step that a run goes on from: all ranks together choose the newest checkpoint that every one of them can read."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from farpipe.core.errors import InputError
from farpipe.engine.agreement import Agreement, changed_code, expect_same_facts, leaving_together
from farpipe.engine.checkpoint.fetch import fetch
from farpipe.engine.checkpoint.files import Checkpoint, Piece
from farpipe.engine.checkpoint.folders import (
    CHECKPOINTS_NAME,
    MANIFEST_NAME,
    abandon_after,
    checkpoint_folders,
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

    def read(self, folders: Sequence[Path], manifest: Manifest, what: str) -> str:
        """Read it on all ranks; the first reason why one of them can't, or an empty string.

        Where checkpoints are mirrored, files that a site lacks and another one has are brought first.
        """
        problem = self._try(folders, manifest, what)
        if problem and self.run.is_mirrored and fetch(self.run, self.peers, folders[0], manifest):
            return self._try(folders, manifest, f"again {what}")
        return problem

    def _try(self, folders: Sequence[Path], manifest: Manifest, what: str) -> str:
        site = self.run.places.site(self.peers.rank)
        problem = _read(self.run, self.state, folders, manifest, self.agreed, site)
        answers = self.peers.exchange(
            f"read {what} {manifest.step}", problem.encode(), waiting_for=f"the others to read step {manifest.step}"
        )
        return next((answer.decode() for answer in answers if answer), "")


def resume(run: RunSpec, state: Sequence[Piece], peers: Peers, run_dir: Path, agreed: Agreement) -> ResumePoint:
    """Read the newest good checkpoint into `state`: one of the run itself, or else of the one that it goes on from.

    Newer ones of the run itself are put aside. InputError when there are checkpoints but none that can be used, when
    `run.resume` has none, or when more steps are done than `run` has. Where nothing is found, what looks like the rest
    of a checkpoint is put aside as well.
    """
    own, reader = run.checkpoints(run_dir, peers.rank), Reader(run, state, peers, agreed)
    shared = run_dir / CHECKPOINTS_NAME
    places = [own, shared] if run.is_mirrored else checkpoint_folders(run_dir)
    point = _read_newest(reader, places, "its own checkpoints", is_own=True)
    parts = incomplete_after(own, point.step if point else -1)
    if point is not None:
        remove_incomplete(own)
    point, after = (_read_other(reader), -1) if point is None else (point, point.step)
    for place in places:
        abandon_after(place, after)
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
    places = [other] if (other / MANIFEST_NAME).exists() else checkpoint_folders(other)
    point = _read_newest(reader, places, "the checkpoints to go on from")
    if point is None:
        raise InputError(f"{other}: there is no checkpoint to go on from")
    return point


def _read_newest(reader: Reader, places: Sequence[Path], what: str, *, is_own: bool = False) -> ResumePoint | None:
    """The newest checkpoint at `places` that all ranks can read; None when there is none.

    The first place is where manifests are written. One of all steps is read only where it `is_own`: what is left to do
    then is the run's summary.
    """
    every = [find_manifests(place) for place in places]
    found = {step: item for one, _ in reversed(every) for step, item in one.items()}
    damaged = {step: reason for _, one in every for step, reason in one.items()}
    mine = {"manifests": {step: manifest.to_json() for step, (_, manifest) in found.items()}, "damaged": damaged}
    waiting_for = f"what the others have of {what}"
    answers = reader.peers.exchange(f"found {what}", json.dumps(mine).encode(), waiting_for=waiting_for)
    problems: list[str] = []
    tried: set[int] = set()
    offered = choose([json.loads(answer) for answer in answers], places[0], reader.run.num_steps, is_own)
    for step, text, damage in offered:
        tried.add(step)
        problems += [damage] if damage else []  # another rank may still have a good copy
        if text is None:
            continue
        manifest = Manifest.from_json(text, f"the manifest of step {step}")
        folders = [one[step][0] for one, _ in every if step in one] or [folder_of(folder_around(places[0]), step)]
        folder = folders[0]
        if not (problem := reader.read(folders, manifest, what)):
            if step not in found or found[step][1] != manifest:
                # the crash came between two ranks' writing it, this copy is damaged, or the files came from elsewhere
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


def _read(
    run: RunSpec, state: Sequence[Piece], folders: Sequence[Path], manifest: Manifest, agreed: Agreement, site: str
) -> str:
    """Read a checkpoint into `state`; why that can't be, or an empty string."""
    try:
        check_same(run, manifest, folders[0], agreed.batches_sha256)
        expect_same_facts(run, agreed.facts, manifest.facts, site)
        Checkpoint(folders[0], manifest, folders[1:]).fill(state)
    except InputError as error:
        return str(error)
    return ""
