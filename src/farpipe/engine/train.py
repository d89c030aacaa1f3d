"""One rank's part of a run: agree with the others, go on where the run stopped, then step after step, then the results.

Between two steps: evaluation, the snapshot of a checkpoint, leaving when SIGTERM asked for it.
"""

import dataclasses
import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from farpipe.core.errors import DivergedError, InputError, RunError, RunInterruptedError, RunStoppedError
from farpipe.core.step import Schedule
from farpipe.core.units import counted
from farpipe.engine.agreement import agree, leaving_together
from farpipe.engine.checkpoint.checkpointer import END_S, Checkpointer
from farpipe.engine.checkpoint.resume import resume
from farpipe.engine.executor.commands import CHECKPOINT, STOP, Commands, MakeWatch, OrderSwitch, Watch
from farpipe.engine.executor.evaluation import evaluation_of
from farpipe.engine.executor.executor import Executor
from farpipe.engine.executor.free_steps import FreeSteps
from farpipe.engine.executor.messengers import pipeline_of, staging_of
from farpipe.engine.executor.peers import Peers, TensorPeers
from farpipe.engine.executor.rehearsal import SleepTrainer
from farpipe.engine.executor.step_plans import MakePlanner, StepPlans
from farpipe.engine.executor.wire_types import NarrowMessenger
from farpipe.engine.executor.work import Trainer, Work
from farpipe.engine.figures.memory import forget_peak, memory_figures
from farpipe.engine.figures.metrics import SUMMARY_NAME, Summary
from farpipe.engine.figures.recorder import BOX, Recorder
from farpipe.engine.figures.step_report import StepReport, is_recorded, record_every
from farpipe.engine.links import LinkShape
from farpipe.engine.lock import lock_of_rank_0
from farpipe.engine.outer.elastic_trainer import ElasticTrainer, MakeElastic
from farpipe.engine.outer.local_trainer import LocalTrainer
from farpipe.engine.outgoing import Log, Outgoing, outgoing_of
from farpipe.engine.publish.publisher import MakePublisher
from farpipe.engine.replicas.replicas import has_barrier
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.stages.chunk_work import ChunkSleeper, ChunkTrainer
from farpipe.engine.versions import untested, versions_of
from farpipe.planning.workload import StepPlan


def train_rank(
    run: RunSpec,
    peers: Peers,
    run_dir: Path,
    *,
    stop: Callable[[], bool] = lambda: False,
    make_watch: MakeWatch | None = None,
    make_planner: MakePlanner | None = None,
    make_publisher: MakePublisher | None = None,
    make_elastic: MakeElastic | None = None,
) -> Summary | None:
    """Run the steps of `run` that are not done yet; rank 0 writes the figures to `run_dir` and gets the summary.

    `stop` is asked in every step; when it says so on any rank, all ranks write a checkpoint and leave with
    RunStoppedError. `make_watch` makes what re-plans on rank 0, where the run asks for that, `make_planner` what plans
    the steps of a training on chunks, `make_publisher` what publishes weights, where the run asks for that, and
    `make_elastic` the work of one site of an elastic run. InputError when the ranks disagree on what to run or no
    checkpoint can be read, InfeasibleError when a step's sequences can't fit, DivergedError when the training diverges,
    RunError when a rank is lost or the figures can't be written.
    """
    if (run_dir / SUMMARY_NAME).exists():
        raise InputError(f"{run_dir}: this run has come to its end; choose another directory")
    with ExitStack() as stack:
        if peers.rank == 0:
            stack.enter_context(lock_of_rank_0(run_dir))
        # All ranks compare versions, files and digests before any reads a checkpoint: a rank that differs would
        # otherwise train another model for hours before a loss looks odd. The weights that training begins with may
        # differ where a checkpoint replaces them, so they are judged only after `resume` has found none.
        elastic = None if make_elastic is None else make_elastic(run, peers)
        work = elastic or make_work(run, peers)
        agreed = agree(run, work, peers)
        start = resume(run, work.state(), peers, run_dir, agreed)
        if start.folder is None and agreed.different_weights:
            with leaving_together(peers):
                raise InputError(agreed.different_weights)
        work.restore(start.step)
        if elastic is not None:
            stack.callback(elastic.membership.close)
            start = dataclasses.replace(start, step=elastic.begin(start.step))
        make_watch = None if run.replan is None else make_watch
        recorder, watch = _records(run, peers, run_dir, start.step, make_watch, stack)
        recorded = None if recorder is None else recorder.is_recorded
        log = Log(recorder)
        outgoing = outgoing_of(run, peers, run_dir, start.step, work.state, log, make_publisher, stack)
        checkpointer = Checkpointer(
            run,
            work.state,
            peers,
            run.checkpoints(run_dir, peers.rank),
            agreed.batches_sha256,
            agreed.facts,
            recorded,
            outgoing.still_needed,
        )
        plans = _step_plans(run, work, peers, run_dir, make_planner, stack)
        order_switch = None if make_watch is None else OrderSwitch(peers, watch)
        loop = _Loop(run, work, peers, checkpointer, log, stop, order_switch, plans, outgoing)
        damaged = [] if recorder is None or elastic is not None else recorder.problems  # its lines may have gaps
        skipped = [f"skipped a checkpoint: {problem}" for problem in start.skipped]
        log.warn([*skipped, *start.changed, *damaged, *untested(versions_of(run))])
        try:
            outgoing.start()
            loop.run(start.step)
        except DivergedError as error:
            raise DivergedError(f"{error}; {loop.end_diverged()}") from None
        finally:
            checkpointer.end(min(END_S, run.transport.timeout_s / 2))
            outgoing.stop()
        summary = None if recorder is None else recorder.finish(run.num_steps)
        peers.exchange("end", b"", waiting_for="rank 0 to write the results")  # it asks the others' clocks until then
        return summary


def make_work(run: RunSpec, peers: Peers) -> Work:
    """Return this rank's work: training, or a rehearsal; on chunks if the run says what they cost."""
    if run.chunk_costs is not None:
        return ChunkSleeper(run, peers) if run.device == "sleep" else ChunkTrainer(run, peers)
    return SleepTrainer(run, peers) if run.device == "sleep" else Trainer(run, peers)


def _records(
    run: RunSpec, peers: Peers, run_dir: Path, first_step: int, make_watch: MakeWatch | None, stack: ExitStack
) -> tuple[Recorder | None, Watch | None]:
    """Rank 0's recorder, and what re-plans where the run asks for that; on other ranks neither."""
    if peers.rank != 0:
        return None, None
    watch = None if make_watch is None else stack.enter_context(closing(make_watch(run, run_dir, first_step)))
    on_timeline = None if watch is None else watch.on_timeline
    return stack.enter_context(closing(Recorder(run, run_dir, peers, first_step, on_timeline))), watch


def _step_plans(
    run: RunSpec, work: Work, peers: Peers, run_dir: Path, make_planner: MakePlanner | None, stack: ExitStack
) -> StepPlans | None:
    """This rank's part in planning every step; None where all steps are alike."""
    if not isinstance(work, ChunkTrainer | ChunkSleeper):
        return None
    assert make_planner is not None, "a run on chunks needs a planner"
    planner = stack.enter_context(closing(make_planner(run, run_dir))) if peers.rank == 0 else None
    return StepPlans(run, peers, work.lengths, planner)


class _Loop:
    """The steps of one rank."""

    def __init__(
        self,
        run: RunSpec,
        work: Work,
        peers: Peers,
        checkpointer: Checkpointer,
        log: Log,
        stop: Callable[[], bool],
        order_switch: OrderSwitch | None,
        plans: StepPlans | None,
        outgoing: Outgoing,
    ) -> None:
        self._order_switch, self._plans, self._outgoing = order_switch, plans, outgoing
        self._run, self._work, self._peers = run, work, peers
        self._checkpointer, self._log, self._recorder = checkpointer, log, log.recorder
        self._staging = staging_of(run, peers, work) if run.device == "cuda" else None
        self._pipeline = pipeline_of(run, peers, self._staging)
        self._executor = self._executor_of(run.plan.schedule)
        self._evaluation = evaluation_of(run, work, peers, plans)
        minutes = run.plan.training.checkpoint_every_minutes if run.plan.training and checkpointer.keep else 0
        self._commands = Commands(peers, stop, every_s=60 * minutes)
        self._free = None if has_barrier(run) else FreeSteps(work, peers, self._before_exchange, self._on_norm)
        self._held: StepReport | None = None
        """Report of the newest step, without a barrier, until its norm is known."""
        self._elastic = work if isinstance(work, ElasticTrainer | LocalTrainer) else None
        if self._elastic is not None:
            self._elastic.run_actions = lambda tag: self._executor.run(tag)

    def _executor_of(self, schedule: Schedule) -> Executor:
        work = self._work
        return Executor(schedule, work.stages, self._pipeline, work.stage_done, work.stage_begins, self._staging)

    def run(self, first_step: int) -> None:
        """All steps from `first_step` on, and the last checkpoint."""
        self._num_done, self._record_every = first_step, record_every(self._run)
        if self._order_switch is not None:
            self._switch_to(first_step, self._order_switch.first())
        if self._plans is not None:
            self._take_plan(first_step, self._plans.first(first_step))
        begin_ns = self._peers.clock.now_ns()
        for step in range(first_step, self._run.num_steps):
            self._change_links(step)
            report, commands = self._run_step(step, begin_ns)
            evaluation_loss = self._evaluate(step)
            self._checkpoint(step + 1, commands)
            self._outgoing.after_step(step, commands, (report.end_ns - report.begin_ns) * 1e-9)
            begin_ns = self._peers.clock.now_ns()
            self._post(report, evaluation_loss=evaluation_loss, pause_ns=begin_ns - report.end_ns)
            if step == first_step + 1:
                forget_peak(self._run.device)
            if self._elastic is not None and step + 1 < self._run.num_steps:
                self._elastic.after_step(step + 1)
            if STOP in commands and step + 1 < self._run.num_steps:
                self._leave(step + 1)
        self._log.warn(self._checkpointer.finish())
        self._expect_last_checkpoint()
        self._outgoing.finish()
        if isinstance(self._pipeline, NarrowMessenger) and self._pipeline.rounding.num_messages:
            self._log.warn([f"wire type {self._pipeline.wire_type}: {self._pipeline.rounding}"])

    def _run_step(self, step: int, begin_ns: int) -> tuple[StepReport, set[bytes]]:
        """The report of `step`, and commands that act after it."""
        if self._free is None:
            report = run_step(step, begin_ns, self._work, self._executor, self._peers, self._before_exchange)
            commands = self._commands.after_exchange(step)
        else:
            waits = self._is_checkpoint_due(step + 1) or self._is_evaluation_due(step)
            report, commands = self._free.run(step, begin_ns, self._executor, waits=waits)
        self._prepare(step + 1, commands)
        return report, commands

    def _on_norm(self, step: int, norm: float) -> set[bytes]:
        """The commands that came with the norm of `step`, whose report goes out now if it was held."""
        held, self._held = self._held, None
        if held is not None:
            self._send(dataclasses.replace(held, grad_norm=norm))
        return self._commands.after_exchange(step)

    def _change_links(self, step: int) -> None:
        """Emulated links change as the run says; over real ones this rank sends at the rate that they have then."""
        changes = [change for change in self._run.link_changes if change.step == step]
        if not changes or not isinstance(self._peers, TensorPeers):
            return
        rank, transport = self._peers.rank, self._peers.transport
        for change in changes:
            if not self._run.emulate_links:
                for peer in self._run.peers_over(change.link, rank):
                    transport.expect_rate(peer, self._run.rate_of(change.bandwidth_bytes_per_s))
            elif rank == 0:
                rate = self._run.rate_of(change.bandwidth_bytes_per_s)
                transport.change_link(change.link, LinkShape(change.latency_s, rate))

    def _before_exchange(self, step: int) -> None:
        """Send each rank what it needs after the exchange that ends `step`."""
        self._commands.before_exchange(step)
        if self._order_switch is not None:
            self._order_switch.before_exchange(step, self._commands.ask)
        if self._plans is not None:
            self._plans.before_exchange(step)
        self._outgoing.before_exchange(step, self._commands.ask)

    def _prepare(self, step: int, commands: set[bytes]) -> None:
        """Give `step` its order and its plan; `commands`: those that act after the step before."""
        if self._order_switch is not None:
            self._switch_to(step, self._order_switch.after_exchange(step - 1, commands))
        if self._plans is not None and step < self._run.num_steps:
            self._take_plan(step, self._plans.after_exchange(step))

    def _switch_to(self, step: int, schedule: Schedule | None) -> None:
        """Take another order of actions from `step` on, as all ranks do; None: keep the present one."""
        if schedule is None:
            return
        self._executor = self._executor_of(schedule)
        if self._recorder is not None:
            self._recorder.order_from(step, schedule)

    def _take_plan(self, step: int, plan: StepPlan) -> None:
        """Take the plan of `step`, if every step has chunks and an order of its own."""
        assert isinstance(self._work, ChunkTrainer | ChunkSleeper)
        self._work.take_plan(plan)
        self._executor = self._executor_of(plan.schedule)
        if self._recorder is not None and self._plans is not None and self._plans.latest is not None:
            self._recorder.plan_from(step, self._plans.latest)
            self._log.warn([self._plans.latest.warning] if self._plans.latest.warning else [])

    def _post(self, report: StepReport, **further: float) -> None:
        events = tuple(event.to_data() for event in self._peers.take_events())
        held = {"held_bytes": self._work.held_bytes} if isinstance(self._work, ChunkTrainer) else {}
        unknown = {"cpu_share": math.nan} if self._run.device != "cpu" else {}
        figures = memory_figures(self._run.device) | held | unknown
        report = dataclasses.replace(report, **further, **figures, link_events=events)  # type: ignore[arg-type]
        if not is_recorded(report.step, self._record_every, self._run.num_steps):
            report = report.without_record()
        if self._elastic is not None and self._recorder is not None:
            self._recorder.note(report.step, *self._elastic.membership.facts())
        if self._free is not None and self._free.is_open:
            self._held = report
        else:
            self._send(report)

    def _send(self, report: StepReport) -> None:
        """Send a step's report to rank 0, which takes in what has come."""
        self._peers.post(0, BOX, report.pack())
        if self._recorder is not None:
            self._recorder.collect()
        self._num_done = report.step + 1

    def _evaluate(self, step: int) -> float:
        if self._evaluation is None or not self._is_evaluation_due(step):
            return float("nan")
        return self._evaluation.run(step)

    def _is_evaluation_due(self, step: int) -> bool:
        every = self._run.plan.training.evaluate_every_steps if self._run.plan.training else 0
        return step + 1 == self._run.num_steps or bool(every and (step + 1) % every == 0)

    def _checkpoint(self, num_steps: int, commands: set[bytes]) -> None:
        """Take a checkpoint if one is due after `num_steps` steps; look after those that are being written."""
        if self._checkpointer.keep and (self._is_checkpoint_due(num_steps) or commands & {CHECKPOINT, STOP}):
            self._checkpointer.save(num_steps)
            self._commands.checkpoint_begun()
        self._log.warn(problems := self._checkpointer.collect())
        if problems and self._checkpointer.never_succeeds:  # better now than after days that would be lost
            raise RunError(f"{problems[-1]}; it is not the first that failed, and {self._newest}")

    def _is_checkpoint_due(self, num_steps: int) -> bool:
        """True if a checkpoint is due after `num_steps` steps whatever is asked for."""
        every = self._run.plan.training.checkpoint_every_steps if self._run.plan.training else 0
        return num_steps == self._run.num_steps or bool(every and num_steps % every == 0)

    def _expect_last_checkpoint(self) -> None:
        """RunError where the checkpoint of all steps, which the training was for, has failed."""
        num_steps = self._run.num_steps
        if (failure := self._checkpointer.failure(num_steps)) is None:
            return
        if self._recorder is not None:
            self._recorder.drain(num_steps)
        raise RunError(
            f"all {num_steps} steps are done, but their checkpoint can't be written: {failure}; "
            f"{self._newest}; make room and start the run again"
        )

    def _leave(self, num_steps: int) -> None:
        """Leave after the checkpoint that was asked for."""
        self._log.warn(self._checkpointer.finish())
        self._record_all()
        after = f"stopped by SIGTERM or SIGHUP after {counted(num_steps, 'step')}"
        if not self._checkpointer.keep:
            raise RunInterruptedError(f"{after}; there is no checkpoint to go on from")
        if failure := self._checkpointer.failure(num_steps):
            raise RunError(f"{after}, but {failure}; {self._newest}")
        raise RunStoppedError(f"{after}; {self._checkpointer.newest} is written, start the run again to go on")

    def end_diverged(self) -> str:
        """Sentence on what is left behind by a training that has diverged, before all ranks leave.

        What goes wrong in here, as on a full disk, is reported but not raised: to start the run again would not help.
        """
        try:
            self._log.warn(self._checkpointer.finish())
            self._record_all()
        except (RunError, OSError) as error:
            self._peers.abort(str(error))  # the others may be waiting for this rank
            return f"{error}; {self._newest}"
        return self._newest

    @property
    def _newest(self) -> str:
        """The newest good checkpoint, in words."""
        newest = self._checkpointer.newest
        return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint"

    def _record_all(self) -> None:
        """Write the figures of every step, for which rank 0 asks all clocks, before all ranks leave early."""
        if self._recorder is not None:
            self._recorder.drain(self._num_done)
        self._peers.exchange("stop", b"", waiting_for="rank 0 to write the figures of the last step")


def run_step(
    step: int,
    begin_ns: int,
    work: Work,
    executor: Executor,
    peers: Peers,
    before_exchange: Callable[[int], None] = lambda step: None,
) -> StepReport:
    """One optimizer step on this rank, which began at `begin_ns`.

    ``before_exchange(step)`` comes after the last action, ahead of the exchange that ends the step on all ranks.
    """
    work.begin_step(step)
    performed = executor.perform(step)
    before_exchange(step)
    grad_norm, sync = work.finish_step(step)
    events = executor.timed(performed)  # only now: a GPU has ended its actions, since their norm is known
    end_ns, sent = peers.clock.now_ns(), work.link_bytes
    share = events.cpu_share
    return StepReport(step, begin_ns, end_ns, work.loss, grad_norm, events, sync, cpu_share=share, link_bytes=sent)
