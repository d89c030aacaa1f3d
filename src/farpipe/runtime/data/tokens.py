"""Text as tokens: kept in memory as bytes, tokenized once into a cache on disk, or mapped from files that are tokens.

A file of tokens is a ``.npy`` array of whole numbers with one axis, or a ``.bin`` of plain little-endian numbers with a
header beside it under the same name with ``.json``:

    {"format": "farpipe/tokens/1", "dtype": "uint16", "num_tokens": 1000, "vocab_size": 256}
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.errors import InputError, RunError
from farpipe.runtime.data.documents import documents, form_of, pieces, read_whole, source_files
from farpipe.spec import Data
from farpipe.strict import expect_format, parse_json, read_text

FORMAT: Final = "farpipe/tokens/1"
NUM_BYTES: Final = 256
BETWEEN_TEXTS: Final = b"\n\n"
IN_MEMORY_BYTES: Final = 256 << 20
"""Text files up to this size together are simply kept in memory where tokens are bytes."""
_DTYPES: Final = ("uint8", "uint16", "uint32")
_HEADER_KEYS: Final = {"dtype", "num_tokens", "vocab_size"}
_SAMPLE_BYTES: Final = 64 << 10
_NUM_SAMPLES: Final = 256
_HASH_BYTES: Final = 1 << 20
_PIECES_AT_ONCE: Final = 256


@dataclass(frozen=True, eq=False)
class Tokens:
    """One long text or several, as arrays [num_tokens] of whole numbers that may lie on disk."""

    shards: tuple[NDArray[Any], ...]
    vocab_size: int | None = None
    """More than the largest token; None where nobody has said."""

    @property
    def num_tokens(self) -> int:
        """Of all shards together."""
        return sum(shard.size for shard in self.shards)

    @cached_property
    def digest(self) -> bytes:
        """Tells texts apart (SHA-256): of everything up to 16 MiB a shard, otherwise of blocks all over the shard."""
        total = hashlib.sha256()
        for shard in self.shards:
            total.update(f"{shard.dtype} {shard.size} ".encode())
            for block in _blocks(shard):
                total.update(block.tobytes())
        return total.digest()


def _blocks(shard: NDArray[Any]) -> Iterator[NDArray[Any]]:
    size = _SAMPLE_BYTES // shard.itemsize
    num_blocks = -(-shard.size // size)
    for block in np.unique(np.linspace(0, max(num_blocks - 1, 0), min(num_blocks, _NUM_SAMPLES)).astype(np.int64)):
        yield shard[block * size : (block + 1) * size]


def load_tokens(data: Data) -> Tokens:
    """The tokens of ``data.source``; text is tokenized now unless the cache has it from an earlier time.

    InputError names what is missing, unreadable or damaged, RunError says that the cache can't be written.
    """
    files = source_files(data)
    form = form_of(data, files)
    if form == "tokens":
        opened = [_open_tokens(file) for file in files]
        sizes = [tokens.vocab_size for tokens in opened if tokens.vocab_size is not None]
        return Tokens(tuple(t.shards[0] for t in opened), max(sizes) if len(sizes) == len(opened) else None)
    if form == "text" and data.tokenizer == "bytes" and _total_bytes(files) <= IN_MEMORY_BYTES:
        text = BETWEEN_TEXTS.join(read_whole(file) for file in files)
        return Tokens((np.frombuffer(text, np.uint8),), NUM_BYTES)
    return _tokenize_once(data, files)


def _total_bytes(files: Iterable[Path]) -> int:
    with contextlib.suppress(OSError):  # told when it is read
        return sum(file.stat().st_size for file in files)
    return 0


def _open_tokens(path: Path) -> Tokens:
    try:
        return _open_npy(path) if path.suffix == ".npy" else _open_bin(path)
    except OSError as error:
        raise InputError(f"data.source: {path}: can't be read: {error.strerror or error}") from None


def _open_npy(path: Path) -> Tokens:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:  # the latter where the file is empty
        raise InputError(f"data.source: {path}: not an array of NumPy's: {error}") from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "ui":
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "several arrays"
        raise InputError(f"data.source: {path}: expected whole numbers with one axis, found {found}")
    return Tokens((array,))


def _open_bin(path: Path) -> Tokens:
    header = path.with_suffix(".json")
    body = expect_format(parse_json(read_text(header), str(header)), FORMAT, str(header))
    counts = (body.get("num_tokens"), body.get("vocab_size", 1))
    if body.keys() - _HEADER_KEYS or body.get("dtype") not in _DTYPES or {*map(type, counts)} != {int}:
        raise InputError(f"{header}: expected dtype (one of {', '.join(_DTYPES)}), num_tokens and perhaps vocab_size")
    dtype = np.dtype(body["dtype"]).newbyteorder("<")
    if path.stat().st_size != body["num_tokens"] * dtype.itemsize:
        raise InputError(
            f"data.source: {path}: has {path.stat().st_size} bytes, but its header says {body['num_tokens']} tokens of "
            f"{dtype.itemsize}; is it whole?"
        )
    if not body["num_tokens"]:
        return Tokens((np.empty(0, dtype),), body.get("vocab_size"))
    return Tokens((np.memmap(path, dtype, mode="r"),), body.get("vocab_size"))


def _tokenize_once(data: Data, files: Sequence[Path]) -> Tokens:
    """From the cache, or into it: whole or not at all, so that several ranks may do it at the same time."""
    tokenizer = _ByteTokenizer() if data.tokenizer == "bytes" else _LearnedTokenizer(data)
    folder = cache_folder(data)
    kept = folder / f"{_content_key(data, files, tokenizer.key)}.bin"
    if not kept.with_suffix(".json").exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_tokens(kept, tokenizer, tokenizer.tokens(documents(data, list(files))))
        except OSError as error:
            raise RunError(
                f"{kept}: can't be written: {error.strerror or error} (data.cache names its folder)"
            ) from None
    return _open_tokens(kept)


def cache_folder(data: Data) -> Path:
    """Where tokenized text is kept."""
    if data.cache is not None:
        return Path(data.cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farpipe" / "tokens"


def _content_key(data: Data, files: Sequence[Path], tokenizer_key: str) -> str:
    """Changes with everything that the tokens depend on (SHA-256)."""
    options = {"format": form_of(data, list(files)), "key": data.text_key, "tokenizer": tokenizer_key}
    total = hashlib.sha256(json.dumps([FORMAT, options]).encode())
    for file in files:
        total.update(_file_hash(file))
    return total.hexdigest()


def _file_hash(path: Path) -> bytes:
    total = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_HASH_BYTES):
                total.update(block)
    except OSError as error:
        raise InputError(f"data.source: {path}: can't be read: {error.strerror or error}") from None
    return total.digest()


class _ByteTokenizer:
    """One token per byte."""

    key, vocab_size, dtype = "bytes", NUM_BYTES, np.dtype("uint8")

    def tokens(self, texts: Iterable[str]) -> Iterator[NDArray[Any]]:
        for number, text in enumerate(texts):
            yield np.frombuffer((BETWEEN_TEXTS if number else b"") + text.encode(), np.uint8)


class _LearnedTokenizer:
    """A tokenizer.json of the tokenizers library."""

    def __init__(self, data: Data) -> None:
        path = Path(data.tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        text = read_text(path)
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InputError("data.tokenizer: needs the tokenizers library: pip install 'farpipe[data]'") from None
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises Exception itself
            raise InputError(f"data.tokenizer: {path}: not a tokenizer: {error}") from None
        self._end = None if data.end_of_text is None else self._tokenizer.token_to_id(data.end_of_text)
        if data.end_of_text is not None and self._end is None:
            raise InputError(f"data.end_of_text: {path} has no token {data.end_of_text!r}")
        self.key = f"{hashlib.sha256(text.encode()).hexdigest()} {self._end}"
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self.dtype = np.dtype("uint16" if self.vocab_size <= 1 << 16 else "uint32")

    def tokens(self, texts: Iterable[str]) -> Iterator[NDArray[Any]]:
        """The tokens of many pieces at a time, in order, with the end of text behind each document."""
        marked = _marked(texts)
        while group := [*islice(marked, _PIECES_AT_ONCE)]:
            encoded = self._tokenizer.encode_batch([piece for piece, _ in group], add_special_tokens=False)
            for found, (_, is_last) in zip(encoded, group, strict=True):
                ends = [self._end] if is_last and self._end is not None else []
                yield np.array([*found.ids, *ends], self.dtype)


def _marked(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Pieces, and whether each is its document's last."""
    for text in texts:
        *before, last = pieces(text)
        yield from ((piece, False) for piece in before)
        yield last, True


def _write_tokens(path: Path, tokenizer: _ByteTokenizer | _LearnedTokenizer, arrays: Iterable[NDArray[Any]]) -> None:
    """First the numbers, then the header, whose presence says that they are whole."""
    with _appearing(path) as file:
        num_tokens = 0
        for array in arrays:
            file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            num_tokens += array.size
    sizes = {"num_tokens": num_tokens, "vocab_size": tokenizer.vocab_size}
    with _appearing(path.with_suffix(".json")) as file:
        file.write(json.dumps({"format": FORMAT, "dtype": str(tokenizer.dtype), **sizes}).encode())


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
