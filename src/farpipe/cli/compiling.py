"""One line on stderr when kernels are compiled, which the first commands after an installation wait for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from farpipe.cli.output import log

TOLD: Final = (
    "compiling kernels, once after an installation: half a minute to a minute of CPU in all; they are then kept in "
    "numba's cache (NUMBA_CACHE_DIR)"
)


@contextmanager
def compilation_told() -> Iterator[None]:
    """Line on stderr at the first kernel that the block compiles; one that numba's cache has is not compiled."""
    from numba.core import event

    class FirstCompilation(event.Listener):
        told = False

        def on_start(self, event: object) -> None:
            if not self.told:
                log(TOLD)
            self.told = True

        def on_end(self, event: object) -> None:
            pass

    with event.install_listener("numba:compile", FirstCompilation()):
        yield
