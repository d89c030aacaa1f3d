"""Steps of documents that groups of processes share, predicted from a profile of one process and executed.

A small Llama on two processes of one machine, on pages and paragraphs of this documentation, 24 documents a step cut at
4,096 tokens: each document on a group of its own (``groups``), every one on both processes (``shared``), every one on
one (``apart``). The profile is measured first, with both processes at once; then the layouts train in turns. An error
is (predicted - measured) / measured, of the steps without the first three.

    python -m benchmarks.sequences.group_prediction [--rounds 2] [--steps 12] [--hidden 256]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.sequences.chunk_prediction import errors
from benchmarks.shared.jobs import site_table

LAYOUTS: Final = {"groups": "", "shared": "data = 1\ncontext = 2", "apart": "data = 2\ncontext = 1"}
"""Further pins of each layout."""
DOCUMENTS: Final = Path(__file__).parents[2] / "recipes" / "long_documents.jsonl"
TIMEOUT_S: Final = 1800.0
JOB: Final = (
    """[model]
hugging_face = "model"
[data]
source = "{documents}"
packing = "elastic"
[training]
sequence_length = 4096
global_batch = 24
num_steps = {steps}
precision = "fp32"
keep_checkpoints = 0
[layout]
pipeline = 1
{pins}
"""
    + site_table("zurich", "cpu", 2)
    + "devices_per_machine = 2\n"
)


def write_model(folder: Path, hidden: int) -> None:
    """A Llama of six layers with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 256}
    config = AutoConfig.for_model("llama", hidden_size=hidden, intermediate_size=hidden * 8 // 3, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def farpipe(folder: Path, *arguments: str) -> None:
    """A command of farpipe in `folder`."""
    command = [sys.executable, "-m", "farpipe", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, cwd=folder)


def measure(folder: Path, layout: str, number: int) -> dict[str, Any]:
    """One line of the table: a training with the layout, whose job and profile are in `folder`."""
    place = folder / f"{layout}-{number}"
    farpipe(folder, "train", f"{layout}.toml", "--profile", "profile.json", "--run-dir", place.name)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line["makespan_s"] for line in lines[3:]]
    degrees = [line["chunks"].get("groups") for line in lines[3:]]
    return errors(lines) | {"steps, s": [round(one, 2) for one in steps], "groups": degrees}


def main() -> None:
    """Print a line of JSON for every training."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=2, help="Turns through all layouts.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", chosen.hidden)
        for layout, pins in LAYOUTS.items():
            text = JOB.format(documents=DOCUMENTS, steps=chosen.steps, pins=pins)
            (folder / f"{layout}.toml").write_text(text, encoding="utf-8")
        farpipe(folder, "profile", "apart.toml", "--processes", "2", "-o", "profile.json")
        known = json.loads((folder / "profile.json").read_text(encoding="utf-8"))["errors"]
        print(json.dumps({"errors of the profile": known}), flush=True)
        for number, layout in product(range(chosen.rounds), LAYOUTS):
            print(json.dumps({"layout": layout, "round": number} | measure(folder, layout, number)), flush=True)


if __name__ == "__main__":
    main()
