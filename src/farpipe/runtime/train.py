"""One rank's part of a run: agree with the others, then step after step, then the results."""

import hashlib
import json
from contextlib import closing, nullcontext
from pathlib import Path

from farpipe import __version__
from farpipe.errors import InputError
from farpipe.runtime.executor import Executor, message_row, message_table
from farpipe.runtime.metrics import Summary
from farpipe.runtime.peers import Peers
from farpipe.runtime.recorder import BOX, Recorder
from farpipe.runtime.run_spec import RunSpec
from farpipe.runtime.step_report import StepReport
from farpipe.runtime.work import Learning, Rehearsal, Work


def train_rank(run: RunSpec, peers: Peers, run_dir: Path) -> Summary | None:
    """Run all steps of `run` as rank ``peers.rank``; rank 0 writes the figures to `run_dir` and gets the summary.

    InputError when the ranks disagree on what to run, RunError when a rank is lost, the training diverges or the
    figures can't be written.
    """
    work: Work = Rehearsal(run, peers) if run.device == "sleep" else Learning(run, peers)
    agree(run, work, peers)
    executor = Executor(run.schedule, work.stages, peers, work.stage_done)
    with closing(Recorder(run, run_dir, peers)) if peers.rank == 0 else nullcontext() as recorder:
        begin_ns = peers.clock.now_ns()
        for step in range(run.num_steps):
            report = run_step(step, begin_ns, work, executor, peers)
            peers.post(0, BOX, report.pack())
            begin_ns = report.end_ns
            if recorder is not None:
                recorder.collect()
        summary = None if recorder is None else recorder.finish(run.num_steps)
        peers.exchange("end", b"", waiting_for="rank 0 to write the results")  # it asks the others' clocks until then
        return summary


def run_step(step: int, begin_ns: int, work: Work, executor: Executor, peers: Peers) -> StepReport:
    """One optimizer step on this rank, which began when the one before it ended, at `begin_ns`."""
    work.begin_step(step)
    events = executor.run(step)
    grad_norm, messages = work.finish_step(step)
    sync = message_table([message_row(message) for message in messages])
    return StepReport(step, begin_ns, peers.clock.now_ns(), work.loss, grad_norm, events, sync)


def agree(run: RunSpec, work: Work, peers: Peers) -> None:
    """Every rank tells what it is about to run; all of them see the same differences and stop."""
    mine = {
        "farpipe": __version__,
        "run": hashlib.sha256(run.to_json().encode()).hexdigest(),
        "data": work.data_digest.hex(),
    }
    answers = peers.exchange("start", json.dumps(mine).encode(), waiting_for="what the others are going to run")
    told = [json.loads(answer) for answer in answers]
    for key, what, remedy in _AGREEMENTS:
        first = next((rank for rank, answer in enumerate(told) if answer[key]), 0)
        other = next((r for r, answer in enumerate(told) if answer[key] and answer[key] != told[first][key]), None)
        if other is not None:
            raise InputError(f"ranks {first} and {other} have different {what}; {remedy}")


_AGREEMENTS = (
    ("farpipe", "versions of farpipe", "install the same one on every site"),
    ("run", "run.json files", "copy the run directory of one site to the others"),
    ("data", "training texts", "copy data.source to every site (for stdlib: the same version of Python)"),
)
