"""Texts that have been tokenized, on disk: once for all processes of a machine and all later runs."""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError, RunError
from farpipe.core.spec import Data
from farpipe.planning.documents.documents import (
    ByteTokenizer,
    Encoded,
    LearnedTokenizer,
    TokenRows,
    documents,
    form_of,
    has_tokens,
)
from farpipe.planning.documents.known_files import KnownFiles
from farpipe.planning.workload.lengths import COUNTED, ENDS

FORMAT: Final = "farpipe/tokens/1"
LIMIT_S: Final = 12 * 3600.0
"""Longest wait for another process that tokenizes the same text."""
_POLL_S: Final = 0.1


def cache_folder(data: Data) -> Path:
    """Folder of tokenized text."""
    if data.cache is not None:
        return Path(data.cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farpipe" / "tokens"


def tokenize_once(data: Data, files: Sequence[Path], known: KnownFiles) -> Path:
    """The file of tokens in the cache, its name without the ending a digest of all that they were made of.

    The first process makes it, whole or not at all, and others wait for that. RunError when it can't be written.
    """
    tokenizer = _tokenizer_of(data, files)
    folder = cache_folder(data)
    kept = folder / f"{_content_key(data, files, known, tokenizer.key)}.bin"
    try:
        if not _is_there(kept):
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(kept.with_suffix(".lock")):
                if not _is_there(kept):
                    _write_tokens(kept, tokenizer, _encoded(tokenizer, data, files, known))
    except OSError as error:
        raise RunError(f"{kept}: can't be written: {error.strerror or error} (data.cache names its folder)") from None
    return kept


Tokenizer = ByteTokenizer | LearnedTokenizer | TokenRows


def _tokenizer_of(data: Data, files: Sequence[Path]) -> Tokenizer:
    """InputError for settings of texts where the documents are tokens already."""
    if has_tokens(data, list(files)):
        if data.prompt_key is not None:
            raise InputError(f"data.prompt_key: {files[0]} has tokens; a column of labels says which are trained on")
        return TokenRows()
    return ByteTokenizer() if data.tokenizer == "bytes" else LearnedTokenizer(data)


def _encoded(tokenizer: Tokenizer, data: Data, files: Sequence[Path], known: KnownFiles) -> Iterator[Encoded]:
    """All tokens; InputError behind the last one when they are not of the files whose digest is in the name."""
    if isinstance(tokenizer, TokenRows):
        yield from tokenizer.encoded(files)
    else:
        yield from tokenizer.encoded(documents(data, list(files)))
    known.expect_unchanged(files)


def _is_there(kept: Path) -> bool:
    return all(path.exists() for path in (kept, ends_of(kept), kept.with_suffix(".json")))


def _content_key(data: Data, files: Sequence[Path], known: KnownFiles, tokenizer_key: str) -> str:
    """Changes with everything that the tokens depend on (SHA-256)."""
    options = {"format": form_of(data, list(files)), "key": data.text_key, "tokenizer": tokenizer_key, "sha256": True}
    options |= {} if data.prompt_key is None else {"prompt": data.prompt_key}
    total = hashlib.sha256(json.dumps([FORMAT, options]).encode())
    for file in files:
        total.update(known.digest(file))
    return total.hexdigest()


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Context in which no other process of this machine is for the same file; the system ends it with the process."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _wait_for(descriptor, lock)
        yield
        lock.unlink(missing_ok=True)  # who still waits for it finds all done
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, lock: Path) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise RunError(f"{lock}: waited {LIMIT_S:g} s for another process that tokenizes the text") from None
            time.sleep(_POLL_S)
        except OSError:  # a file system without locks: several may do the same, and the last one's stays
            return
        else:
            return


def _write_tokens(path: Path, tokenizer: Tokenizer, parts: Iterable[Encoded]) -> None:
    """First the numbers and where documents end, then the header, whose presence says that they are whole."""
    num_tokens, ends, digest, vocab_size = 0, [0], hashlib.sha256(), tokenizer.vocab_size
    counted = CountedTokens()
    with _appearing(path) as file:
        for part in parts:
            written = part.tokens.astype(part.tokens.dtype.newbyteorder("<"), copy=False).tobytes()
            file.write(written)
            digest.update(written)
            num_tokens += part.tokens.size
            ends += [num_tokens] if part.is_end else []
            counted.add(part)
            if isinstance(tokenizer, TokenRows) and part.tokens.size:
                vocab_size = max(vocab_size, int(part.tokens.max()) + 1)
    with _appearing(ends_of(path)) as file:
        np.save(file, np.unique([*ends, num_tokens])[1:].astype(np.int64))
    if counted.is_some:
        with _appearing(path.with_suffix(COUNTED)) as file:
            np.save(file, counted.all)
    sizes = {"num_tokens": num_tokens, "vocab_size": vocab_size, "sha256": digest.hexdigest()}
    with _appearing(path.with_suffix(".json")) as file:
        file.write(json.dumps({"format": FORMAT, "dtype": str(tokenizer.dtype), **sizes}).encode())


class CountedTokens:
    """Marks of the tokens that are trained on, a byte each."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.uint8]] = []
        self.is_some = False
        """True if some token is not trained on."""

    def add(self, part: Encoded) -> None:
        """Add the marks of tokens that follow."""
        mine = np.broadcast_to(np.asarray(part.counted, np.uint8), part.tokens.shape)
        self._parts.append(mine)
        self.is_some = self.is_some or not mine.all()

    @property
    def all(self) -> NDArray[np.uint8]:
        """Marks of all tokens."""
        return np.concatenate(self._parts)


def ends_of(path: Path) -> Path:
    """The file beside one of tokens that says where its documents end: ascending numbers of tokens, the last is all."""
    return path.with_suffix(ENDS)


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its place when it is complete."""
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
        try:
            yield file  # type: ignore[misc]
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
