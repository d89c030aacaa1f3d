"""Whether a rank's file of a checkpoint is whole: by its table, or by the digest of every tensor. Needs no torch."""

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO, Final

from farpipe.core.errors import InputError
from farpipe.core.spec.hugging_face_count import read_header
from farpipe.engine.checkpoint.manifest import FileEntry

_BLOCK_BYTES: Final = 1 << 20
_LENGTH_BYTES: Final = 8
"""Bytes of the length before the table."""


def is_here(path: Path, entry: FileEntry) -> bool:
    """True if `path` is the file that a manifest means, by its size and its table of digests."""
    try:
        return (
            path.stat().st_size == entry.num_bytes
            and hashlib.sha256(read_header(path)).hexdigest() == entry.header_sha256
        )
    except (OSError, InputError):
        return False


def check_file(path: Path, entry: FileEntry) -> None:
    """Hold all of a file against its digests; InputError names what is damaged."""
    if not is_here(path, entry):
        raise InputError(f"{path}: damaged: its size or its table is not what was written")
    header = read_header(path)
    table: dict[str, Any] = json.loads(header[_LENGTH_BYTES:])
    digests = table.pop("__metadata__", {})
    with path.open("rb") as file:
        for key, tensor in table.items():
            first, end = tensor["data_offsets"]
            file.seek(len(header) + first)
            if _digest(file, end - first) != digests.get(key):
                raise InputError(f"{path}: damaged: {key} is not what was written")


def _digest(file: BinaryIO, num_bytes: int) -> str:
    """SHA-256 of the next so many bytes."""
    found = hashlib.sha256()
    while num_bytes > 0 and (block := file.read(min(num_bytes, _BLOCK_BYTES))):
        found.update(block)
        num_bytes -= len(block)
    return found.hexdigest()
