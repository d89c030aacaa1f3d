"""Steps while checkpoints are mirrored, beside steps while they are not: two sites over an emulated link. Prints JSON.

    python -m benchmarks.engine.mirror [NUM_STEPS] [NUM_ROUNDS]
    python -m benchmarks.engine.mirror --cut

Two stages of a small decoder over 30 ms and 20 Mbit/s, which activations fill for a fourth of a step in each direction.
Each forward takes 60 ms and each backward 120 ms, of which it sleeps what it does not compute, so that a busy machine
counts for less. Rounds without and with `training.mirror` take turns. `mirroring` are steps that end while a
checkpoint is whole and not yet full at both sites; the first step after a checkpoint begins is among them.

With --cut both ranks are killed in the middle of a file instead, and the run is started again: equal or not.
"""

import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.shared.disturbed import is_rank, processes_of, signal_all

LATENCY_S, BANDWIDTH = 0.03, 2.5e6
F_S, B_S = 0.06, 0.12
EVERY, BATCH, MICROBATCH, LENGTH, HIDDEN = 5, 32, 4, 64, 128
SITES = ("zurich", "lugano")
CUT_STEPS, CUT_BYTES = 12, 300 << 10


def spec_of(text: Path, num_steps: int, *, mirror: bool) -> Any:
    """The run of both sites."""
    from farpipe.core.schedule.library import order
    from farpipe.core.spec import Data, Model, Training
    from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
    from farpipe.engine.run_spec import RunSpec

    size, ends = MICROBATCH * LENGTH * HIDDEN * 4, ("zurich>lugano", "lugano>zurich")
    link = Link(latency_s=LATENCY_S, bandwidth_bytes_per_s=BANDWIDTH)
    stages = tuple(Stage(rank=r, forward_s=F_S, input_grad_s=B_S / 2, weight_grad_s=B_S / 2) for r in range(2))
    hop = Hop(forward=Transfer(link=ends[0], bytes=size), backward=Transfer(link=ends[1], bytes=size))
    problem = Problem(
        num_microbatches=BATCH // MICROBATCH,
        ranks=(Rank(),) * 2,
        stages=stages,
        links=dict.fromkeys(ends, link),
        hops=(hop,),
    )
    training = Training(
        sequence_length=LENGTH,
        global_batch=BATCH,
        microbatch_size=MICROBATCH,
        precision="fp32",
        checkpoint_every_steps=EVERY,
        checkpoint_every_minutes=0,
        mirror=mirror,
    )
    model = Model(name="small", num_layers=4, hidden=HIDDEN, num_heads=4, ffn_hidden=352, vocab_size=256)
    return RunSpec.bare(
        problem=problem,
        schedule=order("1f1b", problem),
        sites=SITES,
        model=model,
        training=training,
        data=Data(source=str(text)),
        partition=((0, 2), (2, 4)),
        num_steps=num_steps,
    )


def rank_main() -> None:
    """One rank, whose actions take a fixed time."""
    import typer

    from farpipe.engine.launch import rank_main
    from farpipe.engine.stages.stage import TorchStage

    def taking(method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            until_s = time.monotonic() + seconds
            result = method(*arguments, **options)
            time.sleep(max(0.0, until_s - time.monotonic()))
            return result

        return timed

    TorchStage.forward = taking(TorchStage.forward, F_S)  # type: ignore[method-assign]
    TorchStage.backward = taking(TorchStage.backward, B_S)  # type: ignore[method-assign]
    typer.run(rank_main.main)


def steps_of(run_dir: Path) -> tuple[list[float], list[float]]:
    """Makespans of steps while nothing is mirrored, and while something is; the first two steps are left out."""
    quiet, busy = [], []
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for before, line in pairwise(lines[1:]):
        newest = line["step"] // EVERY * EVERY  # the checkpoint that was begun before this step
        is_full = min(before.get("mirrored", {}).get(site, 0) for site in SITES) >= newest
        (quiet if is_full else busy).append(line["makespan_s"])
    return quiet, busy


def main(num_steps: int, num_rounds: int) -> None:
    """Rounds without and with a mirror in turns."""
    from farpipe.engine.launch.run import run

    found: dict[str, list[float]] = {"without": [], "quiet": [], "mirroring": []}
    file_bytes = 0
    for _ in range(num_rounds):
        for mirror in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                text, run_dir = Path(folder) / "text.txt", Path(folder) / "run"
                text.write_text("the quick brown fox jumps over the lazy dog. " * 2000)
                run(spec_of(text, num_steps, mirror=mirror), run_dir, rank_program=(__file__, "--rank"))
                quiet, busy = steps_of(run_dir)
                if mirror:
                    found["quiet"] += quiet
                    found["mirroring"] += busy
                    file_bytes = max(path.stat().st_size for path in run_dir.rglob("*.safetensors"))
                else:
                    found["without"] += quiet + busy
    figures = {
        name: {"num": len(steps), "mean_s": round(mean(steps), 4), "median_s": round(median(steps), 4)}
        for name, steps in found.items()
    }
    longer = mean(found["mirroring"]) / mean(found["without"]) - 1
    print(json.dumps({"file_bytes": file_bytes, **figures, "mirroring_longer": round(longer, 4)}))


def cut() -> None:
    """One run whose ranks are killed while a checkpoint travels, and one without."""
    from farpipe.core.errors import FarpipeError
    from farpipe.engine.checkpoint.folders import folder_of
    from farpipe.engine.checkpoint.manifest import Manifest
    from farpipe.engine.checkpoint.whole_file import is_here
    from farpipe.engine.launch.run import run

    with tempfile.TemporaryDirectory() as folder:
        text, run_dirs = Path(folder) / "text.txt", [Path(folder) / name for name in ("disturbed", "calm")]
        text.write_text("the quick brown fox jumps over the lazy dog. " * 2000)
        killed: list[int] = []
        threading.Thread(target=kill_in_a_file, args=(run_dirs[0], killed), daemon=True).start()
        spec = spec_of(text, CUT_STEPS, mirror=True)
        for run_dir in run_dirs:
            try:
                run(spec, run_dir, rank_program=(__file__, "--rank"), max_restarts=1)
            except FarpipeError as error:
                print(error, file=sys.stderr)
        lines = [
            [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()] for place in run_dirs
        ]
        found = [[(line["step"], line["loss"], line["grad_norm"]) for line in every] for every in lines]
        whole = [folder_of(run_dirs[0] / "sites" / site / "checkpoints", CUT_STEPS) for site in SITES]
        full = all(is_here(place / entry.name, entry) for place in whole for entry in Manifest.load(place).files)
    equal = found[0] == found[1] and len(found[0]) == CUT_STEPS
    print(json.dumps({"cut in a file": len(killed) == 2, "losses and norms": equal, "full at both sites": full}))


def kill_in_a_file(run_dir: Path, killed: list[int]) -> None:
    """Kill both ranks when a part of a file has come."""
    while not killed:
        time.sleep(0.01)
        with suppress(OSError):
            if any(part.stat().st_size > CUT_BYTES for part in run_dir.glob("sites/*/incoming/*.part")):
                killed += [one for one in processes_of(run_dir) if is_rank(one)]
    signal_all(killed, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        del sys.argv[1]
        rank_main()
    elif sys.argv[1:2] == ["--cut"]:
        cut()
    else:
        main(*map(int, [*sys.argv[1:], *("40", "2")[len(sys.argv) - 1 :]]))
