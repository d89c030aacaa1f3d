"""Steps that a training's log tells of, by attempt, with the global batch of each."""

import bisect
from array import array
from dataclasses import dataclass, field
from typing import Final

from farpipe.interop.log_sizes import Sizes

_LONGEST_S, _MAX_STEP = 1e9, 1 << 48
"""Beyond which a figure is no step of a training."""
OF_BARS: Final = "a progress bar (smoothed over some steps)"
OF_BLOCKS: Final = "MLPerf (blocks)"
OF_EPOCHS: Final = "Lightning's progress bar (mean over an epoch's batches so far)"
RATES: Final = ("torchtitan", "DeepSpeed (rate)", OF_BLOCKS)
"""Kinds of lines that tell the time of a token or a sequence, not of a step."""
OF_MEANS: Final = "MLPerf (means over blocks)"
_COARSE: Final = (OF_MEANS, *RATES, OF_BARS, OF_EPOCHS)
"""Kinds of lines that count where no line tells the seconds of a step; a later one where no earlier one does."""
_LAG: Final = 1
"""Steps by which the lines of one rank may be behind those of another in a log of several ranks."""


class Attempt:
    """Seconds of steps in the order of their numbers, from one start of a training: 24 bytes a step.

    `batches` has the global batch of each, as its own line or the last before it says; 0: not known.
    """

    def __init__(self) -> None:
        self.steps, self.seconds, self.batches = array("q"), array("d"), array("q")

    def __len__(self) -> int:
        return len(self.steps)

    def goes_on(self, step: int) -> bool:
        """True unless `step` falls back further than the lines of another rank."""
        return not self.steps or step >= self.steps[-1] - _LAG

    def add(self, step: int, seconds: float, batch: int) -> None:
        """Take in a step, unless it is there already, by another rank."""
        place = bisect.bisect_left(self.steps, step, max(0, len(self.steps) - _LAG - 1))
        if place == len(self.steps) or self.steps[place] != step:
            self.steps.insert(place, step)
            self.seconds.insert(place, seconds)
            self.batches.insert(place, batch)


@dataclass
class StepLog:
    """Steps that a log tells of, for each attempt that a restart began."""

    framework: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    memory_bytes: float | None = None
    """Largest memory of any device that is told."""
    tflops_of_batch: "dict[int, array[float]]" = field(default_factory=dict)
    """Rates per device by the framework's own count, 10^12 FLOP/s, by the global batch of their line."""
    batch: int = 0
    """Global batch of the steps that count: the job's where the log has it, else the last; 0: not known."""
    facts: Sizes = field(default_factory=dict)
    """Sizes of the training that the log tells of, by key of the job; the last that it has."""
    num_devices: int | None = None
    """Devices that the log tells of."""
    num_unreadable: int = 0
    """Lines that begin like a step's and break off."""
    total: int = 0
    """Number at the end of a progress bar: that of the training is the largest."""
    samples: tuple[int, int] = (0, 0)
    """Number and consumed samples of the last step that tells them."""
    block: tuple[float, float, float] | None = None
    """Samples, step and milliseconds at the start of a block of MLPerf's log."""

    @property
    def sizes(self) -> Sizes:
        """`facts` and the number of devices."""
        return self.facts | ({"num_devices": self.num_devices} if self.num_devices else {})

    def add(self, framework: str, step: int, seconds: float) -> None:
        """Take in a step: one that falls back begins an attempt, one that is there already is another rank's."""
        if self.framework and _rank(framework) > _rank(self.framework):
            return  # Megatron-DeepSpeed has both kinds of lines: seconds go before rates
        if self.framework and _rank(framework) < _rank(self.framework):
            self.attempts = []
        self.framework = framework
        if not (0 < seconds < _LONGEST_S and 0 <= step < _MAX_STEP):
            return
        if framework == OF_BARS and self.attempts and step in self.attempts[-1].steps:
            return  # processes write their bars one after the other where output is buffered
        if not self.attempts or not self.attempts[-1].goes_on(step):
            self.attempts.append(Attempt())
        batch = self.facts.get("global_batch", 0)
        self.attempts[-1].add(step, seconds, batch if batch < _MAX_STEP else 0)

    @property
    def tflops(self) -> "array[float]":
        """Rates of the steps that count."""
        return self.tflops_of_batch.get(self.batch, array("d"))

    def count_batch(self, wanted: int | None) -> None:
        """Let the steps of the batch `wanted` count, or of the last where the log has no such steps."""
        for attempt in self.attempts:
            if len(attempt) > 1 and not attempt.batches[0]:
                attempt.batches[0] = attempt.batches[1]  # what the first step consumed is known by the second
        known = {batch for attempt in self.attempts for batch in attempt.batches}
        self.batch = wanted if wanted in known else self.attempts[-1].batches[-1]
        if self.batch:
            self.facts["global_batch"] = self.batch


def _rank(framework: str) -> int:
    """Place among the kinds of lines, those that tell seconds first."""
    return _COARSE.index(framework) + 1 if framework in _COARSE else 0
