"""InfiniPipe's settings (arXiv 2509.21275): 4 nodes of 8 A100, Llama of 7B, 13B and 30B, 512 sequences a step, lengths
of code files cut at 48K and 96K tokens. Step time of chunks planned by farpipe beside six other ways to train the same
batch, all under farpipe's cost model, each at its best over its degrees. The limits to hold this against: the paper's
measured ratios: 1.27 (48K) and 1.40 (96K) over fixed chunks with static checkpointing, at most 2.07 over Ulysses, 1.69
over FlexSP at 30B and 48K.

    FARPIPE_DATA=... python benchmarks/sequences_paper.py [--models 7b 13b 30b] [--seeds 1]

`fixed, adaptive`: slices and chunks of equal tokens (Seq1F1B), their size tuned, recomputation by chunk as ours.
`fixed, static`: the same with the fewest layers recomputed that fit, equal everywhere. `whole, full`: no sequence is
cut, all is recomputed (a batch-level pipeline). `ulysses`: replicas of 8, 16 or 32 devices that share sequences, packed
and balanced over the replicas, recomputing nothing or all, all states sharded over all devices, which costs nothing
here. `flexsp, ideal`: each sequence on the devices that make it cheapest, all always busy: a bound that no grouping can
beat. Lengths are code files, those of the paper's GitHub corpus being not published; its machines are A800 (slower
NVLink). `literal packing` fills chunks up to what memory holds, whatever their time.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from farpipe.cost import JobCosts, Layout, place_evenly
from farpipe.cost.chunks import ChunkCosts
from farpipe.cost.job_chunks import job_chunk_costs
from farpipe.errors import InfeasibleError
from farpipe.sequences import BatchOptions, chunk_costs, plan_sequences, read_lengths, sample_lengths
from farpipe.spec import Cluster, Job, Model, Pins, Training, preset_model, preset_site

NUM_DEVICES, BATCH = 32, 512
CUTS = (49152, 98304)
LLAMA_30B = {"num_layers": 60, "hidden": 6656, "num_heads": 52, "ffn_hidden": 17920, "vocab_size": 32000}
PIPELINES = (4, 8, 16)
BUDGET_S = 20.0
WAYS = {
    "elastic": BatchOptions(budget_s=BUDGET_S),
    "literal packing": BatchOptions(rule="literal", budget_s=BUDGET_S),
    "fixed, adaptive": BatchOptions(equal="tokens", budget_s=BUDGET_S),
    "fixed, static": BatchOptions(equal="tokens", checkpointing="uniform", several_pipelines=False, budget_s=BUDGET_S),
    "whole, full": BatchOptions(num_slices=1, checkpointing="full", several_pipelines=False, budget_s=BUDGET_S),
}


def models() -> dict[str, Model]:
    """The paper's three."""
    return {
        "7b": preset_model("llama-2-7b"),
        "13b": preset_model("llama-2-13b"),
        "30b": Model(name="llama-30b", **LLAMA_30B),
    }


def job(model: Model, pipeline: int) -> Job:
    """The model on the paper's machines."""
    return Job(
        model=model,
        training=Training(sequence_length=max(CUTS), global_batch=BATCH, zero1=True),
        cluster=Cluster(sites=(preset_site("a", "a100-80gb", NUM_DEVICES),)),
        layout=Pins(pipeline=pipeline),
    )


def best_pipeline(model: Model, lengths: Any, options: BatchOptions) -> tuple[float, str]:
    """(step time, degrees) of one way at its best; infinite where nothing fits."""
    found = [(math.inf, "nothing fits")]
    for pipeline in PIPELINES:
        context = NUM_DEVICES // pipeline
        try:
            plan = plan_sequences(chunk_costs(job(model, pipeline), int(lengths.max()), context), lengths, options)
        except InfeasibleError:
            continue
        what = f"{pipeline} x {context}, {plan.num_slices} slices, {len(plan.chunks)} chunks"
        found.append((plan.step_s, what))
    return min(found)


def shared(model: Model, longest: int, devices: int) -> tuple[ChunkCosts, float, float]:
    """(costs of the whole model on `devices` that share sequences, tokens that fit, the same recomputing all)."""
    one = job(model, 1)
    costs = JobCosts(model, one.training)
    placed = place_evenly(["a"], [model.num_layers])
    chunks = job_chunk_costs(costs, Layout(1, 1, 1, 1, 1, 1), placed, one.cluster, longest, devices)
    stage, site = chunks.stages[0], one.cluster.sites[0]
    room = site.plannable_bytes - 18 * model.num_params / NUM_DEVICES
    least = stage.activation_bytes - model.num_layers * stage.saved_bytes + stage.working_bytes
    return chunks, room / stage.activation_bytes, room / least


def seconds_of(chunks: ChunkCosts, lengths: Any, *, again: bool) -> Any:
    """Forward and backward of every sequence on the devices that share it, without what is fixed."""
    stage = chunks.stages[0]
    laws = [*stage.laws, *([stage.layer_forward.times(stage.num_layers)] if again else [])]
    tokens = lengths.astype(np.float64)
    return sum(law.seconds(tokens, tokens**2 / 2) - law.fixed_s for law in laws)


def ulysses(model: Model, lengths: Any) -> tuple[float, str]:
    """Replicas of equal size: each sequence to the one that is least busy, longest first, packed as far as fits."""
    found = [(math.inf, "nothing fits")]
    for devices in (8, 16, 32):
        chunks, *fits = shared(model, int(lengths.max()), devices)
        for again, capacity in zip((False, True), fits, strict=True):
            if capacity < lengths.max() or devices > model.num_heads:
                continue
            busy = np.zeros(NUM_DEVICES // devices)
            for seconds in sorted(seconds_of(chunks, lengths, again=again), reverse=True):
                busy[busy.argmin()] += seconds
            packs = math.ceil(lengths.sum() / capacity / busy.size)
            fixed = sum(law.fixed_s for law in chunks.stages[0].laws) * packs
            found.append((float(busy.max()) + fixed + chunks.overhead_s, f"{busy.size} x {devices}, again {again}"))
    return min(found)


def flexsp(model: Model, lengths: Any) -> tuple[float, str]:
    """Every sequence on the devices that make it cheapest, all devices always busy."""
    least = np.full(lengths.size, np.inf)
    overhead_s = math.inf
    for devices in (1, 2, 4, 8, 16, 32):
        chunks, *fits = shared(model, int(lengths.max()), devices)
        overhead_s = min(overhead_s, chunks.overhead_s)
        for again, capacity in zip((False, True), fits, strict=True):
            cost = devices * seconds_of(chunks, lengths, again=again)
            least = np.where(lengths <= capacity, np.minimum(least, cost), least)
    return float(least.sum()) / NUM_DEVICES + overhead_s, "ideal"


def rows(names: list[str], num_seeds: int) -> list[dict[str, Any]]:
    """One per model, cut, seed and way."""
    corpus = read_lengths(Path(os.environ["FARPIPE_DATA"]) / "lengths" / "code_gpt2_tokens_half.csv")
    ways: dict[str, Callable[[Model, Any], tuple[float, str]]] = {
        name: (lambda model, lengths, options=options: best_pipeline(model, lengths, options))
        for name, options in WAYS.items()
    }
    ways |= {"ulysses": ulysses, "flexsp, ideal": flexsp}
    found = []
    for name in names:
        for cut in CUTS:
            for seed in range(num_seeds):
                lengths = np.minimum(sample_lengths(corpus, BATCH, seed), cut)
                timed = {way: call(models()[name], lengths) for way, call in ways.items()}
                best = timed["elastic"][0]
                for way, (seconds, what) in timed.items():
                    facts = {"model": name, "cut": cut, "seed": seed, "way": way, "degrees": what}
                    ratio = round(seconds / best, 3) if math.isfinite(seconds) else None
                    found.append(facts | {"step_s": round(seconds, 2) if ratio else None, "times_elastic": ratio})
                    print(json.dumps(found[-1]), file=sys.stderr)
    return found


def main() -> None:
    """Print the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=list(models()), default=list(models()))
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    if "FARPIPE_DATA" not in os.environ:
        print(json.dumps({"skipped": "FARPIPE_DATA is not set: the folder with lengths/code_gpt2_tokens_half.csv"}))
        return
    print(json.dumps({"steps": rows(arguments.models, arguments.seeds)}))


if __name__ == "__main__":
    main()
