"""Plans of fourteen batches as they were, so that a simpler planner of sequences is known to give the same answers.

The figures are in frozen_batches.json. Where an answer became better, or the cost model another one on purpose, write
them anew and look at what has changed:

    PYTHONPATH=src:tests python tests/planning/workload/test_frozen_batches.py
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Cluster, Job, Pins, SiteLink, Training, preset_model, preset_site
from farpipe.planning.workload import BatchOptions, chunk_costs, options_of, plan_sequences

FROZEN = Path(__file__).with_name("frozen_batches.json")


def job(model="llama-2-13b", devices=32, sites=1, latency_s=0.0, memory_share=1.0, **pins):
    """Llama on A100s with a share of their memory, over so many sites in a row with 100 Gbit/s between them."""
    names = "abc"[:sites]
    ends = [pair for a, b in pairwise(names) for pair in ((a, b), (b, a))]
    links = [SiteLink(source=a, target=b, latency_s=latency_s, bandwidth_bytes_per_s=1.25e10) for a, b in ends]
    each = [preset_site(name, "a100-80gb", -(-devices // sites // 8) * 8) for name in names]
    small = [
        one.model_copy(
            update={"device": one.device.model_copy(update={"memory_bytes": memory_share * one.device.memory_bytes})}
        )
        for one in each
    ]
    return Job(
        model=preset_model(model),
        training=Training(sequence_length=98304, global_batch=512, zero1=True),
        cluster=Cluster(sites=tuple(small), links=tuple(links)),
        layout=Pins(**pins),
    )


def lengths(count, longest, seed, middle=6.6, spread=1.6):
    """Many short and few long documents, one of them the longest."""
    drawn = np.random.default_rng(seed).lognormal(middle, spread, count).astype(np.int64)
    return np.clip(np.append(drawn[1:], longest), 16, longest)


FAR = {"pipeline": 8, "sites": 2, "latency_s": 0.04}
BATCHES = {
    "48k on four stages": (job(pipeline=4, memory_share=0.55), 8, lengths(512, 49152, 1), BatchOptions()),
    "96k on eight stages": (job(pipeline=8), 4, lengths(512, 98304, 2), BatchOptions()),
    "two sites": (job(**FAR), 4, lengths(512, 49152, 3), BatchOptions()),
    "three sites": (job(pipeline=8, sites=3, latency_s=0.06), 4, lengths(512, 49152, 4), BatchOptions()),
    "pinned slices, links in the open": (
        job(**FAR),
        4,
        lengths(512, 49152, 5),
        BatchOptions(num_slices=4, hide_links=False),
    ),
    "fixed": (job(pipeline=8, memory_share=0.5), 4, lengths(512, 98304, 6), options_of("fixed")),
    "whole": (job(pipeline=4), 8, lengths(64, 32768, 7), options_of("none")),
    "literal packing": (
        job(pipeline=8, memory_share=0.6),
        4,
        lengths(512, 49152, 8),
        BatchOptions(rule="literal", shrinks=False),
    ),
    "all recomputed": (job(pipeline=4), 8, lengths(256, 98304, 9), BatchOptions(checkpointing="full")),
    "short of memory": (job(pipeline=8, memory_share=0.42), 4, lengths(512, 98304, 10, 7.6), BatchOptions()),
    "shorter of memory": (
        job("llama-2-7b", 8, memory_share=0.3, pipeline=8),
        1,
        lengths(256, 65536, 11),
        BatchOptions(),
    ),
    "several pipelines": (
        job(pipeline=8, memory_share=0.5),
        4,
        lengths(512, 98304, 14, 5.0, 2.0),
        BatchOptions(may_keep_attention=False),
    ),
    "many short": (job("llama-2-7b", pipeline=16), 2, lengths(4096, 16384, 12, 5.5, 1.0), BatchOptions()),
    "two stages a rank": (
        job("llama-2-7b", 8, pipeline=4, virtual=2, memory_share=0.7),
        2,
        lengths(96, 32768, 13),
        BatchOptions(),
    ),
}


def answer(spec, context, batch, options):
    """Plan of a batch as figures; of one that can't be planned its error's class."""
    try:
        plan = plan_sequences(chunk_costs(spec, int(batch.max()), context), batch, options)
    except InfeasibleError as error:
        return {"error": str(error)}
    return {
        "step_s": plan.step_s,
        "num_slices": plan.num_slices,
        "chunks": [len(pipeline.chunks) for pipeline in plan.pipelines],
        "recomputed_layers": [int(pipeline.recomputed.sum()) for pipeline in plan.pipelines],
        "peak_memory_bytes": max(plan.peak_memory_bytes),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_planned_as_it_was(name):
    if BATCHES[name][0].layout.virtual:  # orders are searched for a limited time, in which kernels may be compiled
        answer(*BATCHES[name])
    frozen, now = json.loads(FROZEN.read_text())[name], answer(*BATCHES[name])
    assert now.keys() == frozen.keys()
    for key, value in frozen.items():
        # Orders of nearly equal time are chosen by the last digit, which processors round differently.
        expected = pytest.approx(value, rel=1e-5) if key == "step_s" else value
        assert now[key] == expected, key


if __name__ == "__main__":
    FROZEN.write_text(json.dumps({name: answer(*batch) for name, batch in BATCHES.items()}, indent=1) + "\n")
