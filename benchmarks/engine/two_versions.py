"""CPU time of a training's steps in this checkout beside another one's, by turns. Prints JSON.

    git worktree add /tmp/other REVISION
    python -m benchmarks.engine.two_versions /tmp/other [--replicas] [--blocks 80]

Two ranks of a small decoder, without emulated links: a pipeline, or with --replicas one replica each. Both checkouts
train at the same time, but only one at a time works: after BLOCK steps it waits until the other has done as many. So
what else the machine does falls on both alike. `ratio`: this one by the other, the median of all pairs of blocks, with
the interval that holds the true median in 95 of 100 cases (by order statistics); of CPU time of both ranks, all
threads, and of wall-clock time.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 20
"""Steps of one turn."""
NUM_SKIPPED = 2
"""Blocks at the beginning that don't count."""
NAMES = ("this", "other")
NUM_RANKS = 2
_POLL_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--replicas", action="store_true")
    parser.add_argument("--blocks", type=int, default=80)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        trainings = [
            start(name, root, place, options.blocks, replicas=options.replicas)
            for name, root in zip(NAMES, (ROOT, options.other.resolve()), strict=True)
        ]
        try:
            take_turns(place, options.blocks, trainings)
        finally:
            for training in trainings:
                training.terminate()
        for training in trainings:
            training.wait()
        took = {name: [block_of(place, name, number) for number in range(options.blocks)] for name in NAMES}
    pairs = list(zip(took["this"], took["other"], strict=True))[NUM_SKIPPED:]
    figures = {
        what: {
            "this_ms_per_step": round(1e3 * median(this[column] for this, _ in pairs) / BLOCK, 3),
            "ratio": interval([this[column] / other[column] for this, other in pairs]),
        }
        for column, what in enumerate(("cpu", "wall"))
    }
    print(json.dumps({"replicas": options.replicas, "pairs": len(pairs), "steps_per_block": BLOCK} | figures))


def start(name: str, root: Path, place: Path, num_blocks: int, *, replicas: bool) -> "subprocess.Popen[bytes]":
    """The training of one checkout."""
    command = [sys.executable, __file__, "--train", name, str(place), str(num_blocks), str(int(replicas))]
    env = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=sys.stderr)


def take_turns(place: Path, num_blocks: int, trainings: "list[subprocess.Popen[bytes]]") -> None:
    """Let one of both go on, and then the other, each first in half of the pairs."""
    for number in range(num_blocks):
        for name in NAMES if number % 2 else NAMES[::-1]:
            (place / f"go-{name}-{number}").touch()
            while not all((place / f"{name}-{number}-{rank}").exists() for rank in range(NUM_RANKS)):
                if any(training.poll() for training in trainings):
                    raise SystemExit("a training has failed")
                time.sleep(_POLL_S)
    for name in NAMES:
        (place / f"go-{name}-{num_blocks}").touch()


def block_of(place: Path, name: str, number: int) -> tuple[float, float]:
    """CPU time of both ranks, and the longer one's wall-clock time, in seconds."""
    found = [json.loads((place / f"{name}-{number}-{rank}").read_text()) for rank in range(NUM_RANKS)]
    return sum(cpu for cpu, _ in found), max(wall for _, wall in found)


def interval(ratios: list[float]) -> dict[str, float]:
    """The median with its interval of 95 %: between the values whose places are 0.98 sqrt(n) from the middle."""
    ordered, half = sorted(ratios), 0.98 * math.sqrt(len(ratios))
    low, high = max(0, math.floor(len(ratios) / 2 - half)), min(len(ratios) - 1, math.ceil(len(ratios) / 2 + half))
    return {"median": round(median(ordered), 4), "low": round(ordered[low], 4), "high": round(ordered[high], 4)}


def train(name: str, place: Path, num_blocks: int, *, replicas: bool) -> None:
    """Run one checkout's training; only names that both have are used."""
    from farpipe.core.schedule.library import order
    from farpipe.core.spec import Data, Model, Training
    from farpipe.core.step import Hop, Problem, Rank, Stage
    from farpipe.engine.launch.run import run
    from farpipe.engine.run_spec import RunSpec

    num_stages = 1 if replicas else NUM_RANKS
    stages = tuple(Stage(rank=r, forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.01) for r in range(num_stages))
    problem = Problem(num_microbatches=4, ranks=(Rank(),) * num_stages, stages=stages, hops=(Hop(),) * (num_stages - 1))
    training = Training(
        sequence_length=32, global_batch=16, microbatch_size=2, precision="fp32", checkpoint_every_minutes=0, zero=0
    )
    sizes: dict[str, Any] = {"hidden": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden": 176, "vocab_size": 256}
    spec = RunSpec.bare(
        problem=problem,
        schedule=order("1f1b", problem),
        sites=("zurich",) * num_stages,
        replicas=(("zurich",), ("zurich",)) if replicas else (),
        model=Model(name="small", num_layers=2, **sizes),
        training=training.model_copy(update={"global_batch": 16 if replicas else 8}),
        data=Data(held_out=0.02),
        partition=((0, 2),) if replicas else ((0, 1), (1, 2)),
        num_steps=num_blocks * BLOCK + 1,
    )
    os.environ["TURNS"] = json.dumps([name, str(place)])
    run(spec, place / f"run-{name}", rank_program=(__file__, "--rank"))


def rank_main() -> None:
    """A rank that waits for its turn, and says what its block has taken."""
    import typer

    from farpipe.engine.executor.work import Trainer
    from farpipe.engine.launch import rank_main

    (name, place), rank = json.loads(os.environ["TURNS"]), os.environ["RANK"]
    begin_step, since = Trainer.begin_step, (0.0, 0.0)

    def in_turn(trainer: Any, step: int) -> None:
        nonlocal since
        number, place_in_block = divmod(step, BLOCK)
        if place_in_block == 0:
            if number:
                took = time.process_time() - since[0], time.perf_counter() - since[1]
                temporary = Path(place) / f"new-{name}-{rank}"
                temporary.write_text(json.dumps(took))
                temporary.rename(Path(place) / f"{name}-{number - 1}-{rank}")
            while not (Path(place) / f"go-{name}-{number}").exists():
                time.sleep(_POLL_S)
            since = time.process_time(), time.perf_counter()
        begin_step(trainer, step)

    Trainer.begin_step = in_turn  # type: ignore[method-assign]
    typer.run(rank_main.main)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), replicas=sys.argv[5] == "1")
    elif sys.argv[1:2] == ["--rank"]:
        del sys.argv[1]
        rank_main()
    else:
        main()
