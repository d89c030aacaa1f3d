"""Text as tokens: kept in memory as bytes, tokenized once into a cache on disk, or mapped from files that are tokens.

A file of tokens is a ``.npy`` array of whole numbers with one axis, or a ``.bin`` of plain little-endian numbers with a
header beside it under the same name with ``.json``:

    {"format": "farpipe/tokens/1", "dtype": "uint16", "num_tokens": 1000, "vocab_size": 256}

and perhaps "sha256", the digest of the numbers, which are then held against it once.

Where documents end in a file of tokens says an array ``NAME.ends.npy`` beside it: ascending numbers of tokens, the last
of which is all. Without it the file is one document. Which tokens are trained on says ``NAME.counted.npy``: a number
for each, 0 for one that is only read. Data sets of Megatron-LM have .bin and .idx, with the ends in the latter.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError
from farpipe.core.spec import Data, Model
from farpipe.core.strict import expect_format, parse_json, read_text
from farpipe.planning.documents.documents import BETWEEN_TEXTS, NUM_BYTES, form_of, read_whole, source_files, unreadable
from farpipe.planning.documents.known_files import KnownFiles, OpenedFile
from farpipe.planning.documents.token_cache import FORMAT, cache_folder, ends_of, tokenize_once
from farpipe.planning.workload.lengths import COUNTED, UNREADABLE_ARRAYS
from farpipe.planning.workload.token_files import INDEX, expect_whole, read_index

Ints = NDArray[np.int64]
IN_MEMORY_BYTES: Final = 256 << 20
"""Text files up to this size together are simply kept in memory where tokens are bytes."""
_CHANGED: Final = (
    "was changed while it is trained on; restore the old content to continue, or start a new run with the new one"
)
_DTYPES: Final = ("uint8", "uint16", "uint32")
_HEADER_KEYS: Final = {"dtype", "num_tokens", "vocab_size", "sha256"}
_SAMPLE_BYTES: Final = 64 << 10
_NUM_SAMPLES: Final = 256
SAMPLED_BYTES: Final = _NUM_SAMPLES * _SAMPLE_BYTES
"""Shards up to this size are looked at as a whole."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """One long text or several, as arrays [num_tokens] of whole numbers that may lie on disk."""

    shards: tuple[NDArray[Any], ...]
    vocab_size: int
    """More than the largest token."""
    content: bytes = b""
    """A digest of all that the tokens were made of, where it is known."""
    ends: tuple[NDArray[np.int64], ...] = ()
    """Ends of every shard's documents: ascending numbers of tokens, the last is all of them."""
    files: tuple[OpenedFile, ...] = ()
    """The files that the shards are mapped from; none where they are kept in memory."""
    counted: tuple[NDArray[Any] | None, ...] = ()
    """0 for every token of a shard that is only read, not trained on; none where all are trained on."""
    files_of_counted: tuple[OpenedFile | None, ...] = ()
    """The files that these are mapped from."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards together."""
        return sum(shard.size for shard in self.shards)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every document, the empty ones left out."""
        lengths = np.concatenate([np.diff(ends.astype(np.int64), prepend=0) for ends in self.ends])
        return np.asarray(lengths[lengths > 0], np.int64)

    def read(self, shards: Ints, starts: Ints, stops: Ints) -> list[Ints]:
        """Tokens [start, stop) of a shard, for every three of the arrays [num_spans].

        InputError when the file of one of the shards has changed since it was opened, or a token is not of the
        vocabulary.
        """
        spans = [*zip(shards.tolist(), starts.tolist(), stops.tolist(), strict=True)]
        with _unchanged(self.files, shards):
            found = [np.array(self.shards[shard][start:stop], np.int64) for shard, start, stop in spans]
        for (shard, start, _), tokens in zip(spans, found, strict=True):
            self._check_vocabulary(shard, start, tokens)
        return found

    @property
    def is_masked(self) -> bool:
        """True if some tokens are only read."""
        return any(marks is not None for marks in self.counted)

    @property
    def num_counted(self) -> int:
        """Tokens that are trained on."""
        marks = self.counted or (None,) * len(self.shards)
        pairs = zip(self.shards, marks, strict=True)
        return sum(shard.size if each is None else int(np.count_nonzero(each)) for shard, each in pairs)

    def read_counted(self, shards: Ints, starts: Ints, stops: Ints) -> list[NDArray[np.bool_]]:
        """Tokens that are trained on, of the same spans as `read`; InputError when their file has changed."""
        spans = zip(shards.tolist(), starts.tolist(), stops.tolist(), strict=True)
        with _unchanged(self.files_of_counted, shards):
            return [self._counted(shard, start, stop) for shard, start, stop in spans]

    def _counted(self, shard: int, start: int, stop: int) -> NDArray[np.bool_]:
        marks = self.counted[shard] if self.counted else None
        return np.ones(stop - start, bool) if marks is None else np.asarray(marks[start:stop]) != 0

    def _check_vocabulary(self, shard: int, start: int, tokens: Ints) -> None:
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            wrong = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
            where = self.files[shard].path if self.files else f"shard {shard}"
            raise InputError(
                f"data.source: {where}: token {start + wrong} is {tokens[wrong]}, but vocab_size says {self.vocab_size}"
            )

    @cached_property
    def digest(self) -> bytes:
        """Digest of the text (SHA-256): of everything up to 16 MiB a shard, otherwise of blocks all over the shard.

        Where it is known what larger ones were made of, that counts as well, so that no change of a text goes unseen.
        """
        total = hashlib.sha256()
        for shard in self.shards:
            total.update(f"{shard.dtype} {shard.size} ".encode())
            for block in _blocks(shard):
                total.update(block.tobytes())
        if any(shard.nbytes > SAMPLED_BYTES for shard in self.shards):
            total.update(self.content)
        for marks in filter(lambda each: each is not None, self.counted):
            total.update(np.packbits(np.asarray(marks) != 0).tobytes())
        return total.digest()


@contextlib.contextmanager
def _unchanged(files: Sequence[OpenedFile | None], shards: Ints) -> Iterator[None]:
    """Context of a reading of mapped files; InputError where one was written to since it was opened.

    One that is shorter now would end the process with SIGBUS.
    """
    mapped = [file for shard in np.unique(shards) if (file := files[shard])] if files else []
    for file in mapped:
        file.expect_unchanged(_CHANGED)
    yield
    for file in mapped:
        file.expect_unchanged(_CHANGED)


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
    if data.prompt_key is not None and form in ("text", "tokens"):
        raise InputError(
            f"data.prompt_key: {files[0]} is {form} and has no keys; prompts are in JSONL, Parquet or Arrow"
        )
    if form == "tokens":
        return _open_all(data, files)
    if form == "text" and data.tokenizer == "bytes" and _total_bytes(files) <= IN_MEMORY_BYTES:
        texts = [read_whole(file) for file in files]
        text = BETWEEN_TEXTS.join(texts)
        content = hashlib.sha256(text).digest() if len(text) > SAMPLED_BYTES else b""
        ends = np.cumsum([len(one) + len(BETWEEN_TEXTS) for one in texts])
        return Tokens((np.frombuffer(text, np.uint8),), NUM_BYTES, content, (np.minimum(ends, len(text)),))
    known = KnownFiles(cache_folder(data), data.source)
    kept = tokenize_once(data, files, known)
    mapped = OpenedFile.of(kept)
    array, vocab_size = _open(kept, known)
    known.save()
    assert vocab_size is not None, "the cache's headers say it"
    counted, marked = _marks_of((kept,), (array,))
    content, ends = bytes.fromhex(kept.stem), _ends(kept, array.size)
    return Tokens((array,), vocab_size, content, (ends,), (mapped,), counted, marked)


def require_vocabulary(tokens: Tokens, model: Model) -> None:
    """InputError when the model knows fewer tokens than the text may have."""
    if model.vocab_size < tokens.vocab_size:
        raise InputError(
            f"model.vocab_size: the text has up to {tokens.vocab_size} different tokens, the model {model.vocab_size}"
        )


def _open_all(data: Data, files: Sequence[Path]) -> Tokens:
    """The arrays, of which those that don't say how many different tokens they have are looked through, once."""
    known = KnownFiles(cache_folder(data), data.source)
    shards, sizes = [], [0]
    mapped = tuple(map(OpenedFile.of, files))
    for file in files:
        array, vocab_size = _open(file, known)
        shards.append(array)
        sizes.append(_vocab_size(file, array, known) if vocab_size is None else vocab_size)
    known.save()
    ends = tuple(_ends(file, shard.size) for file, shard in zip(files, shards, strict=True))
    counted, marked = _marks_of(files, shards)
    return Tokens(tuple(shards), max(sizes), ends=ends, files=mapped, counted=counted, files_of_counted=marked)


def _marks_of(
    files: Sequence[Path], shards: Sequence[NDArray[Any]]
) -> tuple[tuple[NDArray[Any] | None, ...], tuple[OpenedFile | None, ...]]:
    """`Tokens.counted` of files of tokens, and what it is mapped from."""
    places = [place if (place := file.with_suffix(COUNTED)).exists() else None for file in files]
    opened = tuple(OpenedFile.of(place) if place else None for place in places)
    marks = tuple(_marks(place, shard.size) if place else None for place, shard in zip(places, shards, strict=True))
    return (marks, opened) if any(places) else ((), ())


def _marks(place: Path, num_tokens: int) -> NDArray[Any]:
    """Marks of the tokens that are trained on; InputError where they can't be that."""
    marks = _mapped(place)
    if not isinstance(marks, np.ndarray) or marks.shape != (num_tokens,) or marks.dtype.kind not in "uib":
        found = f"{marks.dtype} {list(marks.shape)}" if isinstance(marks, np.ndarray) else "several arrays"
        raise InputError(
            f"data.source: {place}: expected a number for each of {num_tokens} tokens, 0 where it is only read, found "
            f"{found}; write it for these tokens"
        )
    return marks


def _ends(path: Path, num_tokens: int) -> NDArray[np.int64]:
    """Ends of the documents in a file of tokens; InputError if the file of ends beside it can't be that."""
    place = ends_of(path)
    if not place.exists():
        is_indexed = path.suffix == ".bin" and not path.with_suffix(".json").exists()
        return read_index(path.with_suffix(INDEX)).ends if is_indexed else np.array([num_tokens])
    ends = _mapped(place)
    is_list = isinstance(ends, np.ndarray) and ends.ndim == 1 and ends.dtype.kind in "ui"
    if (
        not is_list
        or (np.diff(ends.astype(np.int64), prepend=0) < 0).any()
        or [*ends[-1:]] != [num_tokens] * bool(num_tokens)
    ):
        found = f"found {ends.size} that end at {ends[-1]}" if is_list and ends.size else "found none"
        raise InputError(
            f"data.source: {place}: expected ascending numbers of tokens, the last of them {num_tokens}, {found}; "
            "write the ends of these tokens"
        )
    return np.array(ends, np.int64)


def _vocab_size(file: Path, array: NDArray[Any], known: KnownFiles) -> int:
    if not array.size:
        return 0
    low, high = known.vocabulary(file, lambda: (int(array.min()), int(array.max())))
    if low < 0:
        raise InputError(f"data.source: {file}: tokens are counted from 0, but there is a {low}")
    return high + 1


def _open_indexed(path: Path) -> NDArray[Any]:
    """The tokens of a data set of Megatron-LM."""
    index = read_index(path.with_suffix(INDEX))
    expect_whole(index, path)
    return np.memmap(path, index.dtype, mode="r") if index.num_tokens else np.empty(0, index.dtype)


def _total_bytes(files: Iterable[Path]) -> int:
    with contextlib.suppress(OSError):  # reported when it is read
        return sum(file.stat().st_size for file in files)
    return 0


def _open(path: Path, known: KnownFiles) -> tuple[NDArray[Any], int | None]:
    """The array, and more than its largest token if the file says so."""
    try:
        return _open_npy(path) if path.suffix == ".npy" else _open_bin(path, known)
    except OSError as error:
        raise unreadable(path, error) from None


def _mapped(path: Path) -> Any:
    """The content of a .npy or .npz file, read when it is looked at; InputError where it is none."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except UNREADABLE_ARRAYS as error:
        raise InputError(f"data.source: {path}: not an array of NumPy's: {error}") from None


def _open_npy(path: Path) -> tuple[NDArray[Any], None]:
    array = _mapped(path)
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "ui":
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "several arrays"
        raise InputError(f"data.source: {path}: expected whole numbers with one axis, found {found}")
    return array, None


def _open_bin(path: Path, known: KnownFiles) -> tuple[NDArray[Any], int | None]:
    header = path.with_suffix(".json")
    if not header.exists() and path.with_suffix(INDEX).exists():
        return _open_indexed(path), None
    if not header.exists():
        raise InputError(
            f"data.source: {path}: neither a header {header.name} nor Megatron-LM's {path.with_suffix(INDEX).name} "
            "beside it says what numbers it has; write one of them, or save the tokens as .npy"
        )
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
    if body.get("sha256") not in (None, known.digest(path).hex()):
        raise InputError(
            f"data.source: {path}: is damaged: its SHA-256 is not that of its header; remove it, or write it again"
        )
    if not body["num_tokens"]:
        return np.empty(0, dtype), body.get("vocab_size")
    return np.memmap(path, dtype, mode="r"), body.get("vocab_size")
