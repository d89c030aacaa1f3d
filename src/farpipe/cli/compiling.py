"""Compilation of kernels, for which the first commands wait: announced, and shared with a process."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from time import monotonic
from typing import Any, Final

from farpipe.cli.output import log

TOLD: Final = (
    "compiling kernels, once after an installation: half a minute of CPU on two cores; they are then kept in numba's "
    "cache (NUMBA_CACHE_DIR)"
)
NOT_KEPT: Final = (
    "kernels can't be kept, so each command compiles them: point NUMBA_CACHE_DIR to a folder that has room"
)
AHEAD: Final = (sys.executable, "-m", "farpipe.planning.search.compile_ahead")
MODULES_AHEAD: Final = ("list_kernel", "player_kernel", "greedy_kernel", "local_kernel")
"""Modules whose kernels that process compiles."""
LIMIT_S: Final = 120.0
"""Longest wait for that process in seconds, counted from its start: it takes 17 s of CPU."""


@contextmanager
def compilation_announced() -> Iterator[None]:
    """Line on stderr at the first kernel that the block compiles; one that numba's cache has is not compiled.

    Kernels that the block needs later are compiled by another process meanwhile, which ends by itself; where the block
    is sooner, it waits for them.
    """
    from numba.core import event

    from farpipe.core.step import jit

    class FirstCompilation(event.Listener):
        announced = jit.ships

        def on_start(self, event: object) -> None:
            if not self.announced:
                log(TOLD)
                if not jit.not_kept:
                    jit.compiled_elsewhere = _compiled_ahead()
            self.announced = True

        def on_end(self, event: object) -> None:
            pass

    first = FirstCompilation()
    with event.install_listener("numba:compile", first):
        yield
    if jit.not_kept and first.announced:
        log(f"{NOT_KEPT} ({jit.not_kept})")


@cache
def _compiled_ahead() -> Callable[[Callable[..., Any]], bool]:
    """Start the process that compiles kernels of the orders, once; the result says of a kernel whether to wait."""
    process = subprocess.Popen(AHEAD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until_s = monotonic() + LIMIT_S

    def is_coming(kernel: Callable[..., Any]) -> bool:
        compiles = kernel.__module__.rpartition(".")[2] in MODULES_AHEAD
        return compiles and process.poll() is None and monotonic() < until_s

    return is_coming
