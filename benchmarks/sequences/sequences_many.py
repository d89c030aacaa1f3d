"""Many batches, one after the other, planned under memory that is short: does any find no plan where another number of
slices or another grouping has one? Limit: none. As many batches as fit the time are planned, each with little of it.

    FARPIPE_DATA=... python -m benchmarks.sequences.sequences_many [--seconds 120] [--batches 100000] [--rows FILE]

Code files and Wikipedia articles, cut at 16K to 96K tokens, 32 to 512 sequences a step, Llama 13B on 4 and 8 stages of
A100 whose memory is made smaller, from what holds the longest sequence up to all. Of every plan the memory of all ranks
is held against what they have. A batch that finds no plan is tried again with 1 to 2,048 slices of equal time and of
equal tokens, as several pipelines and as one: `avoidable` counts those where that finds one. `impossible` are those
whose longest sequence fits in no number of slices, by the closed bound. `--rows` gets a line every 500 batches.
"""

import argparse
import json
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.data import data_folder
from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Cluster, Job, Pins, Training, preset_model, preset_site
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.workload import BatchOptions, chunk_costs, plan_sequences, read_lengths
from farpipe.planning.workload.checkpointing import token_limit
from farpipe.planning.workload.lengths import cut_lengths

CUTS = (16384, 49152, 98304)
STAGES = (4, 8)
MEMORY = (0.15, 0.2, 0.3, 0.6, 1.0)
"""Of an A100's 80 GiB."""
COUNTS = (32, 128, 512)
BUDGET_S = 0.02
SLICES = (*range(1, 65), 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
REPORT_EVERY = 500
CORPORA = {"code": "code_gpt2_tokens_half.csv", "wikipedia": "wikipedia_first_half.txt"}


def read_corpora() -> dict[str, Any]:
    """Lengths of the corpora in the folder that FARPIPE_DATA names."""
    folder = data_folder("lengths/") / "lengths"
    return {name: read_lengths(folder / file) for name, file in CORPORA.items()}


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
    """True if any number of slices has a plan, of equal time or tokens, in one pipeline or in several."""
    for count, equal, several in product(SLICES, ("time", "tokens"), (True, False)):
        options = BatchOptions(count, equal=equal, several_pipelines=several, limit_s=BUDGET_S)  # type: ignore[arg-type]
        try:
            plan_sequences(of, lengths, options)
        except InfeasibleError:
            continue
        return True
    return False


def fate(of: ChunkCosts, lengths: Any) -> str:
    """Outcome of one batch."""
    try:
        token_limit(of, int(lengths.max()))
    except InfeasibleError:
        return "impossible"
    try:
        plan = plan_sequences(of, lengths, BatchOptions(limit_s=BUDGET_S))
    except InfeasibleError:
        return "avoidable" if is_avoidable(of, lengths) else "infeasible"
    for pipeline in plan.pipelines:
        for peak, rank in zip(pipeline.peak_memory_bytes, pipeline.problem.ranks, strict=True):
            assert rank.memory_bytes is None or peak <= rank.memory_bytes * (1 + 1e-9)
    return "recomputing" if any(pipeline.recomputed.any() for pipeline in plan.pipelines) else "planned"


def main() -> None:
    """Print the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--first", type=int, default=0, help="Number of the first batch.")
    parser.add_argument("--batches", type=int, default=1 << 40, help="At most.")
    parser.add_argument("--rows", type=Path, help="File that gets a line with the counts so far.")
    arguments = parser.parse_args()
    corpora = read_corpora()
    counts = dict.fromkeys(("planned", "recomputing", "impossible", "infeasible", "avoidable"), 0)
    until_s, failed, longest_s = time.monotonic() + arguments.seconds, [], 0.0
    line: dict[str, Any] = {}
    for seed in range(arguments.first, arguments.first + arguments.batches):
        of, lengths = batch(corpora, seed)
        began_s = time.process_time()
        found = fate(of, lengths)
        longest_s = max(longest_s, time.process_time() - began_s)
        counts[found] += 1
        failed += [seed] if found in ("infeasible", "avoidable") else []
        done = seed + 1 - arguments.first
        line = {"first": arguments.first, "batches": done, **counts, "failed": failed[:20], "longest CPU s": longest_s}
        if arguments.rows is not None and done % REPORT_EVERY == 0:
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if time.monotonic() > until_s:
            break
    print(json.dumps(line))


if __name__ == "__main__":
    main()
