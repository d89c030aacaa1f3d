"""A process beside a run that reads questions and writes answers, a line each, and ends with whoever started it."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from farpipe.engine.processes import KILL_S, Guarded, ParentPipe, ignore_requests

LOWEST_PRIORITY: Final = 19
"""Niceness of a process that gets a core only where nobody else wants it."""
Answering = Callable[[Iterable[str]], Iterator[dict[str, Any]]]
"""Yields the answers to questions, each as soon as it is known; loads what it needs before it takes the first."""


def serve(answering: Answering, niceness: int) -> None:
    """Answer whoever started this process, as its main function, until no more questions come."""
    os.nice(niceness)
    ignore_requests()  # they are for the run, which ends this process
    for answer in answering(sys.stdin):
        print(json.dumps(answer), flush=True)


class Beside:
    """One such process: ``python -m MODULE``. It is started ahead, for to load it takes longer than most questions."""

    def __init__(self, module: str) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._parent_pipe = ParentPipe()
        self.process = Guarded.start(
            [sys.executable, "-m", module],
            self._parent_pipe,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        arguments = self.process, self._parent_pipe, self._lines
        self._reader = threading.Thread(target=_read, args=arguments, name=module, daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        """True if the process is gone."""
        return self.process.wait(0.0)

    def send(self, line: str) -> None:
        """Ask, with the end of the line; nothing happens where the process is gone, which `receive` reports."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def receive(self, wait_s: float = 0.0) -> str | None:
        """The next line that it has written; None where the process has ended. `queue.Empty` after `wait_s` seconds."""
        return self._lines.get(timeout=wait_s) if wait_s > 0 else self._lines.get_nowait()

    def kill(self) -> None:
        """End it at once; `receive` then says so."""
        self._parent_pipe.cut()

    def close(self) -> None:
        """End it; nothing of it is left."""
        self.process.stop(self._parent_pipe, leave_s=0.0)
        self._reader.join()
        self.process.close()
        self._parent_pipe.close()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # an unsent question
                if stream is not None:
                    stream.close()


def _read(process: Guarded, parent_pipe: ParentPipe, lines: "queue.SimpleQueue[str | None]") -> None:
    """Pass on what `process` writes; when it ends, that was all."""
    assert process.stdout is not None
    with contextlib.suppress(ValueError, OSError):
        for line in process.stdout:
            lines.put(line)
    parent_pipe.cut()
    process.wait(KILL_S)  # whoever learns of the end and starts another finds this one gone, not about to go
    lines.put(None)
