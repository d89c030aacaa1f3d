"""Work beside the main thread: one piece after the other, in the order in which they were handed over."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundThread:
    """A daemon thread that is there while there is work; an executor's thread would keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running = False

    def start(self, work: Callable[[], Result]) -> Future[Result]:
        """Hand it over; the future has its result, or what it raises."""
        future: Future[Result] = Future()
        with self._lock:
            self._waiting.append((work, future))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while (task := self._next()) is not None:
            work, future = task
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        with self._lock:
            self._running = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None
