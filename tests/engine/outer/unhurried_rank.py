"""A rank that takes its time while another site is away: ``python unhurried_rank.py RUN_DIR ...``.

A step after the first twenty lasts PAUSE_S longer until there is a file RUN_DIR/back. So a site that starts again finds
the others at work however slow the machine is, and has its processors for itself meanwhile.
"""

import sys
import time
from pathlib import Path

import typer

from farpipe.engine.launch import rank_main
from farpipe.engine.outer.local_trainer import LocalTrainer

PAUSE_S = 2.0
FIRST_STEPS = 20


def begin_step(trainer, step, begin=LocalTrainer.begin_step):
    """Wait, and begin the step."""
    until_s = time.monotonic() + PAUSE_S * (step >= FIRST_STEPS)
    while time.monotonic() < until_s and not (Path(sys.argv[1]) / "back").exists():
        time.sleep(0.01)
    begin(trainer, step)


if __name__ == "__main__":
    LocalTrainer.begin_step = begin_step
    typer.run(rank_main.main)
