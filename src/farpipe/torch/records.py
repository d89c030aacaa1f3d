"""Figures of a user's pipeline in a run directory, for ``farpipe report`` and ``farpipe plan --learned-from``."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from farpipe.core.spec import MetricsSettings
from farpipe.core.spec.training import ReplanSettings
from farpipe.core.step import Schedule
from farpipe.engine.control.watch import ReplanWatch
from farpipe.engine.executor.commands import Watch
from farpipe.engine.executor.executor import StepEvents
from farpipe.engine.executor.peers import Peers
from farpipe.engine.figures.memory import memory_figures
from farpipe.engine.figures.metrics import PLAN_NAME
from farpipe.engine.figures.recorder import BOX, Recorder
from farpipe.engine.figures.step_report import StepReport, is_recorded, record_every
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.run_spec import RunSpec
from farpipe.planning import Plan

_ENDLESS: Final = 1 << 40
"""Number of steps of a training without a stated end."""
_NO_COLLECTIVES: Final = np.zeros((0, 5), np.int64)


class Records:
    """Every rank's part in recording the steps of a pipeline; rank 0 writes them."""

    def __init__(
        self, plan: Plan, schedule: Schedule, peers: Peers, device: str, run_dir: Path | None, *, replan: bool
    ) -> None:
        """`run_dir`: on rank 0, which writes `plan` there as well, and with `replan` watches the steps."""
        self._peers, self._device, self._num_steps = peers, device, 0
        self._run = RunSpec.bare(
            problem=plan.problem.model_copy(update={"sync": None, "exchanges": ()}),
            schedule=schedule,
            sites=plan.sites,
            num_steps=_ENDLESS,
            device="sleep",  # its model, which a RunSpec of another device has to have, is the user's
            emulate_links=False,
            metrics=MetricsSettings(log_every_steps=0),
            transport=TransportSettings(),
            replan=ReplanSettings() if replan else None,
        )
        self._record_every = record_every(self._run)
        self._recorder = None
        self.watch: Watch | None = None
        """Rank 0's, which proposes other orders."""
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
            plan.model_copy(update={"schedule": schedule}).save(run_dir / PLAN_NAME)
            self.watch = ReplanWatch(self._run, run_dir) if replan else None
            on_timeline = None if self.watch is None else self.watch.on_timeline
            self._recorder = Recorder(self._run, run_dir, peers, on_timeline=on_timeline)

    def order_from_now(self, schedule: Schedule) -> None:
        """Take note of the order of the steps that are still to come."""
        if self._recorder is not None:
            self._recorder.order_from(self._num_steps, schedule)

    def add(self, begin_ns: int, events: StepEvents, loss: float) -> None:
        """Report a step that began at `begin_ns` and has just ended; `loss` is NaN but on the last stage's rank."""
        share = events.cpu_share if self._device == "cpu" else math.nan
        links = tuple(event.to_data() for event in self._peers.take_events())
        span = (self._num_steps, begin_ns, self._peers.clock.now_ns())
        report = StepReport(*span, loss, math.nan, events, _NO_COLLECTIVES, cpu_share=share, link_events=links)
        report = replace(report, **memory_figures(self._device))  # type: ignore[arg-type]
        if not is_recorded(self._num_steps, self._record_every, _ENDLESS):
            report = report.without_record()
        self._num_steps += 1
        self._peers.post(0, BOX, report.pack())
        if self._recorder is not None:
            self._recorder.collect()

    def close(self) -> None:
        """Write the results, for which rank 0 asks all clocks; on all ranks at the same time."""
        if self._recorder is not None and self._num_steps:
            self._recorder.finish(self._num_steps)
        self.end_watch()
        self._peers.exchange("records end", b"", waiting_for="rank 0 to write the figures of the last step")

    def end_watch(self) -> None:
        """End the search for other orders; a second call does nothing."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()
