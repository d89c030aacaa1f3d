"""Steps without a barrier: a rank updates when its own gradients are there; the norm of the whole follows.

The norm of step k comes beside step k + 1 and is read before the update of step k + 1. Where it says that the gradient
of step k should have been clipped, every rank takes its update back, does it with the norm, and runs step k + 1 again.
All ranks read the same norms, so they do so in the same steps, and what comes out is what a barrier would have given,
to the last bit. What must be done with final weights (a checkpoint, an evaluation, a command, the last step) is done in
a step that waits for its own norm, as every rank knows in advance: commands asked for in step k act after step k + 1.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.engine.executor.executor import Executor, Performed
from farpipe.engine.executor.optimizer import global_norm
from farpipe.engine.executor.peers import Peers
from farpipe.engine.executor.work import AGAIN, Work
from farpipe.engine.figures.step_report import StepReport
from farpipe.engine.replicas.background import BackgroundThread

CAUTION: Final = 0.7
"""Share of the largest norm from which the next step waits for its own: a step that is run again costs as much as a
barrier does in ten, and norms that close to the limit are above it soon."""

OnNorm = Callable[[int, float], set[bytes]]
"""Hears the norm of a step; the commands that came with it."""


class FreeSteps:
    """One rank's steps."""

    def __init__(
        self, work: Work, peers: Peers, before_norm: Callable[[int], None], on_norm: OnNorm, caution: float = CAUTION
    ) -> None:
        """``before_norm(step)`` sends what all are to know with the norm of `step`."""
        self._work, self._peers, self._before_norm, self._on_norm = work, peers, before_norm, on_norm
        self._caution, self._last_norm = caution, math.inf
        self._clips = work.is_clipped(math.inf)
        self._background = BackgroundThread(f"farpipe norm of {peers.rank}")
        self._norm: Future[float] | None = None
        self.num_again = 0
        """Steps that were run again."""

    @property
    def is_open(self) -> bool:
        """True if the norm of the step that was run last is not known yet."""
        return self._norm is not None

    def run(self, step: int, begin_ns: int, executor: Executor, *, waits: bool) -> tuple[StepReport, set[bytes]]:
        """Run `step`, which began at `begin_ns`; its report, and commands that act after it.

        `waits`: for its own norm. The report's norm is NaN where it is not known yet. DivergedError where the step
        before had no finite loss or gradient, or this one.
        """
        performed, sync = self._attempt(step, executor)
        commands = set[bytes]()
        if self._norm is not None:
            norm = self._take_norm(step - 1, commands)
            if self._work.is_clipped(norm):
                self._work.take_back()
                self._work.update(step - 1, norm)
                self.num_again += 1
                performed, sync = self._attempt(AGAIN + step, executor)
        self._before_norm(step)
        self._norm = self._background.start(partial(global_norm, self._work.share_of_norm(), self._peers, step))
        if waits or commands or self._may_clip:
            norm = self._take_norm(step, commands)
            self._work.update(step, norm)
        else:
            norm = math.nan
            if self._clips:
                self._work.keep()
            self._work.update(step, 0.0)
        events = executor.timed(performed)
        end_ns, sent, loss = self._peers.clock.now_ns(), self._work.link_bytes, self._work.loss
        share = events.cpu_share
        report = StepReport(step, begin_ns, end_ns, loss, norm, events, sync, cpu_share=share, link_bytes=sent)
        return report, commands

    @property
    def _may_clip(self) -> bool:
        """True if the newest norm is near the limit; at first, as none is known, too."""
        return self._clips and self._work.is_clipped(self._last_norm / self._caution)

    def _attempt(self, tag: int, executor: Executor) -> tuple[Performed, NDArray[np.int64]]:
        self._work.begin_step(tag)
        performed = executor.perform(tag)
        return performed, self._work.sum_gradients(tag)

    def _take_norm(self, step: int, commands: set[bytes]) -> float:
        """The norm of `step`, which all ranks wait for; to `commands` come those that were asked for in it."""
        assert self._norm is not None
        self._last_norm = self._norm.result()
        self._norm = None
        commands |= self._on_norm(step, self._last_norm)
        return self._last_norm
