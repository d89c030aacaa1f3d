"""Brings the reports of all ranks together on rank 0 and writes the run's figures, without holding up the steps.

Rank 0's main thread only moves bytes; a thread of its own assembles Timelines and writes ``metrics.jsonl``.
"""

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from farpipe.core.errors import RunError
from farpipe.core.simulate import simulate
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.step import Schedule
from farpipe.engine.executor.optimizer import learning_rate
from farpipe.engine.executor.peers import Peers
from farpipe.engine.executor.step_plans import PlannedStep, num_tokens
from farpipe.engine.figures.metrics import (
    METRICS_NAME,
    STEP_PLAN_NAME,
    SUMMARY_NAME,
    TIMELINE_NAME,
    MetricsFile,
    Summary,
    is_logged,
    log_line,
    num_skipped_steps,
    read_metrics,
    summarise,
)
from farpipe.engine.figures.sinks import open_sinks
from farpipe.engine.figures.step_report import (
    Assembler,
    Came,
    LinkLog,
    StepReport,
    is_recorded,
    latest_replica,
    record_every,
    step_metrics,
)
from farpipe.engine.run_spec import RunSpec
from farpipe.planning.cost.flops import causal_share, step_flops
from farpipe.planning.workload import StepPlan

BOX: Final = "step reports"
OFFSETS_LAST_S: Final = 5.0
"""Clock offsets are estimated again after this long: clocks of different machines drift by tens of ppm."""
MAX_KEPT: Final = 200
MAX_KEPT_BYTES: Final = 64 << 20
"""Timelines kept to choose the median step from, and what they may take; of more steps, a random part is kept."""
_POLL_S: Final = 0.01


class Recorder:
    """Rank 0's end: give it every report with `collect`, and ask for the result with `finish`."""

    def __init__(
        self,
        run: RunSpec,
        run_dir: Path,
        peers: Peers,
        first_step: int = 0,
        on_timeline: Callable[[int, Timeline], None] | None = None,
    ) -> None:
        """`first_step`: where this attempt begins; what is recorded of earlier steps stays.

        `on_timeline` gets the Timeline of every recorded step (see `record_every`), with the messages of all replicas
        where they are staggered, in the recorder's thread, as soon as the reports are there: the next step is then
        still going on.
        """
        self._run, self._dir, self._peers, self._first_step = run, run_dir, peers, first_step
        self._writer = _Writer(run, run_dir, peers, first_step, on_timeline)
        self._poll_s = None if on_timeline is None else _POLL_S
        self._collecting = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._num_collected = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def collect(self) -> None:
        """Take what reports have arrived. Raises what went wrong in writing earlier ones."""
        self._expect_no_error()
        self._take_in()

    def _take_in(self) -> None:
        with self._collecting:
            for report in self._peers.poll(BOX):
                self._queue.put(report)
                self._num_collected += 1  # last: who waits for all of them ends the queue then

    def order_from(self, step: int, schedule: Schedule) -> None:
        """Take note of the order in which ranks work from `step` on, before that step's reports are collected."""
        assembler = Assembler(self._run.with_plan(schedule=schedule))
        self._writer.eras.append(_Era(step, (assembler,)))

    def plan_from(self, step: int, planned: PlannedStep) -> None:
        """Take note of the plan of `step`, which has chunks of its own, and every replica others."""
        self._writer.eras.append(_era_of(self._run, step, planned))

    def warn(self, warnings: list[str]) -> None:
        """Put something that went wrong, and that the run survives, into the line of the next step."""
        for warning in warnings:
            self._writer.warnings.put(warning)

    def mirrored(self, newest: dict[str, int]) -> None:
        """Put the newest checkpoint that each site holds in full into the lines from now on."""
        self._writer.mirrored = newest

    def note(self, step: int, facts: dict[str, object], came: Sequence[Came]) -> None:
        """Put further fields into the line of `step`, and what came of other sites into its Timeline, before its
        reports are collected."""
        self._writer.notes[step] = facts
        self._writer.came[step] = came

    @property
    def problems(self) -> list[str]:
        """Damage in the lines of earlier attempts, in words."""
        return self._writer.file.problems

    def is_recorded(self, num_steps: int) -> bool:
        """True if the lines of all steps before `num_steps` are on the disk."""
        self.collect()
        if self._writer.num_steps < num_steps:
            return False
        self._writer.file.sync()
        return True

    def finish(self, num_steps: int) -> Summary:
        """Wait for the reports of all steps before `num_steps`; write ``timeline.json`` and ``summary.json``."""
        self.drain(num_steps)
        return self._writer.write_results()

    def drain(self, num_steps: int) -> None:
        """Wait for the reports of all steps before `num_steps`, and write their lines; outages don't count."""
        deadline_s, paused_s = time.monotonic() + self._run.transport.timeout_s, self._peers.paused_s()
        num_reports = (num_steps - self._first_step) * self._run.num_processes
        self.collect()
        while self._num_collected < num_reports:
            if time.monotonic() > deadline_s + self._peers.paused_s() - paused_s:
                missing = num_reports - self._num_collected
                raise RunError(f"waited {self._run.transport.timeout_s:g} s for {missing} reports on steps")
            time.sleep(_POLL_S)
            self.collect()
        self.close()
        self._expect_no_error()

    def _expect_no_error(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write what has been collected and end the thread; a second call does nothing."""
        self._queue.put(None)
        self._thread.join()
        self._writer.close()

    def _write_all(self) -> None:
        try:
            while (item := self._next()) is not None:
                self._writer.add(*item)
        except BaseException as error:
            self._error = error

    def _next(self) -> tuple[int, bytes] | None:
        """The next report; where somebody waits for Timelines, also from between two calls of `collect`."""
        while True:
            try:
                return self._queue.get(timeout=self._poll_s)
            except queue.Empty:
                self._take_in()


class _Era(NamedTuple):
    """Steps from `first_step` on, and what puts their reports together."""

    first_step: int
    assemblers: tuple[Assembler, ...]
    """One for all replicas, or of every replica its own where each has chunks of its own."""
    planned: PlannedStep | None = None


def _of_chunks(planned: PlannedStep, reports: Sequence[StepReport], late: int) -> dict[str, object]:
    """Additions of a step on chunks to its line: its prediction, the bytes that stages held, which replica was late."""
    facts, held = dict(planned.facts), [report.held_bytes for report in reports]
    facts |= {"measured_held_bytes": held} if any(held) else {}
    facts |= {"late_replica": late} if len(planned.plans) > 1 else {}
    return {"predicted_makespan_s": facts["predicted_makespan_s"], "chunks": facts}


def _lit_makespans_s(run: RunSpec) -> list[float]:
    """Predicted times of the steps over light paths, in their turn; none for a run over links."""
    if run.light_paths is None:
        return []
    steps = [run.light_paths.problem(run.plan.problem, step) for step in range(len(run.light_paths.steps))]
    return [simulate(step, run.plan.schedule, checked=True).makespan_s for step in steps]


def _era_of(run: RunSpec, step: int, planned: PlannedStep) -> _Era:
    found = []
    for replica, plan in enumerate(planned.plans):
        only = None if len(planned.plans) == 1 else replica
        of_step = run.with_plan(problem=run.problem_of(plan), schedule=plan.schedule)
        found.append(Assembler(of_step, only))
    return _Era(step, tuple(found), planned)


class _Kept(NamedTuple):
    """The Timeline of a step, and the step's plan where each has chunks of its own."""

    step: int
    timeline: Timeline
    plan: StepPlan | None


class _Sample:
    """A random sample of the run's Timelines, from which that of the median step is chosen.

    Reservoir sampling (Vitter 1985, algorithm R): every step has the same chance, however many there are.
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._num_seen, self._draw = 0, random.Random(0)

    def add(self, found: _Kept) -> None:
        """Keep it, or not; for it another one goes where there are MAX_KEPT, or MAX_KEPT_BYTES."""
        self._num_seen += 1
        num_bytes = found.timeline.actions.nbytes + found.timeline.messages.nbytes
        room = max(1, min(MAX_KEPT, MAX_KEPT_BYTES // num_bytes))
        if len(self._kept) >= room:
            place = self._draw.randrange(self._num_seen)
            if place >= room:
                return
            del self._kept[place]
        self._kept.append(found)

    @property
    def median(self) -> _Kept | None:
        """The one with the median makespan, the lower of two.

        With local steps, of those in which something of other sites was merged: they show its slack, and what they
        wait for it is not part of the makespan.
        """
        chosen = [kept for kept in self._kept if kept.timeline.outer] or self._kept
        by_makespan = sorted(chosen, key=lambda kept: kept.timeline.makespan_s)
        return by_makespan[(len(by_makespan) - 1) // 2] if by_makespan else None


class _ClockOffsets:
    """Offsets of all ranks' clocks, estimated again where the last estimate is older than OFFSETS_LAST_S."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._until_s = peers, 0.0
        self._newest: list[int] = []

    def __call__(self) -> list[int]:
        if time.monotonic() > self._until_s:
            self._newest = self._peers.clock_offsets()
            self._until_s = time.monotonic() + OFFSETS_LAST_S
        return self._newest


class _Writer:
    """Writer of the recorder's files, on the recorder's thread."""

    def __init__(
        self,
        run: RunSpec,
        run_dir: Path,
        peers: Peers,
        first_step: int,
        on_timeline: Callable[[int, Timeline], None] | None,
    ) -> None:
        self._run, self._dir, self._on_timeline = run, run_dir, on_timeline
        self.eras = deque([_Era(0, (Assembler(run),))])
        """Eras of the steps that are not written yet."""
        self.warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.mirrored: dict[str, int] = {}
        self.notes: dict[int, dict[str, object]] = {}
        """Further fields of lines to come, by step."""
        self.came: dict[int, Sequence[Came]] = {}
        """Messages of other sites for Timelines to come, by step."""
        self.num_steps = first_step
        """Steps whose lines are written, those of earlier attempts included."""
        with ExitStack() as opened:
            self._sinks = opened.enter_context(open_sinks(run.metrics, run_dir, first_step))
            self.file = opened.enter_context(
                closing(MetricsFile(run_dir / METRICS_NAME, first_step, is_whole=run.resume is None))
            )
            self._open = opened.pop_all()
        self._incomplete: dict[int, dict[int, StepReport]] = {}
        self._sample, self._offsets = _Sample(), _ClockOffsets(peers)
        self._record_every = record_every(run)
        self._first_sampled = first_step + num_skipped_steps(run.num_steps - first_step)
        self._log, self._lit_s = LinkLog(run), _lit_makespans_s(run)

    def add(self, rank: int, payload: bytes) -> None:
        """One rank's report on a step; when it is the last one, the step is written."""
        report = StepReport.unpack(payload)
        reports = self._incomplete.setdefault(report.step, {})
        reports[rank] = report
        if len(reports) == self._run.num_processes:
            del self._incomplete[report.step]
            self._write(report.step, [reports[rank] for rank in range(self._run.num_processes)])

    def _write(self, step: int, reports: list[StepReport]) -> None:
        era = self._era(step)
        plans = () if era.planned is None else era.planned.plans
        late = latest_replica(self._run.places, reports, self._offsets()) if len(era.assemblers) > 1 else 0
        timeline = self._timeline(step, era.assemblers[late], reports)
        tokens = num_tokens(plans) if plans else self._run.tokens_per_step
        figures = step_metrics(timeline, reports, tokens, self._run.plan.tensor)
        if self._run.num_twins > 1 and not self._run.group_costs and timeline is not None:
            figures["twin_skew_s"] = era.assemblers[late].twin_skew_s(reports, self._offsets())
        self._put(figures | self._further(reports, era.planned, late))
        self.num_steps = step + 1
        if timeline is not None and step >= self._first_sampled:
            self._sample.add(_Kept(step, timeline, plans[late] if plans else None))

    def _era(self, step: int) -> _Era:
        while len(self.eras) > 1 and self.eras[1].first_step <= step:
            self.eras.popleft()
        return self.eras[0]

    def _timeline(self, step: int, assembler: Assembler, reports: list[StepReport]) -> Timeline | None:
        """The step's Timeline, which `on_timeline` hears of; None for a step that is not recorded."""
        came = self.came.pop(step, ())
        if not is_recorded(step, self._record_every, self._run.num_steps):
            return None
        if self._on_timeline is not None:
            self._on_timeline(step, assembler.timeline(reports, self._offsets(), all_replicas=True))
        return assembler.timeline(reports, self._offsets(), came=came)

    def _put(self, line: dict[str, Any]) -> None:
        """Write the line of a step to the file, to the sinks and, where one is due, to the log."""
        self.file.write(line)
        for sink in self._sinks:
            sink.write(line)
        if is_logged(line["step"], self._run.num_steps, self._run.metrics.log_every_steps):
            with suppress(OSError):  # the log's disk may be full
                print(log_line(line, self._run.num_steps), flush=True)

    def _further(self, reports: Sequence[StepReport], planned: PlannedStep | None, late: int) -> dict[str, object]:
        """Fields of a line beside the measurements of the step."""
        report, link_events = reports[0], self._log.of_step(reports)
        training, step_s = self._run.plan.training, (report.end_ns - report.begin_ns) * 1e-9
        warnings = [self.warnings.get() for _ in range(self.warnings.qsize())]
        return {
            "learning_rate": learning_rate(training, report.step, self._run.num_steps) if training else None,
            **({"model_flops_utilisation": None} if planned else utilisation(self._run, step_s)),
            "attempt": self.file.attempt,
            **({"predicted_makespan_s": self._lit_s[report.step % len(self._lit_s)]} if self._lit_s else {}),
            **(_of_chunks(planned, reports, late) if planned else {}),
            **({"mirrored": self.mirrored} if self.mirrored else {}),
            **({"warnings": warnings} if warnings else {}),
            **({"link_events": link_events} if link_events else {}),
            **self.notes.pop(report.step, {}),
        }

    def write_results(self) -> Summary:
        """``timeline.json`` of the median step, then ``summary.json``, whose presence says that the run is whole."""
        kept = self._sample.median
        summary = summarise(read_metrics(self._dir / METRICS_NAME), None if kept is None else kept.step)
        if kept is not None:
            kept.timeline.save(self._dir / TIMELINE_NAME)
            if kept.plan is not None:
                kept.plan.save(self._dir / STEP_PLAN_NAME)
        summary.save(self._dir / SUMMARY_NAME)
        return summary

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._open.close()


def utilisation(run: RunSpec, step_s: float) -> dict[str, float | None]:
    """The part of the devices' peak that the model's own FLOPs take, with attention in full and with its causal half;
    None for a rehearsal, an unknown peak, or a module of the user's own, whose FLOPs are not counted.

    Recomputed activations don't count: what the model needs, divided by what the devices could do (PaLM, arXiv
    2204.02311, appendix B).
    """
    peak, model, training = run.peak_flops_per_s, run.plan.model, run.plan.training
    if peak is None or model is None or model.module is not None or training is None or run.device == "sleep":
        return {"model_flops_utilisation": None}
    length = training.sequence_length
    full = step_flops(model, length, training.global_batch) / step_s / peak
    return {"model_flops_utilisation": full, "causal_utilisation": full * causal_share(model, length)}
