"""Writes one rank's file of a checkpoint, in the format of safetensors, as its bytes come."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch

from farpipe.core.errors import RunError
from farpipe.core.spec.hugging_face_count import read_header
from farpipe.engine.checkpoint.folders import MANIFEST_NAME, sync_folder
from farpipe.engine.checkpoint.manifest import FileEntry
from farpipe.engine.checkpoint.snapshot import Snapshot

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NO_DIGEST: Final = "0" * 64


def write_file(folder: Path, rank: int, site: str, snapshot: Snapshot) -> FileEntry:
    """Write one rank's tensors, by key; RunError when the disk is full or a number is not finite.

    When this returns, the file is complete and on the disk.
    """
    path = folder / f"rank-{rank}.safetensors"
    temporary = path.with_name(f".{path.name}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST_NAME).unlink(missing_ok=True)  # of an earlier attempt: it would no longer be true
        with temporary.open("wb") as file:
            _write(file, snapshot, path)
            file.flush()
            os.fsync(file.fileno())
        header, num_bytes = read_header(temporary), temporary.stat().st_size
        temporary.replace(path)
        sync_folder(folder)
    except OSError as error:
        _remove(temporary)
        raise RunError(f"{path}: can't be written: {error.strerror or error}") from None
    except RunError:
        _remove(temporary)
        raise
    return FileEntry(name=path.name, site=site, num_bytes=num_bytes, header_sha256=hashlib.sha256(header).hexdigest())


def _write(file: IO[bytes], snapshot: Snapshot, path: Path) -> None:
    """The table comes last, in the place that was left for it: it has the digests."""
    file.write(_header(snapshot, {}))
    digests = {key: hashlib.sha256() for key in snapshot.tensors}
    for key, values in snapshot.slices():
        if not bool(torch.isfinite(values).all()):
            raise RunError(f"{path}: {key} has numbers that are not finite; the training has diverged")
        data = values.view(torch.uint8).numpy().data
        digests[key].update(data)
        file.write(data)
    file.seek(0)
    file.write(_header(snapshot, {key: found.hexdigest() for key, found in digests.items()}))


def _header(snapshot: Snapshot, digests: Mapping[str, str]) -> bytes:
    """Length and table, equally long whatever the digests."""
    table: dict[str, Any] = {"__metadata__": {key: digests.get(key, _NO_DIGEST) for key in snapshot.tensors}}
    end = 0
    for key, tensor in snapshot.tensors.items():
        start, end = end, end + tensor.nbytes
        table[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _remove(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
