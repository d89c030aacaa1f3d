"""Cells of others' tables and parts of their JSON: numbers, and the beginning of a file by which its kind is known."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.strict import parse_json

KINDS_TRIED: Final = (
    "settings (scripts, options and logs of Megatron-LM; YAML of Megatron-LM, GPT-NeoX, NeMo and Accelerate; TOML, "
    "JSON and Python of torchtitan; JSON of DeepSpeed and Hugging Face), logs (steps of Megatron-LM, DeepSpeed, "
    "torchtitan, NeMo, MLPerf, progress bars), links (iperf3, ping, mtr, nccl-tests, perftest, qperf), traces "
    "(torch.profiler), lists (jobs of Slurm, Kubernetes, Kueue, Volcano, SkyPilot; nodes of Slurm; tasks of SkyPilot)"
)
"""Kinds of files that ``farpipe import`` reads, for the message on one of another kind."""
_HEAD_BYTES: Final = 1 << 16


def unknown_kind(source: str, found: str) -> InputError:
    """The error for a file that no reader knows; `found` tells what it seems to be."""
    return InputError(f"{source}: no file of a known kind{found}; tried: {KINDS_TRIED}")


def head_of(path: Path) -> str:
    """The first 64 KiB of a file; empty where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES).decode("utf-8", errors="replace").removeprefix("\ufeff")


def json_in(text: str, source: str) -> Any:
    """The JSON object that a text is; None for other texts and for JSON lines. InputError for broken JSON."""
    begin = text.lstrip()
    if not begin.startswith("{"):
        return None
    first, _, rest = begin.partition("\n")
    with suppress(InputError):
        if rest.strip() and isinstance(parse_json(first, source), dict):
            return None
    return parse_json(text, source)


def number(text: str, place: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if abs(value) < float("inf"):
        return value
    raise InputError(f"{place}: expected a number, found {text[:40]!r}")


def whole(value: Any, place: str) -> int:
    """A count that is not negative, as a number or as text; InputError for parts of one and for what is none."""
    count = number(str(value), place)
    if 0 <= count < 1 << 40 and count == int(count):
        return int(count)
    raise InputError(f"{place}: expected a whole number, found {str(value)[:40]!r}")


def inner(data: Any, *path: str | int) -> Any:
    """The value at `path` inside JSON data; None where it is not there."""
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def plain_number(value: Any) -> float | None:
    """A finite number of JSON that is not negative; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < math.inf and value < 1e300 else None
