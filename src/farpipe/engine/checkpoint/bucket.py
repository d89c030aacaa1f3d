"""Copies of the newest checkpoint in a bucket: whatever fsspec knows, as ``s3://name/folder``. Needs its driver.

Every process puts its own file there, beside the training; when all are there rank 0 puts the manifest, last, and then
removes what is older. A folder without a manifest is no checkpoint, so a copy that was cut off harms nothing; files
that are there with the right digest of their table are not sent again.
"""

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farpipe.core.errors import FarpipeError, InputError, UsageError
from farpipe.engine.checkpoint.folders import MANIFEST_NAME, folder_of, url_of, whole_checkpoints
from farpipe.engine.checkpoint.manifest import FileEntry, Manifest
from farpipe.engine.checkpoint.whole_file import check_file, is_here

if TYPE_CHECKING:
    from farpipe.engine.executor.peers import Peers

BOX: Final = "bucket"
BUCKET_NAME: Final = ".bucket"
"""Folder of a run directory for the checkpoint of a bucket that it goes on from."""
LIMIT_S: Final = 60.0
"""Longest wait for a bucket to take a manifest."""
END_S: Final = 10.0
_POLL_S: Final = 0.1
_LENGTH_BYTES: Final = 8
"""Bytes before the table of a safetensors file, which say how long that is."""
_STEP: Final = re.compile(r"step-(\d{1,15})")


class Store:
    """Checkpoints in a bucket."""

    def __init__(self, url: str) -> None:
        """InputError where there is no driver for it."""
        import fsspec  # type: ignore[import-untyped]

        self.url = url.rstrip("/")
        with reached(self.url):
            self._files, path = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        self._path = str(path).rstrip("/")

    def _at(self, step: int, name: str) -> str:
        return f"{self._path}/step-{step}/{name}"

    def put(self, folder: Path, step: int, entry: FileEntry) -> None:
        """Copy a file there, unless it is there."""
        if not self._has(step, entry):
            with reached(self.url):
                self._files.makedirs(f"{self._path}/step-{step}", exist_ok=True)
                self._files.put_file(str(folder / entry.name), self._at(step, entry.name))

    def _has(self, step: int, entry: FileEntry) -> bool:
        place = self._at(step, entry.name)
        with contextlib.suppress(FileNotFoundError, InputError), reached(self.url):  # what can't be read is put anew
            self._files.invalidate_cache()
            if self._files.info(place)["size"] == entry.num_bytes:
                start = self._files.cat_file(place, start=0, end=_LENGTH_BYTES)
                end = _LENGTH_BYTES + int.from_bytes(start, "little")
                header = self._files.cat_file(place, start=0, end=min(end, entry.num_bytes))
                return hashlib.sha256(header).hexdigest() == entry.header_sha256
        return False

    def put_manifest(self, folder: Path, step: int) -> None:
        """Make a checkpoint of the files, and remove older ones, the manifest first."""
        with reached(self.url):
            self._files.put_file(str(folder / MANIFEST_NAME), self._at(step, MANIFEST_NAME))
            for older in [other for other in self._steps() if other < step]:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(self._at(older, MANIFEST_NAME))
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm(f"{self._path}/step-{older}", recursive=True)

    def _steps(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            names = [str(path).rstrip("/").rpartition("/")[2] for path in self._files.ls(self._path, detail=False)]
            return [int(match[1]) for match in map(_STEP.fullmatch, names) if match]
        return []

    def newest(self) -> int | None:
        """Step of the newest checkpoint that has a manifest."""
        with reached(self.url):
            steps = [step for step in self._steps() if self._files.exists(self._at(step, MANIFEST_NAME))]
        return max(steps, default=None)

    def bring(self, checkpoints: Path) -> Path:
        """Copy the newest checkpoint into a folder of `checkpoints`, checked; InputError where there is none."""
        step = self.newest()
        if step is None:
            raise InputError(f"{self.url}: there is no whole checkpoint in it")
        folder = folder_of(checkpoints, step)
        folder.mkdir(parents=True, exist_ok=True)
        with reached(self.url):
            text = self._files.cat_file(self._at(step, MANIFEST_NAME)).decode()
            manifest = Manifest.from_json(text, f"{self.url}/step-{step}/{MANIFEST_NAME}")
            for entry in manifest.files:
                if not is_here(folder / entry.name, entry):
                    self._files.get_file(self._at(step, entry.name), str(folder / entry.name))
                check_file(folder / entry.name, entry)
        manifest.save(folder)
        return folder


def brought(resume: Path | str | None, run_dir: Path | str | None) -> Path | None:
    """What a run goes on from: of a bucket its newest checkpoint, copied into the new run directory; else as it is."""
    if resume is None or (url := url_of(resume)) is None:
        return None if resume is None else Path(resume)
    if run_dir is None:
        raise UsageError("--resume with a bucket: give --run-dir another directory, for a run of its own")
    return Store(url).bring(Path(run_dir) / BUCKET_NAME)


@contextmanager
def reached(url: str) -> Iterator[None]:
    """What drivers raise becomes an InputError that names the bucket; a missing file stays one."""
    try:
        yield
    except (FarpipeError, FileNotFoundError):
        raise
    except ImportError as error:
        raise InputError(f"{url}: fsspec needs a driver for it: {error}") from None
    except Exception as error:
        raise InputError(f"{url}: can't be used: {type(error).__name__}: {error}") from None


class ToBucket(threading.Thread):
    """One process's part in copying checkpoints to a bucket."""

    def __init__(self, url: str, peers: "Peers", checkpoints: Path) -> None:
        super().__init__(name="checkpoints to a bucket", daemon=True)
        self._store, self._peers, self._checkpoints = Store(url), peers, checkpoints
        self._ends = threading.Event()
        self._tried, self._copied = -1, -1
        """Steps of this process's newest file that was tried, and of the newest one that is there or needs none."""
        self._there: dict[int, set[str]] = {}
        """Files that are in the bucket, by step; for rank 0."""
        self._whole: int | None = None
        self._problems: list[str] = []
        self._failed = -1
        """Newest step of which a file or the manifest could not be copied; for rank 0."""

    def run(self) -> None:
        """Until `end`, or until the run is over or broken."""
        with contextlib.suppress(FarpipeError):
            while not self._ends.is_set():
                self._copy_newest()
                if self._peers.rank == 0:
                    self._complete()
                time.sleep(_POLL_S)

    def _copy_newest(self) -> None:
        step = next(iter(whole_checkpoints(self._checkpoints)), None)
        if step is None or step <= self._tried:
            return
        self._tried, folder, told = step, folder_of(self._checkpoints, step), {"step": step}
        try:
            name = f"rank-{self._peers.rank}.safetensors"
            entry = next((e for e in Manifest.load(folder).files if e.name == name), None)
            if entry is not None:
                self._store.put(folder, step, entry)
                self._peers.post(0, BOX, json.dumps({**told, "name": name}).encode())
        except (InputError, OSError) as error:  # the next checkpoint is tried again
            self._peers.post(0, BOX, json.dumps({**told, "problem": str(error)}).encode())
        self._copied = step

    def _complete(self) -> None:
        """The manifest of what has come in full."""
        for _, payload in self._peers.poll(BOX):
            self._take(json.loads(payload))
        for step in sorted(self._there, reverse=True):
            folder = folder_of(self._checkpoints, step)
            try:
                names = {entry.name for entry in Manifest.load(folder).files}
                if names <= self._there[step]:
                    self._store.put_manifest(folder, step)
                    self._whole = step
                    self._there = {other: files for other, files in self._there.items() if other > step}
                    return
            except InputError as error:
                self._there.pop(step)
                self._failed = max(self._failed, step)
                self._problems.append(f"no copy of step {step} in the bucket: {error}")

    def _take(self, message: Mapping[str, Any]) -> None:
        if "problem" in message:
            self._problems.append(f"not copied: {message['problem']}")
            self._there.pop(message["step"], None)
            self._failed = max(self._failed, message["step"])
        else:
            self._there.setdefault(message["step"], set()).add(message["name"])

    def news(self) -> tuple[dict[str, int], list[str]]:
        """The newest whole copy, by the bucket's URL, and what went wrong since the last call; for rank 0."""
        problems, self._problems = self._problems, []
        return ({} if self._whole is None else {self._store.url: self._whole}), problems

    @property
    def is_settled(self) -> bool:
        """True if this process's file of its newest checkpoint is copied, or could not be."""
        newest = next(iter(whole_checkpoints(self._checkpoints)), -1)
        return self._copied >= newest or not self.is_alive()

    def await_manifest(self) -> None:
        """On rank 0, when all files have settled: wait for the manifest, or for the reason why there is none.

        That an older file could not be copied, as one that was removed meanwhile, is no such reason.
        """
        until_s = time.monotonic() + LIMIT_S
        while self.is_alive() and time.monotonic() < until_s and self._copied not in (self._whole, self._failed):
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Stop after the file that is under way, if that takes no more than END_S."""
        self._ends.set()
        self.join(END_S)
