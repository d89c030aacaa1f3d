"""How long the sequence processor takes: real lengths cut and packed into chunks, with the number of slices searched.

    FARPIPE_DATA=... python -m benchmarks.sequences.packing_speed [--batches 10]

Limits: 512 sequences in under 50 ms, 8,192 in under a second. `one cut`: the chunks of one number of slices.
`searched`: every number of slices that the planner tries, each cut, packed and estimated, and the chunks of the best.
`plan`: the same with recomputation, grouping and orders. Llama 13B on 32 A100, 8 stages; batches of code files and of
Wikipedia articles cut at 48K and 96K tokens; milliseconds of wall time, after one batch that is not counted.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from benchmarks.sequences.sequences_many import read_corpora
from benchmarks.sequences.sequences_planning import NUM_DEVICES, job
from farpipe.planning.workload import BatchOptions, chunk_costs, plan_sequences
from farpipe.planning.workload.candidate_cuts import estimated_cuts, total_law
from farpipe.planning.workload.checkpointing import token_limit
from farpipe.planning.workload.cut import cut_batch
from farpipe.planning.workload.lengths import cut_lengths

CUTS = (49152, 98304)
COUNTS = (512, 8192)
STAGES = 8


def timed_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of wall time that the work takes, and what it returns."""
    began_s = time.perf_counter()
    found = work()
    return (time.perf_counter() - began_s) * 1e3, found


def batch_ms(lengths: Any, cut_at: int) -> tuple[list[float], int, int]:
    """Milliseconds of one cut, of the search and of the plan; cuts tried; chunks of the best."""
    costs = chunk_costs(job(STAGES, 1, 0.0), cut_at, NUM_DEVICES // STAGES)
    limit, options = token_limit(costs, int(lengths.max())), BatchOptions()

    def searched() -> tuple[Any, int]:
        ranked = sorted(estimated_cuts(costs, lengths, limit, options), key=lambda one: one.seconds)
        assert ranked[0].batch.chunks()
        return ranked[0], len(ranked)

    searched_ms, (best, tried) = timed_ms(searched)
    law = total_law(costs, best.batch.load)
    one_ms, chunks = timed_ms(lambda: cut_batch(lengths, best.cut, law).chunks())
    plan_ms, _ = timed_ms(lambda: plan_sequences(costs, lengths, options))
    return [one_ms, searched_ms, plan_ms], tried, len(chunks)


def row(name: str, corpus: Any, cut_at: int, count: int, batches: int) -> dict[str, Any]:
    """One corpus, cut and number of sequences."""
    drawn = [np.random.default_rng(seed).choice(corpus, count) for seed in range(batches + 1)]
    times, tried, chunks = zip(*(batch_ms(cut_lengths(lengths, cut_at), cut_at) for lengths in drawn), strict=True)
    facts = {"corpus": name, "cut at": cut_at, "sequences": count, "cuts tried": max(tried), "chunks": max(chunks)}
    for index, what in enumerate(("one cut", "searched", "plan")):
        counted = [each[index] for each in times[1:]]
        facts[f"{what}, median ms"] = round(float(np.median(counted)), 1)
        facts[f"{what}, longest ms"] = round(max(counted), 1)
    return facts


def main() -> None:
    """Print the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--batches", type=int, default=10)
    arguments = parser.parse_args()
    rows = []
    for (name, corpus), cut_at, count in product(read_corpora().items(), CUTS, COUNTS):
        rows.append(row(name, corpus, cut_at, count, arguments.batches))
        print(json.dumps(rows[-1]), file=sys.stderr)
    print(json.dumps({"packing": rows}))


if __name__ == "__main__":
    main()
