"""What an attempt has written, as it may be shown: parts of its log without control characters, and its steps."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from farpipe.core.units import printable
from farpipe.engine.figures.metrics import METRICS_NAME, good_lines
from farpipe.service.folder import LOG_NAME, RUN_NAME
from farpipe.service.launcher import Key, Launcher

PART_BYTES: Final = 64 * 1024
"""Longest part of a log in one answer."""
MOST_STEPS: Final = 500
READ_BYTES: Final = 64 * 1024**2
"""Longest file that is read whole: metrics of some 60,000 steps."""


class LogPart(BaseModel):
    """A part of a log; control characters are written out."""

    attempt: int
    after: int
    """First byte of the part."""
    next: int
    """First byte after it: that of the next part."""
    text: str


class Step(BaseModel):
    """One optimizer step as it was measured."""

    step: int
    step_s: float | None = None
    loss: float | None = None


def log_part(launcher: Launcher, job: str, attempt: int, after: int | None) -> LogPart:
    """A part of the log of an attempt from byte `after` on; None: its end."""
    key = Key(job, attempt)
    data = _whole(launcher, key, LOG_NAME) if after is None else launcher.read(key, LOG_NAME, after)
    begin = max(0, len(data) - PART_BYTES) if after is None else 0
    part = data[begin : begin + PART_BYTES]
    first = (after or 0) + begin
    lines = part.decode(errors="replace").split("\n")
    return LogPart(attempt=attempt, after=first, next=first + len(part), text="\n".join(map(printable, lines)))


def steps_of(launcher: Launcher, job: str, attempt: int) -> list[Step]:
    """Steps of an attempt, `MOST_STEPS` at most, evenly chosen, the last one among them."""
    data = _whole(launcher, Key(job, attempt), f"{RUN_NAME}/{METRICS_NAME}")
    lines = good_lines(data[: data.rfind(b"\n") + 1], Path(METRICS_NAME))
    found = [
        Step(step=line["step"], step_s=line.get("step_s"), loss=line.get("loss")) for line in lines if "step" in line
    ]
    every = -(-len(found) // MOST_STEPS) or 1
    return found[::-1][::every][::-1]


def _whole(launcher: Launcher, key: Key, file: str) -> bytes:
    """A file of an attempt, which a launcher reads in parts; of a very long one the first READ_BYTES."""
    data = bytearray()
    while len(data) < READ_BYTES and (part := launcher.read(key, file, len(data))):
        data += part
    return bytes(data)


def masked(text: str, names: Iterable[str]) -> str:
    """`text` with the names of others' jobs left out."""
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.-])'?(?:{words})'?(?![\w.-])", "another tenant's job", text) if words else text
