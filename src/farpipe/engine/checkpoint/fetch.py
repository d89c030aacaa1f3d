"""Brings the files of a checkpoint that a site lacks from a site that has them, when a run begins."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from farpipe.core.errors import RunError
from farpipe.engine.checkpoint.manifest import FileEntry, Manifest
from farpipe.engine.checkpoint.transfer import Receiver, Sender
from farpipe.engine.checkpoint.whole_file import is_here
from farpipe.engine.executor.peers import Peers
from farpipe.engine.run_spec import RunSpec

INCOMING_NAME: Final = "incoming"
"""Folder beside a site's checkpoints with parts of files that are under way."""
FULL_RATE: Final = 1e12
_POLL_S: Final = 0.02


class Transfer(NamedTuple):
    """A file that goes from the first process of one site to that of another."""

    source: int
    target: int
    entry: FileEntry


def fetch(run: RunSpec, peers: Peers, folder: Path, manifest: Manifest) -> bool:
    """Bring what sites lack of a checkpoint, on all ranks together; whether anything has come.

    `folder`: of the checkpoint at this rank's site. RunError when nothing moves for `timeout_s`.
    """
    firsts = [run.places.at(site)[0] for site in run.places.sites]
    here = [e.name for e in manifest.files if is_here(folder / e.name, e)] if peers.rank in firsts else []
    waiting_for = f"what the sites have of step {manifest.step}"
    answers = peers.exchange(f"files of {manifest.step}", json.dumps(here).encode(), waiting_for=waiting_for)
    transfers = _transfers(manifest, {first: json.loads(answers[first]) for first in firsts})
    mine = [one for one in transfers if peers.rank in (one.source, one.target)]
    _move(mine, run, peers, folder, manifest.step)
    if transfers:
        await_all(peers, f"fetched {manifest.step}")
    return bool(transfers)


def _transfers(manifest: Manifest, held: dict[int, list[str]]) -> list[Transfer]:
    """What to bring; `held`: names of the files of every site, by its first process."""
    found = []
    for target, names in held.items():
        for entry in manifest.files:
            source = next((other for other in held if entry.name in held[other]), None)
            if entry.name not in names and source is not None:
                found.append(Transfer(source, target, entry))
    return found


def _move(mine: list[Transfer], run: RunSpec, peers: Peers, folder: Path, step: int) -> None:
    """Send and receive what this process has a part in."""
    num_in = sum(one.target == peers.rank for one in mine)
    done: list[str] = []
    receiver = Receiver(
        peers,
        folder.parent.with_name(INCOMING_NAME),
        folder.parent,
        lambda step, problem: done.append(problem),
        makes_folders=True,
    )
    sender = Sender(peers, lambda target: FULL_RATE)
    for one in mine:
        if one.source == peers.rank:
            sender.offer(one.target, step, one.entry, folder / one.entry.name)
    sender.start()
    receiver.start()
    try:
        await_progress(
            lambda: len(done) >= num_in and not sender.outgoing,
            lambda: sender.moved_bytes + receiver.moved_bytes,
            run.transport.timeout_s,
            f"the files of the checkpoint of step {step}",
            lambda: sender.is_alive() and receiver.is_alive(),
        )
    finally:
        sender.end()
        receiver.end()
    if problem := next((problem for problem in done if problem), ""):
        peers.abort(problem)
        raise RunError(problem)


def await_all(peers: Peers, name: str) -> None:
    """Wait until all processes have come here, however long others' files take; `name` is used once in a run."""
    for rank in range(peers.world_size):
        peers.post(rank, name, b"")
    heard: set[int] = set()
    while len(heard) < peers.world_size:  # who moves files has a limit of its own, and takes the others with it
        heard.update(rank for rank, _ in peers.poll(name))
        time.sleep(_POLL_S)


def await_progress(
    is_done: Callable[[], bool],
    moved_bytes: Callable[[], int],
    limit_s: float,
    what: str,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Wait for files; RunError when none of their bytes moves for `limit_s`, or they can't move any more."""
    last, until_s = moved_bytes(), time.monotonic() + limit_s
    while not is_done():
        if (now := moved_bytes()) != last:
            last, until_s = now, time.monotonic() + limit_s
        if time.monotonic() > until_s or not goes_on():
            if is_done():
                return
            raise RunError(f"waited {limit_s:g} s for {what}: nothing has come")
        time.sleep(_POLL_S)
