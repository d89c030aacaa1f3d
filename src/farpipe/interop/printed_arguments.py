"""Arguments as Megatron-LM prints them into its log, defaults applied: the settings that a training really had."""

import re
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.interop.megatron import job_of_settings
from farpipe.interop.megatron_names import ALIASES, settings_of_tables
from farpipe.interop.settings import Draft

_BEGIN: Final = re.compile(r"-{6,} arguments -{6,}")
_END: Final = re.compile(r"-{6,} end of arguments -{6,}")
_LINE: Final = re.compile(r"(?:^|\s)(\w+) \.{3,} ?(.*)$")
_PADDED: Final = re.compile(r"padded vocab \(size: \d+\).*\(new size: (\d+)\)")
_ABSENT: Final = ("None", "", "[]")
_SWITCHES: Final = {"True": True, "False": False}
_WRAPPED: Final = re.compile(r"AttnBackend\.(\w+)|\['?([\w.-]+)'?\]")
"""A value of an enumeration, or a list of one."""
_UNUSED: Final = (
    *(
        "ademamix_",
        "bert_",
        "biencoder_",
        "block_",
        "dino_",
        "encoder_",
        "goldfish_",
        "grpo_",
        "ict_",
        "indexer_",
        "kd_",
    ),
    *(
        "lion_",
        "logits_",
        "mamba_inference_",
        "muon_",
        "query_in_block",
        "relative_attention_",
        "retriever_",
        "retro_",
        "rl_",
    ),
    *("sgd_", "swin_", "vision_"),
)
"""Beginnings of arguments of other programs and optimizers; a switch among them counts where it is on."""
MAX_HEAD: Final = 50_000
"""Lines in which the arguments have to begin; a training prints them before its first step."""


def arguments_of(path: Path) -> dict[str, Any] | None:
    """The printed arguments by name, those of the last start in the first lines; None where there are none.

    InputError where the log breaks off among them.
    """
    found: dict[str, Any] | None = None
    inside = False
    with path.open(encoding="utf-8", errors="replace") as file:
        for _, line in zip(range(MAX_HEAD), file, strict=False):
            if _BEGIN.search(line):
                found, inside = {}, True
            elif _END.search(line):
                inside = False
            elif inside and (match := _LINE.search(line.rstrip())) and match[2].strip() not in _ABSENT:
                assert found is not None
                text = _WRAPPED.sub(lambda wrapped: wrapped[1] or wrapped[2], match[2].strip())
                found[match[1]] = _SWITCHES.get(text, text)
            elif found and (match := _PADDED.search(line)):
                found["padded_vocab_size"] = match[1]
    if inside:
        raise InputError(f"{path}: the log breaks off among the arguments; give the whole log")
    return found


def read_arguments(arguments: dict[str, Any], source: str) -> Draft:
    """The job of printed arguments; those that only another program, optimizer or kind of layer reads are left out."""
    draft = job_of_settings(settings_of_tables(_telling(arguments), source), "Megatron-LM", "megatron", "printed")
    draft.not_understood = [text for text in draft.not_understood if not text.endswith(": False")]  # not switched on
    return draft


def _telling(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that count: everything is printed, also the defaults of what is not used."""
    unused: tuple[str, ...] = _UNUSED
    if arguments.get("num_experts", "1") == "1":
        unused += ("moe_", "num_experts")
    if not arguments.get("deepspeed"):
        unused += ("zero_",)
    if "world_size" in arguments:  # what is left of them by the other degrees
        unused += ("data_parallel_size",)
    if "virtual_pipeline_model_parallel_size" not in arguments:  # off for every order that is not interleaved
        unused += ("overlap_p2p_comm",)
    return {
        name: value
        for name, value in arguments.items()
        if (value is True and not name.startswith(("moe_", "retro_verify"))) or not name.startswith(unused)
        if not (value is False and name in ALIASES)  # a switch's other name
    }
