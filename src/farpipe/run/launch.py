"""Start all ranks of a run on this machine and wait for their end, or for a signal to end them."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from farpipe.emulate import Namespace
from farpipe.errors import RunError
from farpipe.run.local_launcher import LocalLauncher


def launch(
    argv_for_rank: Callable[[int], Sequence[str]],
    num_processes: int,
    *,
    log_dir: Path | None,
    env: Mapping[str, str] | None = None,
    master_port: int = 0,
    namespaces: Sequence[Namespace] | None = None,
    on_tick: Callable[[], None] | None = None,
    tick_s: float = 0.2,
    leave_s: float | None = None,
) -> list[Any]:
    """Run `num_processes` processes, `argv_for_rank(rank)` each, until all have ended well; the results they leave.

    What they print goes to ``rank-N.log`` in `log_dir`, or with None to memory, for error messages. `env` is added to
    the environment. `master_port` 0: any that is free. `namespaces`: where each rank runs; None: on this machine's
    loopback. `on_tick` is called every `tick_s` seconds meanwhile, for progress. Every rank gets its share of the cores
    as OMP_NUM_THREADS unless that is set.

    When a rank fails, the others are given a moment, then SIGTERM, then SIGKILL; the error is that of the rank that
    failed first, not of those that failed because of it: InputError or InfeasibleError if it was one or the exit code
    says so, otherwise RunError. It has the rank's own words (see reports.py) or the end of its log. Ctrl-C and, in the
    main thread, SIGTERM end all ranks and come out as KeyboardInterrupt. With `leave_s` the first SIGTERM is passed on
    to the ranks, which then have so long to end by themselves.
    """
    ranks = LocalLauncher(
        argv_for_rank, num_processes, log_dir=log_dir, env=env, master_port=master_port, namespaces=namespaces
    )
    with _sigterm(interrupts=leave_s is None) as asked_s:
        try:
            ranks.start()
            while not ranks.poll(tick_s):
                if asked_s and leave_s is not None:
                    ranks.ask_to_leave()
                    if time.monotonic() > asked_s[0] + leave_s:
                        raise RunError(f"the ranks did not leave within {leave_s:g} s of SIGTERM")
                if on_tick:
                    on_tick()
            return ranks.results()
        finally:
            ranks.stop()


@contextmanager
def _sigterm(*, interrupts: bool) -> Iterator[list[float]]:
    """Treat SIGTERM in the main thread as Ctrl-C, so that the ranks end in the same orderly manner.

    Unless the first one `interrupts`, it only puts the time (monotonic, s) into what is given out.
    """
    asked_s: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupts or asked_s:
            raise KeyboardInterrupt
        asked_s.append(time.monotonic())

    try:
        before = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not the main thread
        yield asked_s
        return
    try:
        yield asked_s
    finally:
        signal.signal(signal.SIGTERM, before)
