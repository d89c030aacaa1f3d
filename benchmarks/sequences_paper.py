"""InfiniPipe's settings (arXiv 2509.21275): 4 nodes of 8 A800, Llama of 7B, 13B and 30B, 512 sequences a step, lengths
of code files cut at 48K and 96K tokens. Step time of chunks planned by farpipe beside other methods to train the same
batch, all under farpipe's cost model, each at its best over its degrees. The limits to hold this against: the paper's
measured ratios: 1.27 (48K) and 1.40 (96K) over fixed chunks with static checkpointing, at most 2.07 over Ulysses, 1.69
over FlexSP at 30B and 48K.

    FARPIPE_DATA=... python benchmarks/sequences_paper.py [--models 7b 13b 30b] [--seeds 1] [--budget 20] [--rows FILE]

`fixed, adaptive`: slices and chunks of equal tokens (Seq1F1B), their size tuned, recomputation by chunk as ours.
`fixed, static`: the same with the fewest layers recomputed that fit, equal everywhere. `whole, full`: no sequence is
cut, all is recomputed (a batch-level pipeline). The order of `elastic, as many in flight` and of all that are fixed
keeps as many chunks in flight as the longest sequence needs to the end, as Seq1F1B and InfiniPipe do; farpipe's has
fewer where the longest sequences are over, which `fixed, fewer in flight` takes over. `elastic, searched` and `fixed,
searched`: the plans of `elastic` and `fixed, adaptive`, and those of three numbers of slices below and above, in the
best of the named orders and of list scheduling (`[schedule] method = "chunk-search"`). `literal packing` fills chunks
up to what memory holds, whatever their time. `bound`: what no plan on these degrees can be faster than, whatever its
chunks and order: all work of the slowest stage and the step's overhead, in as few chunks as there are stages. `bound,
equal chunks`: the same with the fixed times of the best number of chunks, and the first of them on its way to that
stage, but nothing idle behind it.

`ulysses`: replicas of 8, 16 or 32 devices that share sequences, packed and balanced over the replicas, recomputing
nothing or all, all states sharded over all devices, which costs nothing here. `ulysses, ZeRO-3, ... GB/s`: the same as
DeepSpeed runs it, with parameters gathered for every microbatch's forward and backward and gradients scattered after
it, 6 bytes a parameter, over NICs of so many GB/s for each device; hidden behind the microbatches' compute as far as
that lasts, or not at all (`exposed`). `on 32`: with all devices in one group. `short`: microbatches of one context
length, all recomputed, where the others fill the memory. `flexsp, ideal`: each sequence on the devices that make it
cheapest, all always busy: a bound that no grouping can beat.

Lengths are code files, those of the paper's GitHub corpus being not published. NVLink of an A800 has 200 GB/s in each
direction; its NICs are not known, and taken for the catalogue's where nothing else is said.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from farpipe.cost import JobCosts, Layout, place_evenly
from farpipe.cost.chunks import ChunkCosts
from farpipe.cost.job_chunks import job_chunk_costs
from farpipe.errors import InfeasibleError, InputError
from farpipe.search import search
from farpipe.sequences import BatchOptions, SequencePlan, chunk_costs, plan_sequences, read_lengths, sample_lengths
from farpipe.spec import Cluster, Job, Model, Pins, Site, Training, preset_model, preset_site

NUM_DEVICES, BATCH = 32, 512
CUTS = (49152, 98304)
LLAMA_30B = {"num_layers": 60, "hidden": 6656, "num_heads": 52, "ffn_hidden": 17920, "vocab_size": 32000}
PIPELINES = (4, 8, 16)
NVLINK = 200e9
"""Of an A800, bytes/s in each direction (400 GB/s in both)."""
NICS = (50e9, 25e9, 12.5e9, 6.25e9)
"""Bytes/s for each device; the first is the catalogue's."""
SEARCH_S = 4.0
NEAR = 1.05
"""Orders are searched for degrees whose plan is so near the best one's step."""
MORE_SLICES = 3
MANY_CHUNKS = range(1, 2000)
WAYS = {
    "elastic": BatchOptions(),
    "elastic, searched": BatchOptions(),
    "elastic, as many in flight": BatchOptions(shrinks=False),
    "literal packing": BatchOptions(rule="literal", shrinks=False),
    "fixed, adaptive": BatchOptions(equal="tokens", shrinks=False),
    "fixed, fewer in flight": BatchOptions(equal="tokens"),
    "fixed, searched": BatchOptions(equal="tokens", shrinks=False),
    "fixed, static": BatchOptions(equal="tokens", checkpointing="uniform", several_pipelines=False, shrinks=False),
    "whole, full": BatchOptions(num_slices=1, checkpointing="full", several_pipelines=False),
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
        cluster=Cluster(sites=(a800(),)),
        layout=Pins(pipeline=pipeline),
    )


def a800(nic: float = NICS[0]) -> Site:
    """The paper's machines, with NICs of so many bytes/s for each device."""
    site = preset_site("a", "a100-80gb", NUM_DEVICES)
    machine = site.machine_link.model_copy(update={"bandwidth_bytes_per_s": NVLINK})
    between = site.site_link.model_copy(update={"bandwidth_bytes_per_s": nic})
    return site.model_copy(update={"machine_link": machine, "site_link": between})


def searched_s(plan: SequencePlan) -> float:
    """The step in the best orders that the search finds, chains and memory kept."""
    found = [search(one.problem, SEARCH_S, methods=("named", "greedy")).timeline.makespan_s for one in plan.pipelines]
    own = [one.makespan_s for one in plan.pipelines]
    return sum(map(min, found, own)) + plan.overhead_s


def best_pipeline(model: Model, lengths: Any, options: BatchOptions, *, searched: bool) -> tuple[float, str]:
    """(step time, degrees) of one method at its best; infinite where nothing fits."""
    found: list[tuple[float, str, ChunkCosts, SequencePlan]] = []
    for pipeline in PIPELINES:
        costs = chunk_costs(job(model, pipeline), int(lengths.max()), NUM_DEVICES // pipeline)
        with suppress(InfeasibleError):
            plan = plan_sequences(costs, lengths, options)
            found.append((plan.step_s, described(costs, plan), costs, plan))
    least_s = min((seconds for seconds, *_ in found), default=math.inf)
    if searched:
        near = [(costs, plan) for seconds, _, costs, plan in found if seconds < NEAR * least_s]
        steps = [step for costs, plan in near for step in searched_steps(costs, lengths, options, plan)]
    else:
        steps = [(seconds, what) for seconds, what, *_ in found]
    return min(steps, default=(math.inf, "nothing fits"))


def searched_steps(
    costs: ChunkCosts, lengths: Any, options: BatchOptions, plan: SequencePlan
) -> Iterator[tuple[float, str]]:
    """Steps of a plan and of those with a few slices more or fewer, in searched orders."""
    yield searched_s(plan), described(costs, plan)
    for count in range(max(1, plan.num_slices - MORE_SLICES), plan.num_slices + MORE_SLICES + 1):
        with suppress(InfeasibleError, InputError):
            other = plan_sequences(costs, lengths, replace(options, num_slices=count))
            yield searched_s(other), described(costs, other)


def described(costs: ChunkCosts, plan: SequencePlan) -> str:
    """Degrees and chunks of a plan in words."""
    return f"{costs.num_stages} x {costs.context}, {plan.num_slices} slices, {len(plan.chunks)} chunks"


def bound(model: Model, lengths: Any, *, equal: bool) -> tuple[float, str]:
    """The least that the slowest stage has to do; `equal`: it waits until a chunk has come through the others."""
    found = []
    for pipeline in PIPELINES:
        costs = chunk_costs(job(model, pipeline), int(lengths.max()), NUM_DEVICES // pipeline)
        tokens = lengths.astype(np.float64)
        sums = float(tokens.sum()), float((tokens**2 / 2).sum())
        work = np.array([[law.token_s * sums[0] + law.pair_s * sums[1] for law in s.laws] for s in costs.stages])
        fixed_s = np.array([sum(law.fixed_s for law in stage.laws) for stage in costs.stages])
        fill_s = np.cumsum(work[:, 0]) - work[:, 0]
        for count in MANY_CHUNKS if equal else (pipeline,):
            stages = work.sum(axis=1) + count * fixed_s + (fill_s / count if equal else 0.0)
            found.append((float(stages.max()) + costs.overhead_s, f"{pipeline} x {costs.context}, {count} chunks"))
    return min(found)


def shared(model: Model, longest: int, devices: int, nic: float = NICS[0]) -> tuple[ChunkCosts, float, float]:
    """(costs of the whole model on `devices` that share sequences, tokens that fit, the same recomputing all)."""
    one = job(model, 1)
    costs = JobCosts(model, one.training)
    placed = place_evenly(["a"], [model.num_layers])
    cluster = Cluster(sites=(a800(nic),))
    chunks = job_chunk_costs(costs, Layout(1, 1, 1, 1, 1, 1), placed, cluster, longest, devices)
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


def ulysses(
    model: Model,
    lengths: Any,
    *,
    nic: float = NICS[0],
    zero3: bool = False,
    exposed: bool = False,
    degrees: tuple[int, ...] = (8, 16, 32),
    short: bool = False,
) -> tuple[float, str]:
    """Replicas of equal size: each sequence to the one that is least busy, longest first, packed as far as fits.

    `short`: microbatches of one context length, recomputing all.
    """
    found = [(math.inf, "nothing fits")]
    traffic_s = 6 * model.num_params * (1 - 1 / NUM_DEVICES) / min(NVLINK, nic * 8) if zero3 else 0.0
    for devices in degrees:
        chunks, *fits = shared(model, int(lengths.max()), devices, nic)
        for again, capacity in zip((False, True), fits, strict=True):
            if capacity < lengths.max() or devices > model.num_heads or (short and not again):
                continue
            busy = np.zeros(NUM_DEVICES // devices)
            for seconds in sorted(seconds_of(chunks, lengths, again=again), reverse=True):
                busy[busy.argmin()] += seconds
            packs = math.ceil(lengths.sum() / (lengths.max() if short else capacity) / busy.size)
            fixed = sum(law.fixed_s for law in chunks.stages[0].laws) * packs
            compute_s = float(busy.max()) + fixed
            waits_s = packs * traffic_s if exposed else max(0.0, packs * traffic_s - compute_s)
            what = f"{busy.size} x {devices}, {packs} microbatches, again {again}"
            found.append((compute_s + waits_s + chunks.overhead_s, what))
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


def methods(budget_s: float) -> dict[str, Callable[[Model, Any], tuple[float, str]]]:
    """Everything that is compared, by name; the first is what the others are held against."""
    found: dict[str, Callable[[Model, Any], tuple[float, str]]] = {
        name: partial(best_pipeline, options=replace(options, budget_s=budget_s), searched="searched" in name)
        for name, options in WAYS.items()
    }
    found |= {"bound": partial(bound, equal=False), "bound, equal chunks": partial(bound, equal=True)}
    found |= {"ulysses": ulysses, "ulysses, on 32": partial(ulysses, degrees=(32,))}
    for nic, exposed in product(NICS, (False, True)):
        name = f"ulysses, ZeRO-3, {nic / 1e9:g} GB/s{', exposed' if exposed else ''}"
        found[name] = partial(ulysses, nic=nic, zero3=True, exposed=exposed)
        found[f"{name}, on 32"] = partial(ulysses, nic=nic, zero3=True, exposed=exposed, degrees=(32,))
        found[f"{name}, on 32, short"] = partial(found[f"{name}, on 32"], short=True)
    return found | {"flexsp, ideal": flexsp}


def rows(names: list[str], num_seeds: int, budget_s: float) -> Iterator[dict[str, Any]]:
    """One per model, cut, seed and method."""
    corpus = read_lengths(Path(os.environ["FARPIPE_DATA"]) / "lengths" / "code_gpt2_tokens_half.csv")
    for name, cut, seed in product(names, CUTS, range(num_seeds)):
        lengths = np.minimum(sample_lengths(corpus, BATCH, seed), cut)
        best = math.inf
        for method, call in methods(budget_s).items():
            seconds, what = call(models()[name], lengths)
            best = seconds if method == "elastic" else best
            ratio = round(seconds / best, 3) if math.isfinite(seconds) else None
            facts = {"model": name, "cut": cut, "seed": seed, "way": method, "degrees": what}
            yield facts | {"step_s": round(seconds, 2) if ratio else None, "times_elastic": ratio}


def main() -> None:
    """Print the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=list(models()), default=list(models()))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--budget", type=float, default=20.0, help="Seconds for each plan.")
    parser.add_argument("--rows", type=Path, help="File that gets every row as it comes.")
    arguments = parser.parse_args()
    if "FARPIPE_DATA" not in os.environ:
        print(json.dumps({"skipped": "FARPIPE_DATA is not set: the folder with lengths/code_gpt2_tokens_half.csv"}))
        return
    found = []
    for row in rows(arguments.models, arguments.seeds, arguments.budget):
        found.append(row)
        print(json.dumps(row), file=sys.stderr)
        if arguments.rows is not None:
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(json.dumps({"steps": found}))


if __name__ == "__main__":
    main()
