"""Facts that took a reading of whole files to find out, kept beside the tokens until the files change.

A file counts as unchanged while its size, inode and times of change stay the same. A file that was changed only just
before it was read is not kept: another change in the same tick of the file system's clock would not show.
"""

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from farpipe.core.errors import InputError, RunError
from farpipe.core.strict import expect_format, parse_json, read_text, write_text
from farpipe.planning.documents.documents import unreadable

FORMAT: Final = "farpipe/known-files/1"
SETTLED_NS: Final = 2_000_000_000
"""The coarsest clock of a file system ticks that slowly (FAT)."""
_HASH_BYTES: Final = 1 << 20
NUM_SAMPLES: Final = 16
SAMPLE_BYTES: Final = 4 << 10
_SHA256: Final = re.compile("[0-9a-f]{64}")


class OpenedFile(NamedTuple):
    """A file of ``data.source``, and its stamp when it was opened."""

    path: Path
    stamp: list[int]
    """Size, inode and time of change (ns), which change when the content does unless somebody sets the time back."""
    status_ns: int = 0
    """Time at which anything of it was changed, which nobody can set: rights and links too, so it is no proof."""
    sample: bytes = b""
    """Digest of pieces of it."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """The file as it is now; InputError when it can't be read."""
        try:
            *stamp, status_ns = _stamp(path)
            return cls(path, stamp, status_ns, _sample(path, stamp[0]))
        except OSError as error:
            raise unreadable(path, error) from None

    def expect_unchanged(self, problem: str) -> None:
        """InputError, with `problem` as its reason, when the file is no longer what was opened."""
        try:
            *stamp, status_ns = _stamp(self.path)
            same = stamp == self.stamp
            if same and self.sample and status_ns != self.status_ns:
                same = _sample(self.path, stamp[0]) == self.sample
        except OSError as error:
            raise unreadable(self.path, error) from None
        if not same:
            raise InputError(f"data.source: {self.path}: {problem}")


class KnownFiles:
    """Facts about the files of one source; `save` keeps them for later starts."""

    def __init__(self, folder: Path, source: str) -> None:
        """`folder`: where they are kept. What can't be read there is found out anew."""
        name = hashlib.sha256(str(Path(source).absolute()).encode()).hexdigest()
        self._path = folder / f"known-{name[:32]}.json"
        self._before = _read(self._path)
        self._now: dict[str, dict[str, Any]] = {}
        self._is_new = False

    def digest(self, file: Path) -> bytes:
        """SHA-256 of the content; InputError when it can't be read."""
        found = self._fact(file, "sha256", lambda: _hash(file))
        if not (isinstance(found, str) and _SHA256.fullmatch(found)):
            found = _hash(file)  # somebody has written to the facts
        return bytes.fromhex(found)

    def vocabulary(self, file: Path, find: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """The least and the greatest token in it, which `find` looks for."""
        found = self._fact(file, "tokens", lambda: [*find()])
        if not (isinstance(found, list) and len(found) == 2 and {*map(type, found)} == {int}):
            return find()
        return found[0], found[1]

    def expect_unchanged(self, files: Iterable[Path]) -> None:
        """InputError when one of `files` is no longer what it was when a fact about it was asked for."""
        for file in files:
            opened = OpenedFile(file, self._now[str(file.absolute())]["stamp"][:-1])
            opened.expect_unchanged("has changed while it was read; start again when it is whole")

    def _fact(self, file: Path, name: str, find: Callable[[], Any]) -> Any:
        try:
            stamp, begun_ns = _stamp(file), time.time_ns()
            entry = self._entry(file, stamp)
            if name in entry:
                return entry[name]
            found = find()
            if _stamp(file) == stamp and max(stamp[2:]) + SETTLED_NS < begun_ns:
                entry[name] = found
                self._is_new = True
        except OSError as error:
            raise unreadable(file, error) from None
        return found

    def _entry(self, file: Path, stamp: list[int]) -> dict[str, Any]:
        key = str(file.absolute())
        if key not in self._now:
            entry = self._before.get(key)
            self._now[key] = entry if entry is not None and entry.get("stamp") == stamp else {"stamp": stamp}
        return self._now[key]

    def save(self) -> None:
        """Keep what has been found out, if that is possible; the next start takes longer where it isn't."""
        if self._is_new:
            with contextlib.suppress(RunError):
                write_text(self._path, json.dumps({"format": FORMAT, "files": self._now}) + "\n")


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the facts of earlier readings; none if their file is missing or damaged."""
    try:
        files = expect_format(parse_json(read_text(path), str(path)), FORMAT, str(path)).get("files")
    except InputError:
        return {}
    return {key: entry for key, entry in files.items() if isinstance(entry, dict)} if isinstance(files, dict) else {}


def _stamp(file: Path) -> list[int]:
    """Changes whenever the file does: size, inode, when content and when anything of it was changed (ns)."""
    found = file.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _sample(file: Path, size: int) -> bytes:
    """Digest of NUM_SAMPLES pieces, its ends among them: all of a small file."""
    found = hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        for number in range(NUM_SAMPLES):
            opened.seek(max(0, size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
            found.update(opened.read(SAMPLE_BYTES))
    return found.digest()


def _hash(file: Path) -> str:
    total = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(_HASH_BYTES):
            total.update(block)
    return total.hexdigest()
