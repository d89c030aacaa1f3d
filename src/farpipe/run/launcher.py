"""Launchers, which start the processes of a run on a machine, see how they fare and end them."""

from typing import Protocol


class Launcher(Protocol):
    """Local processes, torchrun, and what else may start a run; nothing that it has started outlives it."""

    def start(self) -> None:
        """Start all processes. RunError when that can't be done; then none is left."""

    def poll(self, limit_s: float = 0.0) -> bool:
        """Wait at most `limit_s` for news; True when all processes have ended well.

        When one has failed, the others are ended and its error is raised.
        """

    def stop(self, leave_s: float = 0.0) -> None:
        """SIGTERM, and after `leave_s` SIGKILL; when it returns nothing is left. A second call does nothing."""
