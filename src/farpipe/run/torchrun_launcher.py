"""The torchrun agent of one machine as a Launcher: it and its ranks end with this process, and within stated times."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from farpipe.errors import RunError
from farpipe.processes import Guarded, ParentPipe

TORCHRUN: Final = (sys.executable, "-m", "torch.distributed.run")
TORCHRUN_LEAVE_S: Final = 60.0
"""Torchrun gives its ranks 30 s after SIGTERM; this is for it and them."""


class TorchrunLauncher:
    """Runs `argv` under torchrun, with `options` such as ``("--nnodes", "2")``; what it prints goes to `log`."""

    def __init__(self, argv: Sequence[str], options: Sequence[str], log: Path) -> None:
        self._argv, self._log = [*TORCHRUN, *options, *argv], log
        self._agent: Guarded | None = None
        self._parent_pipe: ParentPipe | None = None

    def start(self) -> None:
        """See Launcher."""
        self._parent_pipe = ParentPipe()
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as output:
                self._agent = Guarded.start(self._argv, self._parent_pipe, stdout=output, stderr=output)
        except OSError as error:
            self.stop()
            raise RunError(f"torchrun can't be started: {error}") from None

    def poll(self, limit_s: float = 0.0) -> bool:
        """See Launcher. RunError when the agent ends with another exit code than 0."""
        assert self._agent is not None
        if not self._agent.wait(limit_s):
            return False
        if self._agent.exit_code:
            raise RunError(f"torchrun ended with exit code {self._agent.exit_code} (log: {self._log})")
        return True

    def stop(self, leave_s: float = TORCHRUN_LEAVE_S) -> None:
        """See Launcher."""
        parent_pipe, self._parent_pipe = self._parent_pipe, None
        if parent_pipe is None:
            return
        try:
            if self._agent is not None:
                self._agent.stop(parent_pipe, leave_s)
        finally:
            parent_pipe.close()
