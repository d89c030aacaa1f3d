"""From texts to arrays of tokens."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.errors import InputError
from farpipe.runtime.data.documents import pieces
from farpipe.spec import Data
from farpipe.strict import read_text

NUM_BYTES: Final = 256
BETWEEN_TEXTS: Final = b"\n\n"
_PIECES_AT_ONCE: Final = 256


class ByteTokenizer:
    """One token per byte."""

    key, vocab_size, dtype = "bytes", NUM_BYTES, np.dtype("uint8")

    def tokens(self, texts: Iterable[str]) -> Iterator[tuple[NDArray[Any], bool]]:
        """(bytes, whether a document ends there): all texts, with an empty line behind each but the last."""
        for number, text in enumerate(texts):
            if number:
                yield np.frombuffer(BETWEEN_TEXTS, np.uint8), True
            yield np.frombuffer(text.encode(), np.uint8), False


class LearnedTokenizer:
    """A tokenizer.json of the tokenizers library."""

    def __init__(self, data: Data) -> None:
        """InputError when the file is missing or damaged, or the library is."""
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

    def tokens(self, texts: Iterable[str]) -> Iterator[tuple[NDArray[Any], bool]]:
        """(tokens of a piece, whether a document ends there), in order, with the end of text behind each document."""
        marked = _marked(texts)
        while group := [*islice(marked, _PIECES_AT_ONCE)]:
            encoded = self._tokenizer.encode_batch([piece for piece, _ in group], add_special_tokens=False)
            for found, (_, is_last) in zip(encoded, group, strict=True):
                ends = [self._end] if is_last and self._end is not None else []
                yield np.array([*found.ids, *ends], self.dtype), is_last


def _marked(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Pieces, and whether each is its document's last."""
    for text in texts:
        *before, last = pieces(text)
        yield from ((piece, False) for piece in before)
        yield last, True
