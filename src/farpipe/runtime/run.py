"""Run a RunSpec on this machine: start the ranks, follow their progress, hand back the summary. Needs no torch."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from farpipe.errors import InputError
from farpipe.runtime.launch import launch
from farpipe.runtime.metrics import METRICS_NAME, RUN_NAME, SUMMARY_NAME, TIMELINE_NAME, Summary
from farpipe.runtime.run_spec import RunSpec

LOGS_NAME: Final = "logs"


def run(
    spec: RunSpec,
    run_dir: Path | str,
    *,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    master_port: int = 0,
) -> Summary:
    """Run `spec` with one process per rank; results go to `run_dir`, what the ranks print to its ``logs``.

    `on_step` gets every line of ``metrics.jsonl`` soon after it was written. Raises InputError when `run_dir` has
    results already, the port is taken or the data don't do, RunError when a rank is lost or the disk is full; then
    nothing is left running, and without a ``summary.json`` nobody takes what there is for a whole run.
    """
    run_dir = Path(run_dir)
    refuse_results(run_dir)
    spec.save(run_dir / RUN_NAME)
    follower = _Follower(run_dir / METRICS_NAME, on_step)
    command = [sys.executable, "-m", "farpipe.runtime.rank_main", str(run_dir)]
    launch(
        lambda _: command,
        spec.num_ranks,
        log_dir=run_dir / LOGS_NAME,
        master_port=master_port,
        on_tick=follower.read,
    )
    follower.read()
    return Summary.load(run_dir / SUMMARY_NAME)


def refuse_results(run_dir: Path) -> None:
    """InputError when `run_dir` has results of a run, whole or broken off."""
    for name in (METRICS_NAME, SUMMARY_NAME, TIMELINE_NAME):
        if (run_dir / name).exists():
            raise InputError(
                f"{run_dir}: has the {name} of an earlier run; choose another directory or remove this one"
            )


class _Follower:
    """Reads ``metrics.jsonl`` as it grows."""

    def __init__(self, path: Path, on_step: Callable[[dict[str, Any]], None] | None) -> None:
        self._path, self._on_step, self._position = path, on_step, 0

    def read(self) -> None:
        """Pass on the lines that have been completed since the last call."""
        if self._on_step is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            self._on_step(json.loads(line))
