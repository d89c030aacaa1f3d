"""Real text as batches of tokens, the same on every rank: Python's own standard library, or the user's files."""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farpipe.errors import InputError
from farpipe.spec import Data, Model

IGNORED: Final = -100
"""A target that does not count; what torch's cross entropy ignores as well."""
VOCAB_SIZE: Final = 256
_BETWEEN_FILES: Final = b"\n\n"


@dataclass(frozen=True)
class Batch:
    """One optimizer step: tokens and targets [num_microbatches, microbatch_size, sequence_length], int64."""

    tokens: Tensor
    targets: Tensor

    @cached_property
    def num_target_tokens(self) -> int:
        """Targets that count, over the whole step."""
        return int((self.targets != IGNORED).sum())


class Batches:
    """The batches of a run: random windows of the text, each determined by the seed and the step alone."""

    def __init__(self, text: NDArray[np.uint8], shape: tuple[int, int, int], seed: int) -> None:
        """`shape`: (num_microbatches, microbatch_size, sequence_length). InputError when the text is too short."""
        needed = int(np.prod(shape)) + 1
        if text.size < needed:
            raise InputError(
                f"data.source: the text has {text.size} bytes, but one step of {shape[0]} microbatches x {shape[1]} "
                f"sequences x {shape[2]} tokens needs {needed}; give more text or make global_batch smaller"
            )
        self.text, self.shape, self.seed = text, shape, seed

    def batch(self, step: int) -> Batch:
        """The tokens of `step`, and as targets the tokens that follow them."""
        num_microbatches, microbatch_size, sequence_length = self.shape
        generator = np.random.Generator(np.random.Philox(key=[self.seed, step]))
        starts = generator.integers(self.text.size - sequence_length, size=(num_microbatches, microbatch_size, 1))
        windows = self.text[starts + np.arange(sequence_length + 1)].astype(np.int64)
        return Batch(torch.from_numpy(windows[..., :-1].copy()), torch.from_numpy(windows[..., 1:].copy()))

    @property
    def digest(self) -> bytes:
        """Equal on two ranks if and only if they train on the same batches (SHA-256)."""
        head = f"{self.shape} {self.seed} ".encode()
        return hashlib.sha256(head + self.text.tobytes()).digest()


def require_vocabulary(model: Model) -> None:
    """InputError when the model has too few tokens for text as bytes."""
    if model.vocab_size < VOCAB_SIZE:
        raise InputError(
            f"model.vocab_size: text as bytes has {VOCAB_SIZE} different tokens, the model only {model.vocab_size}"
        )


def load_text(data: Data) -> NDArray[np.uint8]:
    """The text as bytes [num_bytes]; InputError names a file that is missing, unreadable or not UTF-8 text."""
    return np.frombuffer(_BETWEEN_FILES.join(_read(path) for path in _files(data.source)), np.uint8)


def _files(source: str) -> list[Path]:
    if source == "stdlib":
        path = Path(sysconfig.get_path("stdlib"))
        files = sorted(path.glob("*.py"))
    else:
        path = Path(source)
        files = sorted(_visible_files(path)) if path.is_dir() else [path]
    if not path.exists():
        raise InputError(f'data.source: there is no file or folder {source!r}; "stdlib" is always there')
    if not files:
        raise InputError(f"data.source: the folder {str(path)!r} has no files in it")
    return files


def _visible_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def _read(path: Path) -> bytes:
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"data.source: {path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputError(f"data.source: {path}: can't be read: {error.strerror or error}") from None
    return text
