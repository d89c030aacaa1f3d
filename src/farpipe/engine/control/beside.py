"""The helper process of rank 0: ``python -m farpipe.engine.control.beside orders`` (or ``chunks``).

It reads one JSON object a line and writes its answers, one a line. The first line says how to answer, every later one
is a question. It ends when its input ends, and its guard ends it with the process that started it.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, Final, Literal

from farpipe.core.strict import parse_json
from farpipe.engine.processes import KILL_S, Guarded, ParentPipe, ignore_requests

Kind = Literal["orders", "chunks"]
# A search for orders improves a run that is going well without it, so it only takes idle cores. Ranks wait for the
# plan of their next chunks: that process yields to them while they compute, but not to other work.
LOWEST_PRIORITY: Final = 19
_KINDS: Final[dict[str, tuple[str, int]]] = {
    "orders": ("farpipe.engine.control.searcher", LOWEST_PRIORITY),
    "chunks": ("farpipe.engine.control.chunk_planner", 5),
}
"""Module whose `prepare` makes what answers, and the niceness of the process."""
Answering = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]
"""Yields the answers to one question, each as soon as it is known."""


def answers(prepare: Callable[[dict[str, Any]], Answering], lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The answers to all lines but the first, from which `prepare` makes what answers, with everything loaded."""
    bodies = (parse_json(line, "question") for line in lines)
    for head in bodies:
        answering = prepare(head)
        for question in bodies:
            yield from answering(question)


def main(kind: str) -> None:
    """Answer the process that started this one until it asks no more."""
    module, niceness = _KINDS[kind]
    os.nice(niceness)
    ignore_requests()  # they are for the run, which ends this process
    for answer in answers(import_module(module).prepare, sys.stdin):
        print(json.dumps(answer), flush=True)


class Beside:
    """One such process. It is started ahead of its first question, since loading takes longer than most answers."""

    def __init__(self, kind: Kind, head: str = "{}\n") -> None:
        """`head`: the first line, with its end."""
        self._kind, self._head = kind, head
        self._start()

    def _start(self) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._parent_pipe = ParentPipe()
        self.process = Guarded.start(
            [sys.executable, "-m", "farpipe.engine.control.beside", self._kind],
            self._parent_pipe,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        arguments = self.process, self._parent_pipe, self._lines
        self._reader = threading.Thread(target=_read, args=arguments, name=self._kind, daemon=True)
        self._reader.start()
        self.send(self._head)

    def restart(self) -> None:
        """End the process, whose answer is no longer wanted or which has died, and start another."""
        self.close()
        self._start()

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


if __name__ == "__main__":
    main(sys.argv[1])
