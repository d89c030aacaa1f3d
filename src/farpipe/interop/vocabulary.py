"""Size of a vocabulary by Megatron-LM's settings: as they tell it, or by the tokenizer's name."""

import math
import re
from typing import Final

from farpipe.interop.kinds import as_count, as_size
from farpipe.interop.settings import Draft, Settings

_TOKENIZERS: Final = {
    r"gpt2": 50257,
    r"llama-?2|mistral|mixtral": 32000,
    r"llama-?3|llama3": 128256,
    r"qwen": 151936,
    r"deepseek-?v[23]": 129280,
    r"bertwordpiece": 30522,
    r"sentencepiece": 32000,
}
"""Sizes of well-known vocabularies, by a pattern of the tokenizer's name."""
_TOKENIZER_NAMES: Final = ("tokenizer_type", "tokenizer_model", "tokenizer_name_or_path", "type", "model")
_USUAL_VOCABULARY: Final = 128256


def put_vocabulary(settings: Settings, draft: Draft) -> None:
    """Put the size of the vocabulary, padded as for the tensor-parallel devices, into `draft`."""
    names = ("vocab_size", "tokenizer_vocab_size")
    size, origin = settings.first(names, as_size), settings.origin(*names)
    padded = settings.take("padded_vocab_size", as_count)
    if padded is not None:
        draft.put("model", "vocab_size", padded, settings.origin("padded_vocab_size"))
        return
    if size is None:
        named = " ".join(
            str(settings.values[name].value) for name in _TOKENIZER_NAMES if name in settings.values
        ).lower()
        named += " gpt2" * ("merge_file" in settings.values)  # pairs of characters: GPT-2's tokenizer
        size = next((known for pattern, known in _TOKENIZERS.items() if re.search(pattern, named)), _USUAL_VOCABULARY)
        origin = "assumed"
        draft.notes.append(f"the vocabulary is not in the file: {size} assumed; change model.vocab_size")
    size += settings.take("tokenizer_type") == "NullTokenizer"
    multiple = settings.take("make_vocab_size_divisible_by", as_size, default=128) * draft.degree("tensor")
    draft.put("model", "vocab_size", math.ceil(size / multiple) * multiple, f"{origin}, to a multiple of {multiple}")
