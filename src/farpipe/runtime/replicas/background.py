"""Work beside the main thread: one piece after the other, in the order in which they were handed over."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Task(Generic[Result]):
    """A piece of work with its result to come."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it; what goes wrong is kept for `wait`."""
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    @property
    def is_done(self) -> bool:
        """True if `wait` returns at once."""
        return self._done.is_set()

    def wait(self) -> Result:
        """The result, or what the work raised; waits as long as the work does, whose own waits have limits."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class BackgroundThread:
    """A thread that is there while there is work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Task[object]] = deque()
        self._running = False

    def start(self, work: Callable[[], Result]) -> Task[Result]:
        """Hand it over."""
        task = Task(work)
        with self._lock:
            self._waiting.append(task)  # type: ignore[arg-type]
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return task

    def _run(self) -> None:
        while (task := self._next()) is not None:
            task.run()

    def _next(self) -> Task[object] | None:
        with self._lock:
            self._running = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None
