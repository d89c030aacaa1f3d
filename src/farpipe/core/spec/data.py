"""The text that a job trains on."""

from typing import Literal, Self

from pydantic import model_validator

from farpipe.core.spec.part import Part, Share, Text, fault


class Data(Part):
    """The text to train on, and how it becomes tokens."""

    source: Text = "stdlib"
    """`"stdlib"` (the source code of Python's standard library), or a file or folder, relative to where the run
    starts."""
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "tokens"] = "auto"
    """Format of the files: `"text"`, `"jsonl"`, `"parquet"`, `"arrow"`, `"tokens"` (arrays of numbers); `"auto"` goes
    by the ends of their names."""
    text_key: Text = "text"
    """Key of the text in JSONL, its column in Parquet and Arrow."""
    prompt_key: Text | None = None
    """Key of a text before it that is read but not trained on, as the prompts of a fine-tuning."""
    tokenizer: Text = "bytes"
    """`"bytes"`: one token per byte; or a `tokenizer.json`, or a folder that has one."""
    end_of_text: Text | None = None
    """Token of the tokenizer that follows every document."""
    held_out: Share = 0.0
    """Share of the sequences that is kept for evaluation and never trained on."""
    packing: Literal["elastic", "fixed", "none"] | None = None
    """Train on whole documents, `training.global_batch` of them a step, in chunks that are planned for every step;
    documents longer than `training.sequence_length` are cut. `"elastic"` cuts long ones into slices and packs short
    ones, `"fixed"` does so by equal numbers of tokens, `"none"` leaves every document a chunk of its own. Default:
    sequences of `sequence_length` tokens out of the text as a whole."""
    cache: Text | None = None
    """Folder for tokenized text and for what is known about files. Default: `farpipe/tokens` in the user's caches."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.prompt_key is not None and (self.format in ("text", "tokens") or self.prompt_key == self.text_key):
            raise fault("a prompt is another key of JSONL, Parquet or Arrow", "prompt_key")
        if self.end_of_text is not None and self.tokenizer == "bytes":
            raise fault("bytes have no such token; give a tokenizer", "end_of_text")
        return self

    @property
    def is_bytes(self) -> bool:
        """True if tokens are bytes of text, as far as is known without looking at the files.

        Tables may have tokens as well; only their columns show it.
        """
        names = (".npy", ".bin", ".idx", ".parquet", ".arrow", ".feather")
        is_other = self.format in ("tokens", "parquet", "arrow") or self.source.endswith(names)
        return self.tokenizer == "bytes" and not is_other
