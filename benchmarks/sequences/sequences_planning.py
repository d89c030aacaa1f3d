"""Planning batches of 512 sequences: how long it takes, whether any batch finds no plan, what distance costs. Limits:
2 s on two cores; no infeasible answer that another cut or grouping would solve; at most 1.04 times one site's step
where the order hides the links (InfiniPipe's own order takes 1.16 times at a one-way time of 0.17 chunks, 1.95 at 1).

    FARPIPE_DATA=... python -m benchmarks.sequences.sequences_planning [--batches 200] [--only distance|planning]

Llama 13B on 32 A100, lengths of code files cut at 48K and 96K tokens. A batch that finds no plan is tried again with
every number of slices from 1 to 64: `avoidable` counts those where that finds one. Over sites the stages are divided
evenly, 100 Gbit/s between them. `plain` and `hidden` have as many slices as the plan for one site, `own slices` as many
as the planner finds best. `paths`: one site's step and what no warm-up hides, the path of the first message to the last
stage, that of the last one back, and the exchanges outside the pipeline. `bound`: the lower bound of all orders of one
site's chunks, with nothing recomputed, over one site's searched order.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.shared.data import data_folder
from farpipe.core.errors import InfeasibleError
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.spec import Cluster, Job, Pins, SiteLink, Training, preset_model, preset_site
from farpipe.planning.search import search
from farpipe.planning.workload import BatchOptions, chunk_costs, plan_sequences, read_lengths, sample_lengths
from farpipe.planning.workload.sequence_plan import SequencePlan

NUM_DEVICES, BATCH = 32, 512
CUTS = (49152, 98304)
PIPELINES = (4, 8)
LATENCIES_S = (0.02, 0.04, 0.06)
OF_A_CHUNK = (0.17, 1.0)
"""Further one-way times, as parts of a mean chunk's forward and backward."""
SEARCH_S = 4.0
MAX_SLICES = 64


def job(pipeline: int, num_sites: int = 1, latency_s: float = 0.0) -> Job:
    """13B over so many sites in a row."""
    names = "abc"[:num_sites]
    ends = [pair for a, b in pairwise(names) for pair in ((a, b), (b, a))]
    links = [SiteLink(source=a, target=b, latency_s=latency_s, bandwidth_bytes_per_s=1.25e10) for a, b in ends]
    each = -(-NUM_DEVICES // num_sites // 8) * 8
    return Job(
        model=preset_model("llama-2-13b"),
        training=Training(sequence_length=max(CUTS), global_batch=BATCH, zero1=True),
        cluster=Cluster(sites=tuple(preset_site(n, "a100-80gb", each) for n in names), links=tuple(links)),
        layout=Pins(pipeline=pipeline),
    )


def planned(lengths: Any, pipeline: int, options: BatchOptions, *sites: Any) -> SequencePlan:
    """One batch."""
    costs = chunk_costs(job(pipeline, *sites), int(lengths.max()), NUM_DEVICES // pipeline)
    return plan_sequences(costs, lengths, options)


def searched_s(plan: SequencePlan, seconds: float = SEARCH_S) -> float:
    """The step in the best orders that the search finds, chains and memory kept."""
    found = [search(one.problem, seconds, methods=("named", "greedy")).timeline.makespan_s for one in plan.pipelines]
    return sum(map(min, found, [one.makespan_s for one in plan.pipelines])) + plan.overhead_s


def is_avoidable(lengths: Any, pipeline: int) -> bool:
    """True if any pinned number of slices has a plan."""
    for count in range(1, MAX_SLICES + 1):
        try:
            planned(lengths, pipeline, BatchOptions(num_slices=count))
        except InfeasibleError:
            continue
        return True
    return False


def planning(corpus: Any, num_batches: int, cuts: Sequence[int]) -> list[dict[str, Any]]:
    """Quantiles of the planning time."""
    found = []
    for cut in cuts:
        for pipeline in PIPELINES:
            wall, cpu, failed, avoidable = [], [], 0, 0
            for seed in range(-1, num_batches):
                lengths = np.minimum(sample_lengths(corpus, BATCH, 0, seed + 1), cut)
                begin_s, cpu_s = time.perf_counter(), time.process_time()
                try:
                    planned(lengths, pipeline, BatchOptions())
                except InfeasibleError:
                    failed, avoidable = failed + 1, avoidable + is_avoidable(lengths, pipeline)
                if seed >= 0:  # the first one loads and compiles
                    wall.append(time.perf_counter() - begin_s)
                    cpu.append(time.process_time() - cpu_s)
            quantiles = {
                f"{name} {share:.0%} s": round(float(np.quantile(values, share)), 2)
                for name, values in (("wall", wall), ("cpu", cpu))
                for share in (0.5, 0.9, 1.0)
            }
            facts = {"cut": cut, "stages": pipeline, "batches": num_batches, **quantiles}
            found.append(facts | {"infeasible": failed, "avoidable": avoidable})
            print(json.dumps(found[-1]), file=sys.stderr)
    return found


def bound_s(plan: SequencePlan) -> float:
    """Lower bound of the step in any order of its chunks, if nothing is recomputed."""
    assert not any(one.recomputed.any() for one in plan.pipelines)
    return sum(lower_bound_s(one.problem) for one in plan.pipelines) + plan.overhead_s


def distance(corpus: Any) -> list[dict[str, Any]]:
    """Step time over two and three sites, as a multiple of one site's: in 1F1B's order, and both in searched ones."""
    lengths = np.minimum(sample_lengths(corpus, BATCH, 0), CUTS[0])
    found = []
    for num_sites, pipeline in ((2, 8), (3, 8)):
        near = planned(lengths, pipeline, BatchOptions())
        mean_s, near_s = near.step_s / len(near.chunks), (near.step_s, searched_s(near))
        for latency_s in (*LATENCIES_S, *(part * mean_s for part in OF_A_CHUNK)):
            facts = {"sites": num_sites, "latency_ms": round(1e3 * latency_s), "of a chunk": latency_s / mean_s}
            for name, hide in (("plain", False), ("hidden", True)):
                options = BatchOptions(num_slices=near.num_slices, hide_links=hide)
                far = planned(lengths, pipeline, options, num_sites, latency_s)
                facts[name] = far.step_s / near_s[0]
                facts[f"{name}, searched"] = searched_s(far) / near_s[1]
                if not hide:
                    paths_s = 2 * (num_sites - 1) * latency_s + far.overhead_s - near.overhead_s
                    facts["paths"], facts["bound"] = 1 + paths_s / near_s[0], bound_s(far) / near_s[1]
            far = planned(lengths, pipeline, BatchOptions(), num_sites, latency_s)
            facts["own slices"], facts["own slices, searched"] = far.step_s / near_s[0], searched_s(far) / near_s[1]
            found.append({key: round(value, 3) for key, value in facts.items()})
            print(json.dumps(found[-1]), file=sys.stderr)
    return found


def main() -> None:
    """Print both tables as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--only", choices=["distance", "planning"], help="One of the two tables.")
    parser.add_argument("--cuts", type=int, nargs="+", default=CUTS, help="Of planning.")
    arguments = parser.parse_args()
    corpus = read_lengths(data_folder("lengths/") / "lengths" / "code_gpt2_tokens_half.csv")
    found: dict[str, Any] = {}
    if arguments.only != "planning":
        found["distance"] = distance(corpus)
    if arguments.only != "distance":
        found["planning"] = planning(corpus, arguments.batches, arguments.cuts)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
