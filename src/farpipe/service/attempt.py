"""One attempt on this machine: ``python -m farpipe.service.attempt FOLDER`` plans it, trains, and writes how it ended.

It holds the folder's lock, which its training inherits, so that who looks sees whether anything of it lives. It leaves
at a checkpoint when it is told to, and when nobody has wanted it for `ORPHAN_AFTER_S`: a site that is cut off from its
service does not go on for ever.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farpipe.core.errors import FarpipeError
from farpipe.core.strict import write_text
from farpipe.planning import PlanDocument
from farpipe.service.folder import (
    BEGUN_NAME,
    LOCK_NAME,
    LOG_NAME,
    PLAN_NAME,
    POLL_S,
    PROCESS_NAME,
    RUN_NAME,
    STOP_NAME,
    WANTED_NAME,
    begin_of,
    begins,
    stop_time,
    write_end,
)
from farpipe.service.order import ORDER_NAME, Order

ORPHAN_AFTER_S: Final = 900.0
LAST_WORDS: Final = 2000
"""Bytes of the log that are read for the reason of an end."""


@dataclass
class Training:
    """The training's processes, and when they were told to leave."""

    child: "subprocess.Popen[bytes]"
    told_s: float | None = None

    def leave(self) -> None:
        """Tell it to write a checkpoint and leave, once."""
        if self.told_s is None:
            self.told_s = time.monotonic()
            self.child.send_signal(signal.SIGTERM)

    def kill_after(self, leave_s: float) -> None:
        """Kill all its processes if it was told to leave longer ago."""
        if self.told_s is not None and time.monotonic() > self.told_s + leave_s:
            os.killpg(self.child.pid, signal.SIGKILL)


def main(folder: Path) -> None:
    """Run the attempt whose order lies in `folder`, unless it has begun before."""
    lock = begins(folder / LOCK_NAME, folder / BEGUN_NAME)
    if lock is None:
        return
    try:
        order = Order.load(folder / ORDER_NAME)
        code, why = (
            train(folder, order, lock) if stop_time(folder / STOP_NAME) is None else (75, "stopped before it began")
        )
    except FarpipeError as error:
        code, why = error.exit_code, f"{error}"
    write_end(folder, code, why)


def train(folder: Path, order: Order, lock: int) -> tuple[int, str]:
    """Exit code of the training, and its last words if that is not 0."""
    placed = order.plan()
    PlanDocument(plan=placed.plan).save(folder / PLAN_NAME)
    argv = [sys.executable, "-m", "farpipe", "train", str(folder / PLAN_NAME), "--run-dir", str(folder / RUN_NAME)]
    argv += ["--steps", str(order.num_steps), *(["--resume", order.resume] if order.resume else [])]
    with (folder / LOG_NAME).open("ab") as log:
        if placed.warning:
            log.write(f"{placed.warning}\n".encode())
            log.flush()
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(lock,)
        )
    write_text(folder / PROCESS_NAME, f"{child.pid} {begin_of(child.pid)}\n")
    training, leave_s = Training(child), 60.0
    while child.poll() is None:
        if (told := stop_time(folder / STOP_NAME)) is not None or is_orphan(folder):
            leave_s = leave_s if told is None else told
            training.leave()
        training.kill_after(leave_s)
        time.sleep(POLL_S)
    return child.returncode, last_words(folder) if child.returncode else ""


def is_orphan(folder: Path) -> bool:
    """True if nobody has wanted the attempt for `ORPHAN_AFTER_S`."""
    return time.time() > (folder / WANTED_NAME).stat().st_mtime + ORPHAN_AFTER_S


def last_words(folder: Path) -> str:
    """The end of the log, from its last line that names an error on."""
    data = (folder / LOG_NAME).read_bytes()[-LAST_WORDS:]
    lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
    errors = [place for place, line in enumerate(lines) if "error" in line.lower()]
    return "\n".join(lines[errors[-1] :] if errors else lines[-3:])


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
