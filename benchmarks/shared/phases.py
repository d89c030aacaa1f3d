"""A rank that waits in a named phase of a step until something has befallen it: ``python phases.py RUN_DIR ...``.

Production code knows nothing of it: calls are replaced here. Two bytes in ``RUN_DIR/phases/SITE-RANK``, which both
sides map: the state (armed, reached), and the phase that is meant. FARPIPE_SKEWED_SITE names a site whose processes run
in a time namespace of their own, an hour ahead, with wall clocks an hour behind; a step begins FARPIPE_PACE_S after the
one before, or later.
"""

import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = ("forward", "backward", "weight gradients", "exchange", "norm", "update")
"""Of a step: F, I and W of the order's actions, then the sum over sites, the norm of all ranks, and AdamW."""
ARMED, REACHED = 1, 2
HELD_S = 5.0
"""Longest time for which a rank is held, where nothing happens to it."""
SKEWED_VARIABLE = "FARPIPE_SKEWED_SITE"
INSIDE_VARIABLE = "FARPIPE_IN_SKEWED_NAMESPACE"
PACE_VARIABLE = "FARPIPE_PACE_S"
SKEW_S = 3600
_POLL_S = 0.001


class Ambush:
    """One rank's two bytes, as either side sees them."""

    def __init__(self, run_dir: Path, site: str, rank: int) -> None:
        path = run_dir / "phases" / f"{site}-{rank}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(2))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 2)

    def lay(self, phase: int, limit_s: float) -> bool:
        """Wait until the rank is in the phase; False if it does not come there."""
        self._bytes[1], self._bytes[0] = phase, ARMED
        deadline_s = time.monotonic() + limit_s
        while self._bytes[0] != REACHED and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        if found := self._bytes[0] == REACHED:
            return found
        self.release()
        return False

    def release(self) -> None:
        """Let the rank go on."""
        self._bytes[0] = 0

    def enter(self, phase: int) -> None:
        """In the rank: wait here if this phase is meant."""
        if self._bytes[0] != ARMED or self._bytes[1] != phase:
            return
        self._bytes[0] = REACHED
        deadline_s = time.monotonic() + HELD_S
        while self._bytes[0] == REACHED and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)


def keep_pace(trainer: Any, pace_s: float) -> None:
    """Let its steps begin `pace_s` apart, or more."""
    begin_step, next_s = trainer.begin_step, 0.0

    def paced(self: Any, step: int) -> None:
        nonlocal next_s
        time.sleep(max(0.0, next_s - time.monotonic()))
        next_s = time.monotonic() + pace_s
        begin_step(self, step)

    trainer.begin_step = paced


def main() -> None:
    site = os.environ["FARPIPE_SITE"]
    if os.environ.get(SKEWED_VARIABLE) == site:
        if INSIDE_VARIABLE not in os.environ:
            os.environ[INSIDE_VARIABLE] = "yes"
            os.execvp("unshare", ["unshare", "--time", "--monotonic", str(SKEW_S), sys.executable, *sys.argv])
        wall = time.time  # a time namespace has no wall clock of its own
        time.time = lambda: wall() - SKEW_S
    import typer

    from farpipe.engine.executor import work
    from farpipe.engine.executor.optimizer import Optimizer
    from farpipe.engine.launch import rank_main
    from farpipe.engine.outer import replica_sum
    from farpipe.engine.outer.elastic_trainer import ElasticTrainer
    from farpipe.engine.stages.stage import TorchStage

    ambush = Ambush(Path(sys.argv[1]), site, int(os.environ["RANK"]))

    def held_in(owner: Any, name: str, phase: str) -> None:
        original, number = getattr(owner, name), PHASES.index(phase)

        def held(*arguments: Any, **options: Any) -> Any:
            ambush.enter(number)
            return original(*arguments, **options)

        setattr(owner, name, held)

    places: list[tuple[Any, Callable[..., Any], str]] = [
        (TorchStage, TorchStage.forward, "forward"),
        (TorchStage, TorchStage.input_grad, "backward"),
        (TorchStage, TorchStage.weight_grad, "weight gradients"),
        (replica_sum, replica_sum.fill_piece, "exchange"),
        (work, work.global_norm, "norm"),
        (Optimizer, Optimizer.update, "update"),
    ]
    for owner, function, phase in places:
        held_in(owner, function.__name__, phase)
    if pace_s := float(os.environ.get(PACE_VARIABLE, "0")):
        keep_pace(ElasticTrainer, pace_s)
    typer.run(rank_main.main)


if __name__ == "__main__":
    main()
