"""Files of text that may be compressed: gzip (.gz) and Zstandard (.zst) are read as what is in them."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from farpipe.errors import InputError

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
