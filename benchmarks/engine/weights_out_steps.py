"""Steps with and without a subscriber, in one run of two emulated sites. Prints JSON.

    python -m benchmarks.engine.weights_out_steps [--steps 240]

A decoder is trained by a pipeline over 20 Mbit/s, 20 ms, which the activations fill for about half of each step. A
version is published every 5 steps. A subscriber at the second site, which shares the pipeline's link, is there for 20
steps, away for 20, and so on; each time it gets all weights first. Median and 90th percentile of the steps' times, and
the bytes that came.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

import farpipe.torch
from farpipe.core.errors import FarpipeError
from farpipe.core.schedule.library import order
from farpipe.core.spec import Data, Model, Training
from farpipe.core.spec.publish import PublishSettings
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.engine.launch.run import run
from farpipe.engine.publish.words import FILE_NAME
from farpipe.engine.run_spec import RunSpec

SITES: Final = ("zurich", "lugano")
MODEL: Final = Model(num_layers=4, hidden=96, num_heads=4, ffn_hidden=256, vocab_size=256)
LENGTH, SIZE, NUM_MICROBATCHES = 128, 4, 4
BLOCK: Final = 20
"""Steps for which the subscriber is there, and then away."""
SETTLE: Final = 2
"""Steps after a change that do not count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    num_steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        follower = Follower(run_dir)
        run(spec_of(num_steps), run_dir, on_step=follower.on_step)
        follower.leave()
    print(json.dumps({"steps": figures(follower.lines), "versions": follower.figures()}))


def spec_of(num_steps: int) -> RunSpec:
    size = SIZE * LENGTH * MODEL.hidden * 2
    hop = Hop(forward=Transfer(link="zurich>lugano", bytes=size), backward=Transfer(link="lugano>zurich", bytes=size))
    link = Link(latency_s=0.02, bandwidth_bytes_per_s=2.5e6)
    problem = Problem(
        num_microbatches=NUM_MICROBATCHES,
        ranks=(Rank(), Rank()),
        stages=tuple(Stage(rank=rank, forward_s=1, input_grad_s=1, weight_grad_s=1) for rank in (0, 1)),
        hops=(hop,),
        links={"zurich>lugano": link, "lugano>zurich": link},
    )
    training = Training(
        sequence_length=LENGTH, global_batch=SIZE * NUM_MICROBATCHES, microbatch_size=SIZE, learning_rate=1e-4
    )
    return RunSpec.bare(
        problem=problem,
        schedule=order("1f1b", problem),
        sites=SITES,
        num_steps=num_steps,
        model=MODEL,
        training=training.model_copy(update={"keep_checkpoints": 0}),
        data=Data(),
        partition=((0, 2), (2, 4)),
        publish=PublishSettings(every_steps=5),
    )


class Follower:
    """Comes and goes with the steps; what it gets."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._subscription: farpipe.torch.WeightsSubscription | None = None
        self.lines: list[dict[str, Any]] = []
        self.versions: list[farpipe.torch.Weights] = []

    def on_step(self, line: dict[str, Any]) -> None:
        """Take note of a step; come or go where a block of them begins."""
        self.lines.append(line)
        if (line["step"] + 1) % BLOCK:
            return
        if has_subscriber(line["step"] + 1) and (self._run_dir / FILE_NAME).exists():
            self._subscription = farpipe.torch.subscribe(self._run_dir, site="lugano", patience_s=20.0)
            threading.Thread(target=self._take, args=(self._subscription,), daemon=True).start()
        else:
            self.leave()

    def _take(self, subscription: "farpipe.torch.WeightsSubscription") -> None:
        with contextlib.suppress(FarpipeError):  # the training has ended
            for version in subscription:
                self.versions.append(version)

    def leave(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def figures(self) -> dict[str, Any]:
        whole = [one.wire_bytes for one in self.versions if one.num_changed is None]
        deltas = [one.wire_bytes for one in self.versions if one.num_changed is not None]
        return {
            "whole": len(whole),
            "bytes of a whole one": max(whole, default=0),
            "deltas": len(deltas),
            "bytes of a delta": round(statistics.mean(deltas)) if deltas else 0,
        }


def has_subscriber(step: int) -> bool:
    """True in every second block of steps."""
    return (step // BLOCK) % 2 == 1


def figures(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for there in (False, True):
        found = [
            line["step_s"]
            for line in lines[BLOCK:]
            if has_subscriber(line["step"]) == there and line["step"] % BLOCK >= SETTLE
        ]
        cpu = [
            line["cpu_share"]
            for line in lines[BLOCK:]
            if has_subscriber(line["step"]) == there and line.get("cpu_share") is not None
        ]
        rows.append(
            {
                "subscriber": "there" if there else "away",
                "steps": len(found),
                "median, s": round(statistics.median(found), 3),
                "nine of ten, s": round(statistics.quantiles(found, n=10)[-1], 3),
                "cpu share": round(statistics.mean(cpu), 2) if cpu else None,
            }
        )
    return rows


if __name__ == "__main__":
    main()
