"""Compilation of kernels, for which the first commands wait: announced, and shared with a process."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from farpipe.cli.output import log

TOLD: Final = (
    "compiling kernels, once after an installation: half a minute of CPU on two cores; they are then kept in numba's "
    "cache (NUMBA_CACHE_DIR)"
)
AHEAD: Final = (sys.executable, "-m", "farpipe.search.compile_ahead")


@contextmanager
def compilation_announced() -> Iterator[None]:
    """Line on stderr at the first kernel that the block compiles; one that numba's cache has is not compiled.

    Kernels that the block needs later are compiled by another process meanwhile; that process ends by itself.
    """
    from numba.core import event

    class FirstCompilation(event.Listener):
        announced = False

        def on_start(self, event: object) -> None:
            if not self.announced:
                log(TOLD)
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                threading.Thread(target=subprocess.run, args=[AHEAD], kwargs=quiet, daemon=True).start()
            self.announced = True

        def on_end(self, event: object) -> None:
            pass

    with event.install_listener("numba:compile", FirstCompilation()):
        yield
