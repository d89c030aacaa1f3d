"""One attempt on this machine: ``python -m farpipe.service.attempt FOLDER`` plans it, trains, and writes how it ended.

It holds the folder's lock, which its training inherits, so that who looks sees whether anything of it lives. It leaves
at a checkpoint when it is told to, and when nobody has wanted it for `ORPHAN_AFTER_S`: a site that is cut off from its
service does not go on for ever.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import FarpipeError
from farpipe.core.strict import parse_json, write_text
from farpipe.planning import PlanDocument
from farpipe.service.order import ORDER_NAME, Order

LOCK_NAME: Final = "lock"
BEGUN_NAME: Final = "begun"
"""Written once: a second start finds it and leaves."""
PROCESS_NAME: Final = "process"
"""Number of the training's process group, and when its first process began."""
STOP_NAME: Final = "stop"
"""Written by who wants the attempt to leave, with the seconds that it has for it."""
WANTED_NAME: Final = "wanted"
"""Touched by the service at every look."""
END_NAME: Final = "end.json"
LOG_NAME: Final = "log"
PLAN_NAME: Final = "plan.json"
RUN_NAME: Final = "run"
"""Directory of the run."""
ORPHAN_AFTER_S: Final = 900.0
POLL_S: Final = 0.2
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
    lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        take(lock)
        os.close(os.open(folder / BEGUN_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except (BlockingIOError, FileExistsError):
        return  # it is at work, or has been
    try:
        order = Order.load(folder / ORDER_NAME)
        code, why = train(folder, order, lock) if stop_asked(folder) is None else (75, "stopped before it began")
    except FarpipeError as error:
        code, why = error.exit_code, f"{error}"
    write_text(folder / END_NAME, json.dumps({"exit_code": code, "why": why}) + "\n")


def take(lock: int) -> None:
    """Take the lock; BlockingIOError if another attempt has it, and not only one that looks."""
    for _ in range(20):
        with suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(POLL_S / 4)
    raise BlockingIOError


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
        if (told := stop_asked(folder)) is not None or is_orphan(folder):
            leave_s = leave_s if told is None else told
            training.leave()
        training.kill_after(leave_s)
        time.sleep(POLL_S)
    return child.returncode, last_words(folder) if child.returncode else ""


def spawn(arguments: list[str], out: Path) -> None:
    """Start Python with `arguments`, as a process that outlives this one; what it prints goes to `out`."""
    with out.open("ab") as file:
        argv = ["setsid", "--fork", sys.executable, *arguments]
        subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=True)


def begin_of(pid: int) -> str:
    """Time at which a process began, on the machine's clock: numbers of processes are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "unknown"


def stop_asked(folder: Path) -> float | None:
    """Seconds in which the attempt is to leave; None: it may go on."""
    try:
        return float((folder / STOP_NAME).read_text() or "60")
    except FileNotFoundError:
        return None


def is_orphan(folder: Path) -> bool:
    """True if nobody has wanted the attempt for `ORPHAN_AFTER_S`."""
    return time.time() > (folder / WANTED_NAME).stat().st_mtime + ORPHAN_AFTER_S


def last_words(folder: Path) -> str:
    """The end of the log, from its last line that names an error on."""
    data = (folder / LOG_NAME).read_bytes()[-LAST_WORDS:]
    lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
    errors = [place for place, line in enumerate(lines) if "error" in line.lower()]
    return "\n".join(lines[errors[-1] :] if errors else lines[-3:])


def end_of(data: bytes, source: str) -> dict[str, Any]:
    """What `END_NAME` says; InputError where it is something else."""
    found: dict[str, Any] = parse_json(data.decode(), source)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
