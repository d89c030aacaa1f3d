"""Token files of Megatron-LM (.bin with .idx), and files that may be compressed."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError

COMPRESSED: Final = (".gz", ".zst")


def plain_suffix(path: Path) -> str:
    """End of the file's name without that of a compression: ``.jsonl`` of ``a.jsonl.gz``."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed; OSError as `open` raises it, InputError where it is damaged or cut short."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".gz":
                with gzip.open(file) as plain:
                    yield plain  # type: ignore[misc]
            elif path.suffix == ".zst":
                yield _zstandard(file, path)
            else:
                yield file
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{path}: damaged or cut short: {error}") from None
    except OSError as error:
        if error.errno is None:  # of Zstandard, not of the system
            raise InputError(f"{path}: damaged or cut short: {error}") from None
        raise


def _zstandard(file: BinaryIO, path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError(f"{path}: Zstandard needs pyarrow: pip install 'farpipe[data]'") from None
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


INDEX: Final = ".idx"
_ANEW: Final = "regenerate it and its .bin with Megatron's tools (tools/preprocess_data.py)"
_MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = np.dtype([("version", "<u8"), ("code", "u1"), ("num_sequences", "<u8"), ("num_ends", "<u8")])
_TYPES: Final = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Codes of whole numbers; 6 and 7 are fractions."""


class MegatronIndex(NamedTuple):
    """Type of the tokens in a .bin, and the numbers of tokens at which documents end."""

    dtype: np.dtype[np.integer]
    ends: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.ends[-1]) if self.ends.size else 0


def _index_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None
    if not data.startswith(_MAGIC) or len(data) < len(_MAGIC) + _HEADER.itemsize:
        raise InputError(f"{path}: not an index of Megatron-LM (MMIDIDX); {_ANEW}")
    return data


def read_index(path: Path) -> MegatronIndex:
    """The index in a .idx; InputError for a damaged one, and for tokens that are not stored one after the other."""
    data, begin = _index_bytes(path), len(_MAGIC) + _HEADER.itemsize
    version, code, num_sequences, num_ends = np.frombuffer(data, _HEADER, 1, len(_MAGIC))[0].tolist()
    if version != 1 or code not in _TYPES:
        raise InputError(f"{path}: version {version}, type {code}: expected version 1 and whole numbers ({[*_TYPES]})")
    if len(data) < begin + 12 * num_sequences + 8 * num_ends:
        raise InputError(
            f"{path}: {num_sequences} sequences and {num_ends} ends do not fit in {len(data)} bytes; is it whole?"
        )
    lengths = np.frombuffer(data, "<i4", num_sequences, begin).astype(np.int64)
    places = np.frombuffer(data, "<i8", num_sequences, begin + 4 * num_sequences)
    firsts = np.frombuffer(data, "<i8", num_ends, begin + 12 * num_sequences)
    dtype = np.dtype(_TYPES[code]).newbyteorder("<")
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if (lengths < 0).any():
        raise InputError(f"{path}: damaged: sequence {lengths.argmin()} has {lengths.min()} tokens; {_ANEW}")
    _expect_ascending(firsts, num_sequences, path)
    if not np.array_equal(places, ends[:-1] * dtype.itemsize):
        raise InputError(f"{path}: sequences are not one after the other in its .bin; {_ANEW}")
    return MegatronIndex(dtype, ends[firsts[1:]])


def _expect_ascending(firsts: NDArray[np.int64], num_sequences: int, path: Path) -> None:
    """InputError unless documents begin with sequence 0, follow each other and end with the last sequence."""
    if not firsts.size or firsts[0] != 0 or firsts[-1] != num_sequences:
        found = f"from {firsts[0]} to {firsts[-1]}" if firsts.size else "of none"
        raise InputError(f"{path}: damaged: documents {found} of {num_sequences} sequences; {_ANEW}")
    back = np.flatnonzero(np.diff(firsts) < 0)
    if back.size:
        first, last = firsts[back[0]], firsts[back[0] + 1]
        raise InputError(
            f"{path}: documents are out of order: document {back[0]} begins with sequence {first} and ends before "
            f"{last}; {_ANEW}"
        )


def expect_whole(index: MegatronIndex, tokens: Path) -> None:
    """InputError where the .bin has other tokens than its index says."""
    expected = index.num_tokens * index.dtype.itemsize
    try:
        size = tokens.stat().st_size
    except OSError as error:
        raise InputError(f"{tokens}: can't be read: {error.strerror or error}") from None
    if size != expected:
        raise InputError(
            f"{tokens}: has {size} bytes, but its index says {index.num_tokens} tokens of {index.dtype.itemsize}; is "
            "it whole?"
        )
