"""The search for orders against token-level 1F1B on planned batches of chunks: by how much an order that nobody has
named is faster, chains and memory kept, and how far both are from the lower bound.

    FARPIPE_DATA=... python -m benchmarks.sequences.chunk_search [--seconds 5]

Llama 13B on 32 A100 at one site and at two, 60 ms one way apart; batches of code files cut at 48K tokens, planned as
`farpipe sequences plan` does, the first pipeline of each. Gaps are makespan / bound - 1.
"""

import argparse
import json
import sys
from typing import Any

import numpy as np

from benchmarks.sequences.sequences_planning import NUM_DEVICES, job
from benchmarks.shared.data import data_folder
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.planning.search import search
from farpipe.planning.workload import BatchOptions, chunk_costs, plan_sequences, read_lengths, sample_lengths

CUT = 49152
SETTINGS = ((4, 1, 24), (8, 1, 48), (4, 2, 24), (8, 2, 48))
"""Stages, sites, sequences of a batch."""
LATENCY_S = 0.06


def row(corpus: Any, stages: int, sites: int, count: int, seconds: float) -> dict[str, Any]:
    """One batch."""
    lengths = np.minimum(sample_lengths(corpus, count, 0), CUT)
    costs = chunk_costs(job(stages, sites, LATENCY_S), int(lengths.max()), NUM_DEVICES // stages)
    pipeline = plan_sequences(costs, lengths, BatchOptions(several_pipelines=False)).pipelines[0]
    found = search(pipeline.problem, seconds)
    bound_s = max(lower_bound_s(pipeline.problem), found.lower_bound_s)
    return {
        "stages": stages,
        "sites": sites,
        "chunks": pipeline.problem.num_microbatches,
        "recomputed": int(pipeline.recomputed.sum()),
        "1F1B s": round(pipeline.makespan_s, 3),
        "searched s": round(found.timeline.makespan_s, 3),
        "faster by": round(1 - found.timeline.makespan_s / pipeline.makespan_s, 4),
        "gap of 1F1B": round(pipeline.makespan_s / bound_s - 1, 4),
        "gap of the search": round(found.timeline.makespan_s / bound_s - 1, 4),
        "by": found.schedule.method,
    }


def main() -> None:
    """Print the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    corpus = read_lengths(data_folder("lengths/") / "lengths" / "code_gpt2_tokens_half.csv")
    rows = []
    for setting in SETTINGS:
        rows.append(row(corpus, *setting, arguments.seconds))
        print(json.dumps(rows[-1]), file=sys.stderr)
    print(json.dumps({"orders": rows}))


if __name__ == "__main__":
    main()
