"""Files of checkpoints on their way to another process, over the run's own transport: resumable pieces, checked.

    sender to receiver   offer   step, and the file as its manifest knows it
    receiver to sender   from    bytes that are there already, or why none are wanted
    sender to receiver   piece   number of the message with the next piece, and where it begins
    receiver to sender   took    the same number
    receiver to sender   done    all is there, checked and on the disk; or why it is not

Words are posts, pieces are messages of the channel "control", which no step uses. A piece is sent before it is
announced: nobody waits in vain, which would break the run. A part of a file outlives its process; after a restart the
next offer goes on behind it. A file gets its name only when every digest is right.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch

from farpipe.core.errors import FarpipeError, InputError
from farpipe.engine.checkpoint.folders import folder_of, sync_folder
from farpipe.engine.checkpoint.manifest import FileEntry
from farpipe.engine.checkpoint.whole_file import check_file, is_here
from farpipe.engine.executor.peers import Peers
from farpipe.engine.transport import Tag
from farpipe.engine.transport.free_rate import LEAST_CHUNK_BYTES

PIECE_BYTES: Final = LEAST_CHUNK_BYTES
"""Shortest piece; over fast links a piece is as long as PIECE_S carries."""
PIECE_S: Final = 0.01
MAX_PIECE_BYTES: Final = 4 << 20
MOST_UNDER_WAY: Final = 64
"""Pieces that are under way to one process at a time."""
MAX_DAMAGED: Final = 2
"""Times that a file which arrived damaged is sent again."""
TO_RECEIVER: Final = "checkpoint file"
TO_SENDER: Final = "checkpoint file taken"
_IDLE_S: Final = 0.02
_BUSY_S: Final = 0.002


@dataclass
class Outgoing:
    """A file for another process."""

    target: int
    step: int
    entry: FileEntry
    file: BufferedReader
    """Open, so that it can be sent to its end when its checkpoint is no longer kept."""
    at: int | None = None
    """Bytes that were sent; None until the receiver has answered."""
    under_way: int = 0
    due_s: float = 0.0
    """Time (monotonic) of the next piece."""
    num_damaged: int = 0

    def head(self) -> dict[str, Any]:
        """What names it in messages."""
        return {"step": self.step, "name": self.entry.name}


class Sender(threading.Thread):
    """Sends files that are offered; `rate(target)` is the most that may go to a process, in bytes/s."""

    def __init__(
        self, peers: Peers, rate: Callable[[int], float], more: Callable[["Sender"], None] = lambda sender: None
    ) -> None:
        """``more(sender)`` is called again and again, and may offer further files."""
        super().__init__(name="checkpoint files out", daemon=True)
        self._peers, self._rate, self._more = peers, rate, more
        self.outgoing: list[Outgoing] = []
        self.moved_bytes = 0
        """Bytes sent so far; the first step of a wait's progress."""
        self._ends = threading.Event()
        self._number = 0

    def offer(self, target: int, step: int, entry: FileEntry, path: Path) -> None:
        """Offer a file to `target`; OSError where it can't be read."""
        one = Outgoing(target, step, entry, path.open("rb"))
        self.outgoing.append(one)
        self._post(target, "offer", step=step, entry=entry.model_dump())

    def _post(self, target: int, what: str, **words: Any) -> None:
        self._peers.post(target, TO_RECEIVER, json.dumps({"what": what, **words}).encode())

    def run(self) -> None:
        """Until `end`, or until the run is over or broken: then the next start goes on."""
        with contextlib.suppress(FarpipeError):
            while not self._ends.is_set():
                self._more(self)
                for source, payload in self._peers.poll(TO_SENDER):
                    self._take(source, json.loads(payload))
                sent = [self._send(one) for one in self._first_of_each_target()]
                time.sleep(_BUSY_S if any(sent) else _IDLE_S if not self.outgoing else _BUSY_S * 2)
        for one in self.outgoing:
            one.file.close()

    def end(self) -> None:
        """Stop, whatever is under way, and wait for the thread."""
        self._ends.set()
        self.join()

    def _first_of_each_target(self) -> list[Outgoing]:
        return [*{one.target: one for one in reversed(self.outgoing)}.values()]

    def _take(self, source: int, message: dict[str, Any]) -> None:
        """An answer of the receiver's."""
        key = (source, message["step"], message["name"])
        one = next((o for o in self.outgoing if (o.target, o.step, o.entry.name) == key), None)
        if one is None:
            return
        match message["what"]:
            case "from":
                one.at, one.under_way = message["at"], 0
            case "took":
                one.under_way -= 1
            case "damaged" if one.num_damaged < MAX_DAMAGED:
                one.num_damaged, one.at, one.under_way = one.num_damaged + 1, 0, 0
            case _:
                one.file.close()
                self.outgoing.remove(one)

    def _send(self, one: Outgoing) -> bool:
        """Send the next piece if it is due; whether it was."""
        if one.at is None or one.at >= one.entry.num_bytes or one.under_way >= MOST_UNDER_WAY:
            return False
        rate, now_s = self._rate(one.target), time.monotonic()
        if now_s < one.due_s:
            return False
        one.file.seek(one.at)
        piece = one.file.read(piece_bytes(rate))
        self._number += 1
        data = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        self._peers.send(one.target, "control", Tag(self._number, 0, 0), data)
        self._post(one.target, "piece", **one.head(), at=one.at, number=self._number)
        one.at, one.under_way = one.at + len(piece), one.under_way + 1
        one.due_s = max(one.due_s, now_s - PIECE_S) + len(piece) / rate
        self.moved_bytes += len(piece)
        return True


def piece_bytes(rate: float) -> int:
    """Length of a piece at a rate in bytes/s: some whole number of shortest ones."""
    return min(MAX_PIECE_BYTES, PIECE_BYTES * max(1, int(rate * PIECE_S / PIECE_BYTES)))


class Receiver(threading.Thread):
    """Takes files in: parts in `incoming`, whole ones in the folders of their steps in `checkpoints`."""

    def __init__(
        self,
        peers: Peers,
        incoming: Path,
        checkpoints: Path,
        on_done: Callable[[int, str], None],
        *,
        makes_folders: bool = False,
    ) -> None:
        """`on_done(step, problem)` hears of every file that has arrived, or why it could not be kept.

        `makes_folders`: also files of checkpoints of which nothing is here are taken.
        """
        super().__init__(name="checkpoint files in", daemon=True)
        self._peers, self._incoming, self._checkpoints = peers, incoming, checkpoints
        self._on_done, self._makes_folders = on_done, makes_folders
        self._expected: dict[tuple[int, int, str], FileEntry] = {}
        self.moved_bytes = 0
        self._ends = threading.Event()

    def run(self) -> None:
        """Until `end`, or until the run is over or broken."""
        with contextlib.suppress(FarpipeError):
            while not self._ends.is_set():
                found = self._peers.poll(TO_RECEIVER)
                for source, payload in found:
                    message = json.loads(payload)
                    (self._answer if message["what"] == "offer" else self._take)(source, message)
                time.sleep(_BUSY_S if found or self._expected else _IDLE_S)

    def end(self) -> None:
        """Stop, whatever is under way, and wait for the thread."""
        self._ends.set()
        self.join()

    def _post(self, source: int, what: str, step: int, name: str, **words: Any) -> None:
        message = {"what": what, "step": step, "name": name, **words}
        self._peers.post(source, TO_SENDER, json.dumps(message).encode())

    def _answer(self, source: int, message: dict[str, Any]) -> None:
        """Say from which byte on the file is wanted, if at all."""
        step, entry = message["step"], FileEntry.model_validate(message["entry"])
        folder = folder_of(self._checkpoints, step)
        if is_here(folder / entry.name, entry):
            self._post(source, "done", step, entry.name)
            self._on_done(step, "")
        elif not (self._makes_folders or folder.exists()):  # newer ones were whole before it was offered
            self._post(source, "gone", step, entry.name)
        else:
            self._expected[source, step, entry.name] = entry
            part = part_of(self._incoming, step, entry)
            for old in self._incoming.glob(f"step-*-{Path(entry.name).stem}-*.part"):
                if old != part:
                    old.unlink(missing_ok=True)
            at = part.stat().st_size if part.exists() else 0
            if not has_room(self._checkpoints, folder, entry.num_bytes - at):
                self._give_up(source, step, entry, "the disk has no room for it beside this site's next checkpoint")
            elif at >= entry.num_bytes:
                self._finish(source, step, entry)
            else:
                self._post(source, "from", step, entry.name, at=at)

    def _take(self, source: int, message: dict[str, Any]) -> None:
        """Take a piece that was announced."""
        step, name, at = message["step"], message["name"], message["at"]
        tag = Tag(message["number"], 0, 0)
        piece = self._peers.receive(source, "control", tag, waiting_for=f"a piece of {name} of step {step}")
        entry = self._expected.get((source, step, name))
        if entry is None:
            return
        part = part_of(self._incoming, step, entry)
        try:
            self._incoming.mkdir(parents=True, exist_ok=True)
            with part.open("ab") as file:
                if file.tell() != at:
                    return
                file.write(piece.tensor.numpy().data)
        except OSError as error:
            self._give_up(source, step, entry, str(error.strerror))
            return
        self.moved_bytes += piece.tensor.numel()
        self._post(source, "took", step, name, number=message["number"])
        if at + piece.tensor.numel() >= entry.num_bytes:
            self._finish(source, step, entry)

    def _finish(self, source: int, step: int, entry: FileEntry) -> None:
        """Check the whole file and give it its name."""
        part, folder = part_of(self._incoming, step, entry), folder_of(self._checkpoints, step)
        try:
            check_file(part, entry)
        except InputError:
            part.unlink(missing_ok=True)
            self._post(source, "damaged", step, entry.name)
            return
        try:
            with part.open("rb") as file:
                os.fsync(file.fileno())
            folder.mkdir(parents=True, exist_ok=True)
            part.replace(folder / entry.name)
            sync_folder(folder)
        except OSError as error:
            self._give_up(source, step, entry, str(error.strerror))
            return
        del self._expected[source, step, entry.name]
        self._on_done(step, "")
        self._post(source, "done", step, entry.name)

    def _give_up(self, source: int, step: int, entry: FileEntry, why: str) -> None:
        """Keep nothing of a file that can't be kept; the next checkpoint's is tried again."""
        with contextlib.suppress(OSError):
            part_of(self._incoming, step, entry).unlink(missing_ok=True)
        del self._expected[source, step, entry.name]
        self._on_done(step, f"{entry.name} of step {step} can't be kept: {why}")
        self._post(source, "failed", step, entry.name)


def has_room(place: Path, own: Path, num_bytes: int) -> bool:
    """True if the disk of `place` takes `num_bytes` and another checkpoint as large as what is in `own`."""
    with contextlib.suppress(OSError):
        next_bytes = sum(path.stat().st_size for path in own.iterdir()) if own.exists() else 0
        place.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(place).free >= num_bytes + next_bytes
    return True


def part_of(incoming: Path, step: int, entry: FileEntry) -> Path:
    """Where a file grows; of another content by the same name it is another one."""
    content = hashlib.sha256(f"{entry.num_bytes} {entry.header_sha256}".encode()).hexdigest()[:16]
    return incoming / f"step-{step}-{Path(entry.name).stem}-{content}.part"
