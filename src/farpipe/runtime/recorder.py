"""Brings the reports of all ranks together on rank 0 and writes the run's figures, without holding up the steps.

Rank 0's main thread only moves bytes; a thread of its own assembles Timelines and writes ``metrics.jsonl``.
"""

import queue
import threading
import time
from pathlib import Path
from typing import Final

from farpipe.errors import RunError
from farpipe.runtime.metrics import (
    METRICS_NAME,
    SUMMARY_NAME,
    TIMELINE_NAME,
    MetricsFile,
    Summary,
    num_warm_up_steps,
    summarise,
)
from farpipe.runtime.peers import Peers
from farpipe.runtime.run_spec import RunSpec
from farpipe.runtime.step_report import Assembler, StepReport, step_metrics
from farpipe.simulate.timeline import Timeline

BOX: Final = "step reports"
OFFSETS_LAST_S: Final = 5.0
"""Clock offsets are estimated anew after this long: clocks of different machines drift by tens of ppm."""
MAX_KEPT_BYTES: Final = 256 << 20
"""Timelines kept to choose the median step from."""
_POLL_S: Final = 0.01


class Recorder:
    """Rank 0's end: give it every report with `collect`, and ask for the result with `finish`."""

    def __init__(self, run: RunSpec, run_dir: Path, peers: Peers) -> None:
        self._run, self._dir, self._peers = run, run_dir, peers
        self._writer = _Writer(run, run_dir, peers)
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._num_collected = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def collect(self) -> None:
        """Take what reports have arrived. Raises what went wrong in writing earlier ones."""
        if self._error is not None:
            raise self._error
        for report in self._peers.poll(BOX):
            self._num_collected += 1
            self._queue.put(report)

    def finish(self, num_steps: int) -> Summary:
        """Wait for the reports of `num_steps` steps, then write ``timeline.json`` and ``summary.json``."""
        deadline = time.monotonic() + self._run.transport.timeout_s
        self.collect()
        while self._num_collected < num_steps * self._run.num_ranks:
            if time.monotonic() > deadline:
                missing = num_steps * self._run.num_ranks - self._num_collected
                raise RunError(f"waited {self._run.transport.timeout_s:g} s for {missing} reports on steps")
            time.sleep(_POLL_S)
            self.collect()
        self.close()
        self.collect()
        return self._writer.write_results()

    def close(self) -> None:
        """Write what has been collected and end the thread; a second call does nothing."""
        self._queue.put(None)
        self._thread.join()
        self._writer.close()

    def _write_all(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._writer.add(*item)
        except BaseException as error:
            self._error = error


class _Writer:
    """What the recorder's thread does."""

    def __init__(self, run: RunSpec, run_dir: Path, peers: Peers) -> None:
        self._run, self._dir, self._peers = run, run_dir, peers
        self._assembler = Assembler(run.problem, run.schedule, run.ends)
        self._file: MetricsFile | None = MetricsFile(run_dir / METRICS_NAME)
        self._incomplete: dict[int, dict[int, StepReport]] = {}
        self._lines: list[dict[str, object]] = []
        self._kept: dict[int, Timeline] = {}
        self._offsets_ns: list[int] = []
        self._offsets_until_s = 0.0

    def add(self, rank: int, payload: bytes) -> None:
        """One rank's report on a step; when it is the last one, the step is written."""
        report = StepReport.unpack(payload)
        reports = self._incomplete.setdefault(report.step, {})
        reports[rank] = report
        if len(reports) == self._run.num_ranks:
            del self._incomplete[report.step]
            self._write([reports[rank] for rank in range(self._run.num_ranks)])

    def _write(self, reports: list[StepReport]) -> None:
        assert self._file is not None
        timeline = self._assembler.timeline(reports, self._offsets())
        line = step_metrics(timeline, reports, self._run.tokens_per_step)
        self._file.write(line)
        self._lines.append(line)
        if reports[0].step >= num_warm_up_steps(self._run.num_steps):
            self._keep(reports[0].step, timeline)

    def _offsets(self) -> list[int]:
        if time.monotonic() > self._offsets_until_s:
            self._offsets_ns = self._peers.clock_offsets()
            self._offsets_until_s = time.monotonic() + OFFSETS_LAST_S
        return self._offsets_ns

    def _keep(self, step: int, timeline: Timeline) -> None:
        """Keep it for the choice of the median step; the farthest from the median makes room for it."""
        self._kept[step] = timeline
        if len(self._kept) * (timeline.actions.nbytes + timeline.messages.nbytes) > MAX_KEPT_BYTES:
            by_makespan = sorted(self._kept, key=lambda kept: self._kept[kept].makespan_s)
            middle = self._kept[by_makespan[len(by_makespan) // 2]].makespan_s
            ends = (by_makespan[0], by_makespan[-1])
            del self._kept[max(ends, key=lambda kept: abs(self._kept[kept].makespan_s - middle))]

    def write_results(self) -> Summary:
        """``timeline.json`` of the median step, then ``summary.json``, whose presence says that the run is whole."""
        by_makespan = sorted(self._kept, key=lambda step: self._kept[step].makespan_s)
        step = by_makespan[(len(by_makespan) - 1) // 2]
        summary = summarise(self._lines, step)
        self._kept[step].save(self._dir / TIMELINE_NAME)
        summary.save(self._dir / SUMMARY_NAME)
        return summary

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
