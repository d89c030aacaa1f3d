"""Many batches, one after the other, planned under memory that is short: does any find no plan where another number of
slices or another grouping has one? Limit: none. As many batches as fit the time are planned, each with little of it.

    FARPIPE_DATA=... python benchmarks/sequences_many.py [--seconds 120] [--first 0]

Code files and Wikipedia articles, cut at 16K to 96K tokens, 32 to 512 sequences a step, Llama 13B on 4 and 8 stages of
A100 whose memory is made smaller, from what holds the longest sequence up to all. A batch that finds no plan is tried
again with every number of slices from 1 to 64, and as several pipelines and as one: `avoidable` counts those where that
finds one. `impossible` are those whose longest sequence fits in no number of slices, by the closed bound.
"""

import argparse
import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from farpipe.cost.chunks import ChunkCosts
from farpipe.errors import InfeasibleError
from farpipe.sequences import BatchOptions, chunk_costs, plan_sequences, read_lengths
from farpipe.sequences.lengths import cut_lengths
from farpipe.sequences.planner import token_limit
from farpipe.spec import Cluster, Job, Pins, Training, preset_model, preset_site

CUTS = (16384, 49152, 98304)
STAGES = (4, 8)
MEMORY = (0.15, 0.2, 0.3, 0.6, 1.0)
"""Of an A100's 80 GiB."""
COUNTS = (32, 128, 512)
BUDGET_S = 0.02
MOST_SLICES = 64
CORPORA = {"code": "code_gpt2_tokens_half.csv", "wikipedia": "wikipedia_first_half.txt"}


@cache
def costs(stages: int, memory: float, cut: int) -> ChunkCosts:
    """13B on 32 A100 with so much of their memory."""
    site = preset_site("a", "a100-80gb", 32)
    device = site.device.model_copy(update={"memory_bytes": site.device.memory_bytes * memory})
    job = Job(
        model=preset_model("llama-2-13b"),
        training=Training(sequence_length=cut, global_batch=512, zero1=True),
        cluster=Cluster(sites=(site.model_copy(update={"device": device}),)),
        layout=Pins(pipeline=stages),
    )
    return chunk_costs(job, cut, 32 // stages)


def batch(corpora: dict[str, Any], seed: int) -> tuple[ChunkCosts, Any]:
    """The costs and lengths of batch number `seed`."""
    draw = np.random.default_rng(seed)
    name, cut = draw.choice([*corpora]), int(draw.choice(CUTS))
    lengths = cut_lengths(draw.choice(corpora[name], int(draw.choice(COUNTS))), cut)
    return costs(int(draw.choice(STAGES)), float(draw.choice(MEMORY)), cut), lengths


def is_avoidable(of: ChunkCosts, lengths: Any) -> bool:
    """Whether any number of slices has a plan, in one pipeline or in several."""
    for count in range(1, MOST_SLICES + 1):
        for several in (True, False):
            try:
                plan_sequences(
                    of, lengths, BatchOptions(num_slices=count, several_pipelines=several, budget_s=BUDGET_S)
                )
            except InfeasibleError:
                continue
            return True
    return False


def fate(of: ChunkCosts, lengths: Any) -> str:
    """What becomes of one batch."""
    try:
        token_limit(of, int(lengths.max()))
    except InfeasibleError:
        return "impossible"
    try:
        plan = plan_sequences(of, lengths, BatchOptions(budget_s=BUDGET_S))
    except InfeasibleError:
        return "avoidable" if is_avoidable(of, lengths) else "infeasible"
    return "recomputing" if any(pipeline.recomputed.any() for pipeline in plan.pipelines) else "planned"


def main() -> None:
    """Print the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--first", type=int, default=0, help="Number of the first batch.")
    arguments = parser.parse_args()
    if "FARPIPE_DATA" not in os.environ:
        print(json.dumps({"skipped": "FARPIPE_DATA is not set: the folder with lengths/"}))
        return
    folder = Path(os.environ["FARPIPE_DATA"]) / "lengths"
    corpora = {name: read_lengths(folder / file) for name, file in CORPORA.items()}
    counts = dict.fromkeys(("planned", "recomputing", "impossible", "infeasible", "avoidable"), 0)
    seed, until_s = arguments.first, time.monotonic() + arguments.seconds
    failed = []
    while time.monotonic() < until_s:
        of, lengths = batch(corpora, seed)
        found = fate(of, lengths)
        counts[found] += 1
        failed += [seed] if found in ("infeasible", "avoidable") else []
        seed += 1
    print(json.dumps({"first": arguments.first, "batches": seed - arguments.first, **counts, "failed": failed[:20]}))


if __name__ == "__main__":
    main()
