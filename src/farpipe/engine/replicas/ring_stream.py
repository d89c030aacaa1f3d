"""A stream of a GPU's own for what replicas sum and gather, beside the actions.

On the default stream every piece of a ring would wait for all kernels that the actions have queued, and its thread with
it: 10 GB of gradients are 2,500 round trips between host and GPU. Here pieces are copied to page-locked memory while
earlier ones travel, and added on a stream that waits for the computing one only where a collective begins.
"""

from collections.abc import Callable
from typing import Any

import torch

from farpipe.engine.executor.peers import Peers
from farpipe.engine.executor.staging import Staging
from farpipe.engine.replicas.collectives import Line


class RingStream:
    """The stream of one process, and the messages of what runs on it."""

    def __init__(self, peers: Peers, cuda: Any = torch.cuda) -> None:
        """Made in the computing thread, when the process has its GPU. `cuda`: another one for tests."""
        self._cuda, self._stream = cuda, cuda.Stream()
        self._device = torch.device("cuda", cuda.current_device())
        self.messenger = Staging(peers, peers.abort, cuda)

    def after_actions(self, work: Callable[[Line], None]) -> Callable[[Line], None]:
        """`work` on this stream, for another thread: after all that the computing stream has to do by now."""
        ready = self._cuda.current_stream().record_event(self._cuda.Event())

        def run(line: Line) -> None:
            self._cuda.set_device(self._device)  # a new thread's is the machine's first
            with self._cuda.stream(self._stream):
                self._stream.wait_event(ready)
                work(line)

        return run

    def before_actions(self) -> None:
        """Have what is computed from now on wait for all that this stream has to do by now."""
        self._cuda.current_stream().wait_stream(self._stream)
