"""Takes checkpoints while the training goes on: a snapshot at the end of a step, written by a thread of its own.

Every rank writes its file, then reports to all others how that went. Who has heard of all files writes the manifest: so
a manifest anywhere means that all files are whole everywhere, also where sites have no disk in common. The thread that
has written does all that, since the main thread may be in a long step, or hang, and a rank that ends waits for it.
"""

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

from farpipe import __version__
from farpipe.core.errors import FarpipeError, RunError
from farpipe.core.units import counted
from farpipe.engine.checkpoint.files import Piece
from farpipe.engine.checkpoint.folders import (
    folder_of,
    remove,
    remove_incomplete,
    remove_unfinished_files,
    whole_checkpoints,
)
from farpipe.engine.checkpoint.manifest import FileEntry, Manifest, ModelFacts, trained_by
from farpipe.engine.checkpoint.snapshot import Pieces, Snapshot
from farpipe.engine.checkpoint.writing import write_file
from farpipe.engine.executor.optimizer import Optimizer
from farpipe.engine.executor.peers import Peers
from farpipe.engine.launch.host_memory import free_memory
from farpipe.engine.replicas.collectives import Shard
from farpipe.engine.run_spec import RunSpec

BOX: Final = "checkpoint files"
LIMIT_S: Final = 600.0
"""Longest wait for a checkpoint that is being written, where somebody has to wait for it."""
_POLL_S: Final = 0.01
_GRACE_S: Final = 1.0
"""Time for reports that were on their way when the run broke."""
_MEMORY_SHARE: Final = 0.25
"""Part of the free memory that all ranks of a machine may fill with what waits for the disk."""
END_S: Final = 30.0
"""Longest wait of a rank that ends early for its checkpoint; the others wait for its messages meanwhile."""


class _Writing(threading.Thread):
    """One rank's part of one checkpoint on its way to the disk."""

    def __init__(self, step: int, write: Callable[[], FileEntry | None], follow: Callable[[int], None]) -> None:
        """``follow(step)`` is called when it has been written."""
        super().__init__(name=f"checkpoint {step}", daemon=True)
        self.step, self._write_it, self._follow = step, write, follow
        self.outcome: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        """Write, then follow; what came of the writing is in `outcome`."""
        self._write()
        self._follow(self.step)

    def _write(self) -> None:
        try:
            entry = self._write_it()
            self.outcome = {"step": self.step, "file": entry and entry.model_dump()}
        except Exception as error:
            self.outcome = {"step": self.step, "error": str(error) or type(error).__name__}


class Checkpointer:
    """One rank's part in the checkpoints of a run; all ranks call `save` at the same steps."""

    def __init__(
        self,
        run: RunSpec,
        state: Callable[[], Sequence[Piece]],
        peers: Peers,
        folder: Path,
        batches_sha256: str,
        facts: ModelFacts,
        is_recorded: Callable[[int], bool] | None,
        still_needed: Callable[[], Set[int]] = frozenset,
    ) -> None:
        """`state`: what this rank holds. `folder`: where the checkpoints of the run are, one folder each.

        ``is_recorded(step)``: whether what this rank records of the steps before `step` is on the disk; None: it
        records nothing. No checkpoint is whole before: a run that goes on from there would never record them.
        `still_needed`: steps of checkpoints that are kept though newer ones are whole.
        """
        self._run, self._state, self._peers, self._folder = run, state, peers, folder
        self._batches_sha256, self._facts, self._is_recorded = batches_sha256, facts, is_recorded or (lambda step: True)
        self._still_needed = still_needed
        self.keep = run.plan.training.keep_checkpoints if run.plan.training and run.device != "sleep" else 0
        """Number of checkpoints that are kept; 0: none is written."""
        self._pieces = Pieces(pinned=run.device == "cuda")
        self._written: list[dict[str, Any]] = []
        """Outcomes of this rank's files that were not yet reported to the other ranks."""
        self._writing: _Writing | None = None
        """The newest file until its outcome is taken in."""
        self._threads: list[_Writing] = []
        self._moving, self._has_ended = threading.Lock(), False
        self._outcomes: dict[int, dict[int, dict[str, Any]]] = {}
        self._failures: dict[int, str] = {}
        """Reasons, by step, why this process has not completed a checkpoint."""
        self._unreported: deque[str] = deque()
        """Errors that `collect` has not handed out yet."""

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that is whole."""
        steps = whole_checkpoints(self._folder)
        return folder_of(self._folder, steps[0]) if steps else None

    @property
    def never_succeeds(self) -> bool:
        """True if several checkpoints have failed and none is whole."""
        return len(self._failures) > 1 and self.newest is None

    def failure(self, step: int) -> str | None:
        """Reason why there is no checkpoint after `step` steps; None where another process has completed it."""
        return None if self.newest == folder_of(self._folder, step) else self._failures.get(step)

    def save(self, step: int) -> None:
        """Begin the checkpoint after `step` steps; an earlier one that is still being written is waited for."""
        self._unreported.extend(self._wait(lambda: self._writing is None, "the checkpoint before to be written"))
        tensors = {piece.key: piece.stored for piece in self._state() if piece.is_mine}
        snapshot = Snapshot(tensors, self._pieces, _share_of_memory())
        self._outcomes.setdefault(step, {})
        self._writing = _Writing(step, lambda: self._write(step, snapshot), self._follow)
        self._threads = [*(thread for thread in self._threads if thread.is_alive()), self._writing]
        snapshot.fill()

    def _write(self, step: int, snapshot: Snapshot) -> FileEntry | None:
        """None where other replicas write all that this process holds."""
        if not snapshot.tensors:
            return None
        rank = self._peers.rank
        try:
            return write_file(folder_of(self._folder, step), rank, self._run.places.site(rank), snapshot)
        finally:
            snapshot.end()

    def collect(self) -> list[str]:
        """Pass on what has been written here and take note of what has been written elsewhere; what went wrong."""
        if self._moving.acquire(blocking=False):  # else the other thread is at it
            try:
                self._move()
            finally:
                self._moving.release()
        return self._news()

    def _news(self) -> list[str]:
        return [self._unreported.popleft() for _ in range(len(self._unreported))]

    def _follow(self, step: int) -> None:
        """Go on until the checkpoint of `step` is whole, has failed, or can't become whole since the run has broken."""
        broken_s = math.inf
        while step in self._outcomes and not self._has_ended and time.monotonic() < broken_s + _GRACE_S:
            try:
                with self._moving:
                    self._move()
            except Exception:  # the main thread meets it too
                broken_s = min(broken_s, time.monotonic())
            time.sleep(_POLL_S)

    def end(self, limit_s: float = END_S) -> None:
        """Give what has been begun time to become whole, `limit_s` at most; this rank leaves early."""
        deadline_s, is_broken = time.monotonic() + limit_s, False
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline_s:
            try:
                self.collect()
            except RunError:
                deadline_s = deadline_s if is_broken else min(deadline_s, time.monotonic() + _GRACE_S)
                is_broken = True
            time.sleep(_POLL_S)
        self._has_ended = True

    def _move(self) -> None:
        if self._writing is not None and self._writing.outcome:
            self._written.append(self._writing.outcome)
            self._writing = None
        while self._written and self._is_recorded(self._written[0]["step"]):
            payload = json.dumps(self._written.pop(0)).encode()
            for rank in range(self._peers.world_size):
                self._peers.post(rank, BOX, payload)
        for rank, payload in self._peers.poll(BOX):
            outcome = json.loads(payload)
            self._outcomes.setdefault(outcome["step"], {})[rank] = outcome
        for step in [step for step, found in [*self._outcomes.items()] if len(found) == self._peers.world_size]:
            self._complete(step)

    def _complete(self, step: int) -> None:
        """All files of a checkpoint are there, or it has failed."""
        if (problem := self._write_manifest(step, self._outcomes[step])) is not None:
            self._unreported.append(problem)
        del self._outcomes[step]  # last: until then it is waited for

    def _write_manifest(self, step: int, outcomes: dict[int, dict[str, Any]]) -> str | None:
        """Make a checkpoint of the files, or remove them where one has failed; the reason if so."""
        folder = folder_of(self._folder, step)
        errors = [f"rank {rank}: {outcome['error']}" for rank, outcome in outcomes.items() if "error" in outcome]
        try:
            if errors:
                raise RunError(errors[0])
            self._manifest(step, outcomes).save(folder)
        except FarpipeError as error:
            if errors:  # otherwise its files are whole, and another rank may have written the manifest
                remove(folder)
            self._failures[step] = str(error)
            return f"no checkpoint after {counted(step, 'step')}: {error}"
        remove_unfinished_files(folder)
        for old in set(whole_checkpoints(self._folder)[self.keep :]) - self._still_needed():
            remove(folder_of(self._folder, old))
        remove_incomplete(self._folder, before=step)
        return None

    def _manifest(self, step: int, outcomes: dict[int, dict[str, Any]]) -> Manifest:
        files = [outcomes[rank]["file"] for rank in sorted(outcomes)]
        return Manifest(
            step=step,
            farpipe=__version__,
            trained=trained_by(self._run),
            batches_sha256=self._batches_sha256,
            facts=self._facts,
            files=tuple(FileEntry.model_validate(file) for file in files if file is not None),
        )

    def finish(self) -> list[str]:
        """Wait until all that was begun is whole or has failed; what went wrong."""
        return self._wait(lambda: self._writing is None and not self._outcomes, "checkpoints to be written")

    def _wait(self, done: Callable[[], bool], what: str) -> list[str]:
        deadline_s = time.monotonic() + LIMIT_S
        problems: list[str] = []
        while not done():
            problems += self.collect()
            if time.monotonic() > deadline_s:
                raise RunError(f"rank {self._peers.rank} waited {LIMIT_S:g} s for {what}")
            if not done():
                time.sleep(_POLL_S)
        return problems + self._news()


def _share_of_memory() -> float:
    """Memory in bytes that this rank may fill with a snapshot."""
    free = free_memory()
    return math.inf if free is None else _MEMORY_SHARE * free[0] / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def state_pieces(
    shards: Iterable[Shard], shared_names: Mapping[str, str], optimizer: Optimizer, *, is_writer: bool
) -> Iterator[Piece]:
    """Live views of what this process's optimizer updates, and of its moments.

    `shared_names`: as of `SliceModule`. `is_writer`: whether the process puts what its replicas hold as well into
    checkpoints. Where embedding and head are one matrix in two stages, both are written: so each site has what its
    stages need.
    """
    for shard in shards:
        name, is_mine = shared_names.get(shard.name, shard.name), is_writer or shard.is_share
        values = {"weight": shard.parameter.detach()} | optimizer.moments(shard.parameter)
        for kind, tensor in values.items():
            held = tensor.view(-1) if shard.offset is None else tensor
            yield Piece(f"{kind}/{name}", tuple(shard.whole.shape), shard.start, held, is_mine, shard.offset)
