"""What leaves a training beside its steps: checkpoints for other sites, weights for subscribers, lines of its log."""

import sys
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from farpipe.engine.checkpoint.copies import Copies
from farpipe.engine.checkpoint.files import Piece
from farpipe.engine.executor.peers import Peers
from farpipe.engine.figures.metrics import mirrored_text
from farpipe.engine.figures.recorder import Recorder
from farpipe.engine.publish.publisher import MakePublisher, Publisher
from farpipe.engine.run_spec import RunSpec


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
    """One rank's copies and publisher, where the run has them; all ranks make theirs at once."""

    def __init__(self, log: Log, copies: Copies, publisher: Publisher | None) -> None:
        self._log, self._copies, self._publisher = log, copies, publisher

    def still_needed(self) -> Set[int]:
        """Steps of checkpoints that are kept though newer ones are whole."""
        return self._copies.still_needed()

    def start(self) -> None:
        """Begin, before the first step."""
        self._log.say(self._copies.start())

    def before_exchange(self, step: int, ask: Callable[[int, bytes], None]) -> None:
        """Ask for what is due after `step`, ahead of the exchange that ends it."""
        if self._publisher is not None:
            self._publisher.before_exchange(step, ask)

    def after_step(self, step: int, commands: set[bytes], step_s: float) -> None:
        """Take what `commands` ask for after `step`, which took so long; the weights are still those of its end."""
        if self._publisher is not None:
            self._publisher.after_exchange(step, commands, step_s)
        self._copies.step_took(step_s)
        self._tell()

    def _tell(self) -> dict[str, int]:
        """The newest checkpoint that is whole at each site and in the bucket, which rank 0's recorder hears of."""
        if self._log.recorder is None:
            return {}
        newest, problems = self._copies.news()
        self._log.recorder.mirrored(newest)
        self._log.warn(problems)
        return newest

    def finish(self) -> None:
        """The last checkpoint and version go out before the run ends, and no rank leaves while others send to it."""
        if self._publisher is not None:
            self._publisher.finish()
        self._copies.finish()
        newest = self._tell()
        self._log.say([mirrored_text(newest)] if newest else [])

    def stop(self) -> None:
        """End what is under way."""
        self._copies.stop()


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
    publisher = None
    if make_publisher is not None and run.publish is not None and run.device != "sleep":
        publisher = stack.enter_context(closing(make_publisher(run, peers, state, run_dir)))
    return Outgoing(log, Copies(run, peers, run_dir, start_step), publisher)
