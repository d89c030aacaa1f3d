"""Steps with a barrier and without: rehearsed on four ranks at two sites over the emulated WAN. Prints JSON.

    python -m benchmarks.engine.free_steps

F, I and W sleep 20 ms each on every rank, a message has 0.5 MB, the order is zb-2p. `predicted` and `measured` are
seconds from one step to the next over seconds of computing, measured as the median of rank 0's steps.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from farpipe.core.schedule.library import order
from farpipe.core.spec import Training
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.core.step.player import makespan_s, period_s
from farpipe.engine.launch.run import run
from farpipe.engine.run_spec import RunSpec

ACTION_S = 0.02
NUM_STEPS, NUM_SKIPPED = 16, 4
WANS = {"20 ms, 200 Mbit/s": (0.020, 200e6, 16), "50 ms, 1 Gbit/s": (0.050, 1e9, 24)}
"""Latency, bits per second, and microbatches."""


def problem(latency_s: float, bits_per_s: float, num_microbatches: int) -> Problem:
    """Four ranks, two per site."""
    links = {name: Link(latency_s=latency_s, bandwidth_bytes_per_s=bits_per_s / 8) for name in ("a>b", "b>a")}
    wan = Hop(forward=Transfer(link="a>b", bytes=5e5), backward=Transfer(link="b>a", bytes=5e5))
    times = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), ACTION_S)
    return Problem(
        num_microbatches=num_microbatches,
        ranks=(Rank(),) * 4,
        stages=tuple(Stage(rank=rank, **times) for rank in range(4)),
        links=links,
        hops=(None, wan, None),
    )


def measured_s(step: Problem, *, barrier: bool) -> float:
    """Median seconds from one step to the next on rank 0."""
    training = Training(sequence_length=1, global_batch=1, microbatch_size=1, barrier=barrier)
    spec = RunSpec.bare(
        problem=step,
        schedule=order("zb-2p", step),
        sites=("a", "a", "b", "b"),
        num_steps=NUM_STEPS,
        device="sleep",
        training=training,
    )
    with tempfile.TemporaryDirectory() as folder:
        run(spec, Path(folder))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return median(line["step_s"] + line["pause_s"] for line in lines[NUM_SKIPPED:-1])


def main() -> None:
    """Both ways over both links."""
    found = {}
    for name, wan in WANS.items():
        step = problem(*wan)
        work_s, schedule = 3 * ACTION_S * step.num_microbatches, order("zb-2p", step)
        for barrier, predict in ((True, makespan_s), (False, period_s)):
            seconds = {"predicted": predict(step, schedule), "measured": measured_s(step, barrier=barrier)}
            ratios = {key: round(value / work_s, 4) for key, value in seconds.items()}
            found[f"{name}, {'a' if barrier else 'no'} barrier"] = ratios
            print(name, barrier, ratios, file=sys.stderr)
    print(json.dumps({"benchmark": "free_steps", "step / computing": found}))


if __name__ == "__main__":
    main()
