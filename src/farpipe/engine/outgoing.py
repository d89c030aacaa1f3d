"""What leaves a training beside its steps: checkpoints for other sites, weights for subscribers, lines of its log."""

import sys
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final

from farpipe.engine.checkpoint.files import Piece
from farpipe.engine.checkpoint.mirror import Mirror
from farpipe.engine.executor.peers import Peers
from farpipe.engine.figures.metrics import mirrored_text
from farpipe.engine.figures.recorder import Recorder
from farpipe.engine.publish.publisher import MakePublisher, Publisher
from farpipe.engine.run_spec import RunSpec

NOTHING_TRAVELS: Final = "training.mirror: every site writes whole checkpoints by itself, so nothing has to travel"


class Log:
    """Rank 0's log and the warnings among its metrics; on other ranks nothing."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder

    def warn(self, warnings: list[str]) -> None:
        """Report what went wrong though the run goes on: in rank 0's log and in the metrics."""
        if self.recorder is None or not warnings:
            return
        self.say([f"warning: {warning}" for warning in warnings])
        self.recorder.warn(warnings)

    def say(self, lines: list[str]) -> None:
        """Print lines to rank 0's log."""
        for line in lines if self.recorder is not None else ():
            with suppress(OSError):  # the log's disk may be full
                print(line, file=sys.stderr, flush=True)


class Outgoing:
    """One rank's mirror and publisher, where the run has them; all ranks make theirs at once."""

    def __init__(self, peers: Peers, log: Log, mirror: Mirror | None, publisher: Publisher | None) -> None:
        self._peers, self._log, self._mirror, self._publisher = peers, log, mirror, publisher

    def still_needed(self) -> Set[int]:
        """Steps of checkpoints that are kept though newer ones are whole."""
        return frozenset() if self._mirror is None else self._mirror.still_needed()

    def start(self) -> None:
        """Begin, before the first step."""
        if self._mirror is not None:
            self._log.say([NOTHING_TRAVELS] if self._mirror.nothing_travels else [])
            self._mirror.start()

    def before_exchange(self, step: int, ask: Callable[[int, bytes], None]) -> None:
        """Ask for what is due after `step`, ahead of the exchange that ends it."""
        if self._publisher is not None:
            self._publisher.before_exchange(step, ask)

    def after_step(self, step: int, commands: set[bytes], step_s: float) -> None:
        """Take what `commands` ask for after `step`, which took so long; the weights are still those of its end."""
        if self._publisher is not None:
            self._publisher.after_exchange(step, commands, step_s)
        if self._mirror is not None:
            self._mirror.rates.step_took(step_s)
            if self._log.recorder is not None:
                newest, problems = self._mirror.news()
                self._log.recorder.mirrored(newest)
                self._log.warn(problems)

    def finish(self) -> None:
        """The last checkpoint and version go out before the run ends, and no rank leaves while others send to it."""
        if self._publisher is not None:
            self._publisher.finish()
        if self._mirror is None:
            return
        self._mirror.finish()
        self._peers.exchange("mirrored", b"", waiting_for="the others to have the last checkpoint")
        if self._log.recorder is not None:
            newest, problems = self._mirror.news()
            self._log.warn(problems)
            self._log.say([mirrored_text(newest)] if newest else [])

    def stop(self) -> None:
        """End what is under way."""
        if self._mirror is not None:
            self._mirror.stop()


def outgoing_of(
    run: RunSpec,
    peers: Peers,
    run_dir: Path,
    start_step: int,
    state: Callable[[], Sequence[Piece]],
    log: Log,
    make_publisher: MakePublisher | None,
    stack: ExitStack,
) -> Outgoing:
    """This rank's part; a rehearsal publishes nothing. `stack` closes it."""
    mirror = Mirror(run, peers, run_dir, start_step) if run.is_mirrored else None
    publisher = None
    if make_publisher is not None and run.publish is not None and run.device != "sleep":
        publisher = stack.enter_context(closing(make_publisher(run, peers, state, run_dir)))
    return Outgoing(peers, log, mirror, publisher)
