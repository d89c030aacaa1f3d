"""Works, which torch's calls return: they end when a thread of farpipe is done, with torch's kinds of errors."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from farpipe.core.errors import FarpipeError, InfeasibleError, InputError, UsageError
from farpipe.engine.transport.outbox import Loan

Result = TypeVar("Result")


def as_torch(error: BaseException) -> BaseException:
    """An error as torch.distributed raises it: ValueError for what the caller did wrong, DistBackendError else."""
    if isinstance(error, InputError | UsageError | InfeasibleError):
        return ValueError(str(error))
    return dist.DistBackendError(str(error)) if isinstance(error, FarpipeError) else error


@contextmanager
def raised_as_torch() -> Iterator[None]:
    """Inside, errors of farpipe are raised as torch's."""
    try:
        yield
    except FarpipeError as error:
        raise as_torch(error) from None


class FutureWork(dist.distributed_c10d.Work):
    """A send, a receive or a collective that is under way.

    `check` raises where the group has broken in the meantime. `settle` does what is left to do in the waiting thread,
    on its current stream.
    """

    def __init__(
        self,
        future: "Future[Any]",
        what: str,
        check: Callable[[str], None],
        results: Sequence[Tensor] = (),
        settle: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__()
        self._future, self._what, self._check, self._results = future, what, check, list(results)
        self._settle = settle

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done, `timeout` at most; DistBackendError with the reason where it can't be."""
        limit_s = timeout.total_seconds() if timeout else 0.0
        try:
            result = self._future.result(limit_s if limit_s > 0 else None)
            self._check(self._what)
        except TimeoutError:
            raise dist.DistBackendError(f"{self._what}: not done within {limit_s:g} s") from None
        except FarpipeError as error:
            raise as_torch(error) from None
        settle, self._settle = self._settle, None
        if settle is not None:
            with raised_as_torch():
                settle(result)
        return True

    def is_completed(self) -> bool:
        """True if `wait` would not wait."""
        return self._future.done()

    def is_success(self) -> bool:
        """True if it is done, and well."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> Any:
        """The error that ended it, None without one."""
        error = self._future.exception() if self._future.done() else None
        return None if error is None else as_torch(error)

    def result(self) -> list[Tensor]:
        """The tensors that were filled."""
        self.wait()
        return self._results

    def get_future(self) -> Any:
        """The work as a future of torch, whose value is the tensors that were filled."""
        promise: Any = torch.futures.Future()

        def tell(done: "Future[Any]") -> None:
            error = done.exception()
            if error is not None:
                promise.set_exception(as_torch(error))
                return
            if self._settle is not None:
                self.wait()
            promise.set_result(self._results)

        self._future.add_done_callback(tell)
        return promise


class LentWork(FutureWork):
    """A send from the caller's memory, which is the caller's again after `wait`; the future has the transport's loan.

    The caller may not write to it before, as with gloo and NCCL.
    """

    def __init__(self, future: "Future[Loan]", what: str, check: Callable[[str], None]) -> None:
        super().__init__(future, what, check, settle=lambda loan: loan.end())

    def is_completed(self) -> bool:
        """True if `wait` would not wait: all of it has arrived, or it has failed."""
        done = self._future.done()
        return done and (self._settle is None or self._future.exception() is not None or self._future.result().is_over)

    def is_success(self) -> bool:
        """True if it is done, and well."""
        return self.is_completed() and super().is_success()


def finished(result: Result) -> "Future[Result]":
    """A future of what is done already."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future
