"""Steps of a training on chunks, predicted and executed: makespan of rehearsed steps (stages that sleep) and of a small
model that computes on this CPU, and what stages hold for their backwards. Limit: 5 %.

    python -m benchmarks.sequences.chunk_prediction [--steps 8] [--device sleep|cpu] [--profile FILE] [--search]

Two ranks at two emulated sites, 20 ms and 200 Mbit/s apart, on whole files of Python's standard library cut at 2048
bytes, six a step, every step with a plan of its own. Medians over the steps without the first half, at most three; an
error is (predicted - measured) / measured. `--search` asks for faster orders than token-level 1F1B beside the run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared.jobs import two_sites

JOB = """{schedule}
[model]
name = "prediction"
num_layers = 4
hidden = {hidden}
num_heads = 4
num_kv_heads = 2
ffn_hidden = 176
vocab_size = 256

[training]
sequence_length = 2048
global_batch = 6
num_steps = {steps}
precision = "fp32"
keep_checkpoints = 0

[data]
source = "stdlib"
packing = "{packing}"

[layout]
pipeline = 2

""" + two_sites("zurich", "lugano", 1)


def lines_of(
    steps: int, device: str, profile: str | None, hidden: int, *, packing: str, search: bool
) -> list[dict[str, Any]]:
    """The metrics of a run."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = '[schedule]\nmethod = "chunk-search"' if search else ""
        job, place = Path(folder, "job.toml"), Path(folder, "run")
        job.write_text(JOB.format(steps=steps, hidden=hidden, schedule=schedule, packing=packing), encoding="utf-8")
        command = [sys.executable, "-m", "farpipe", "train", str(job), "--run-dir", str(place), "--device", device]
        command += ["--profile", profile] if profile else []
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
        return [json.loads(line) for line in (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def errors(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the steps after the warm-up, in per cent."""
    warm = lines[min(3, len(lines) // 2) :]
    time_error = [100 * (line["predicted_makespan_s"] / line["makespan_s"] - 1) for line in warm]
    found: dict[str, Any] = {
        "steps": len(warm),
        "chunks": median(line["chunks"]["num_chunks"] for line in warm),
        "makespan s": round(median(line["makespan_s"] for line in warm), 3),
        "median error %": round(median(time_error), 1),
        "mean of |error| %": round(sum(map(abs, time_error)) / len(warm), 1),
        "largest %": round(max(time_error, key=abs), 1),
    }
    pairs = [
        (predicted, measured)
        for line in warm
        for predicted, measured in zip(
            line["chunks"]["predicted_held_bytes"], line["chunks"].get("measured_held_bytes", ()), strict=False
        )
    ]
    if pairs:
        found["held, median error %"] = round(median(100 * (p / m - 1) for p, m in pairs), 1)
        found["held, largest %"] = round(max((100 * (p / m - 1) for p, m in pairs), key=abs), 1)
    found["orders"] = ", ".join(dict.fromkeys(line["chunks"]["order"] for line in warm))
    gains = [
        1 - line["predicted_makespan_s"] / line["chunks"].get("pattern_makespan_s", line["predicted_makespan_s"])
        for line in warm
    ]
    found["order predicted faster by %"] = round(100 * median(gains), 1)
    found["plans of their own"] = sum(line["chunks"]["origin"] == "searched" for line in lines)
    found["planning s"] = round(median(line["chunks"]["planning_s"] for line in lines), 2)
    return found


def main() -> None:
    """Print the errors as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", choices=["sleep", "cpu"], default="sleep")
    parser.add_argument("--hidden", type=int, default=64, help="Of the model: the larger, the longer every chunk.")
    parser.add_argument("--profile")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--packing", nargs="+", default=["elastic"], choices=["elastic", "fixed", "none"])
    parser.add_argument("--rounds", type=int, default=1, help="Turns through all kinds of packing.")
    arguments = parser.parse_args()
    given = (arguments.steps, arguments.device, arguments.profile, arguments.hidden)
    for number, packing in product(range(arguments.rounds), arguments.packing):
        found = errors(lines_of(*given, packing=packing, search=arguments.search))
        print(json.dumps({"packing": packing, "round": number} | found), flush=True)


if __name__ == "__main__":
    main()
