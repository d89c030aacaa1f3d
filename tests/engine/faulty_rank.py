"""A rank that is killed, or is slow, where FARPIPE_TEST_FAULT says: ``python faulty_rank.py RUN_DIR``.

The variable is a JSON list with one entry per attempt at the run: [victim, phase], or null for none; a victim that is
null is all ranks. The production code knows nothing of it: what has to break is replaced here, before it runs. When it
was killed (time.monotonic(), which is the same for all processes) is left in RUN_DIR/killed_s, and by a rank that is
bold the updates that it took back in RUN_DIR/again.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import typer

from farpipe.engine.checkpoint import checkpointer
from farpipe.engine.checkpoint.folders import CHECKPOINTS_NAME, whole_checkpoints
from farpipe.engine.executor.free_steps import FreeSteps
from farpipe.engine.executor.optimizer import Optimizer
from farpipe.engine.executor.work import Trainer
from farpipe.engine.launch import rank_main
from farpipe.engine.replicas.collectives import Line
from farpipe.engine.stages.stage import TorchStage
from farpipe.engine.transport.control_plane import ControlPlane

RANK, RUN_DIR = int(os.environ["RANK"]), Path(sys.argv[1])
CHECKPOINTS = RUN_DIR / CHECKPOINTS_NAME


def attempt():
    """The number of this attempt: every one leaves a mark."""
    marks = RUN_DIR / "attempts"
    marks.mkdir(exist_ok=True)
    number = sum(1 for mark in marks.iterdir() if mark.name.endswith(f"rank-{RANK}"))
    (marks / f"{number}-rank-{RANK}").touch()
    return number


def die(*_):
    """As the kernel's out-of-memory killer would end it."""
    (RUN_DIR / "killed_s").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def once_further(call):
    """`call`, but only when this attempt has brought a checkpoint of its own."""
    steps_before = whole_checkpoints(CHECKPOINTS)[:1]

    def guarded(*arguments):
        if whole_checkpoints(CHECKPOINTS)[:1] > steps_before:
            call(*arguments)

    return guarded


def before(owner, name, call):
    """Let `call` come before every call of ``owner.name``."""
    original = getattr(owner, name)

    def wrapped(*arguments, **options):
        call(*arguments)
        return original(*arguments, **options)

    setattr(owner, name, wrapped)


def half_write(folder, rank, *_):
    """Leave a checkpoint's file cut off by the end of the process."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f".rank-{rank}.safetensors.part").write_bytes(b"\0" * 1000)
    die()


def die_soon(*_):
    """In another thread, while the main one waits for the others."""
    threading.Timer(0.01, die).start()


def in_the_norm(call):
    """`call`, in the exchange that ends a step: this rank's part is on its way, that of the others is not taken."""

    def guarded(mesh, peer, name, *_):
        if name.startswith("norm"):
            call()

    return guarded


def break_in(phase):
    """Arrange for the fault."""
    if phase == "connect":
        before(rank_main, "connect", die_soon)
    elif phase == "forward":
        before(TorchStage, "forward", once_further(die))
    elif phase == "backward":
        before(TorchStage, "backward", once_further(die))
    elif phase == "reduce":
        before(Line, "receive", once_further(die))
    elif phase == "sync":
        before(ControlPlane, "_take_parts", in_the_norm(once_further(die)))
    elif phase == "optimizer":
        before(Optimizer, "update", once_further(die))
    elif phase == "checkpoint":
        before(checkpointer, "write_file", once_further(half_write))
    elif phase == "slow":
        before(TorchStage, "forward", lambda *_: time.sleep(0.003))
    elif phase == "bold":
        FreeSteps.__init__.__defaults__ = (1e9,)  # without a barrier: never wait, however large the last norm was
        before(Trainer, "take_back", lambda *_: (RUN_DIR / "again").open("a").write(f"{RANK}\n"))
    else:
        raise ValueError(phase)


faults = json.loads(os.environ["FARPIPE_TEST_FAULT"])
number = attempt()
fault = faults[number] if number < len(faults) else None
if fault is not None and fault[0] in (RANK, None):
    break_in(fault[1])
typer.run(rank_main.main)
