"""InfiniPipe's settings (arXiv 2509.21275): 4 nodes of 8 A800, Llama of 7B, 13B and 30B, 512 sequences a step, cut at
48K and 96K tokens. Step time of chunks planned by farpipe beside other methods to train the same batch, all under
farpipe's cost model, each at its best over its degrees, over several draws of several corpora. The limits to hold this
against: the paper's measured ratios: 1.27 (48K) and 1.40 (96K) over fixed chunks with static checkpointing, at most
2.07 over Ulysses, 1.69 over FlexSP at 30B and 48K.

    FARPIPE_DATA=... python -m benchmarks.sequences.sequences_paper [--models 7b 13b 30b] [--draws 1 2 3] [--rows FILE]

Corpora: code files, Wikipedia articles, and as many of each (`mixed`); the paper's GitHub corpus is not published. Draw
0 of code files is the one that the planner was made with, so it is not among them. All methods of a batch have the same
sequences; a ratio is that of two steps of one batch.

`fixed, adaptive`: slices and chunks of equal tokens (Seq1F1B), their size tuned, recomputation by chunk as ours.
`fixed, static`: the same with the fewest layers recomputed that fit, equal everywhere. `whole, full`: no sequence is
cut, all is recomputed (a batch-level pipeline). The order of `as many in flight` and of all that are fixed keeps as
many chunks in flight as the longest sequence needs to the end, as Seq1F1B and InfiniPipe do; farpipe's has fewer where
the longest sequences are over. `searched` and `fixed, searched`: the plans of `elastic` and `fixed, adaptive`, and
those of one number of slices below and above, in the best of the named orders and of list scheduling (`[schedule]
method = "chunk-search"`); they are held against each other, for the first draw of code files only. `literal packing`:
InfiniPipe's Algorithm 1, whose limit of tokens is that of the longest slice. `bound`: what no plan on these degrees can
be faster than, whatever its chunks and order: all work of the slowest stage and the step's overhead, in as few chunks
as there are stages. `bound, equal chunks`: the same with the fixed times of the best number of chunks, and the first of
them on its way to that stage, but nothing idle behind it.

`ulysses`: replicas of 2 to 32 devices that share sequences, packed and balanced over the replicas, recomputing nothing
or all, all states sharded over all devices, which costs nothing here. Where heads can't be divided evenly (52 of 30B by
8) the devices with most of them set the pace. `ulysses, ZeRO-3, ... GB/s`: the same as DeepSpeed runs it, with
parameters gathered for every microbatch's forward and backward and gradients scattered after it, 6 bytes a parameter,
over NICs of so many GB/s for each device; hidden behind the microbatches' compute as far as that lasts, or not at all
(`exposed`), with microbatches of one context length, all recomputed, on all 32 devices in one group. `flexsp, ideal`:
each sequence on the devices that make it cheapest, all always busy: a bound that no grouping can beat.

NVLink of an A800 has 200 GB/s in each direction; its NICs are not known, and taken for the catalogue's where nothing
else is said.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sequences.sequences_many import read_corpora
from benchmarks.sequences.sequences_planning import searched_s
from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.spec import Cluster, Job, Model, Pins, Site, Training, preset_model, preset_site
from farpipe.planning.cost import JobCosts, Layout, place_evenly
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.cost.job_chunks import job_chunk_costs
from farpipe.planning.workload import BatchOptions, SequencePlan, chunk_costs, plan_sequences, sample_lengths

NUM_DEVICES, BATCH = 32, 512
CUTS = (49152, 98304)
LLAMA_30B = {"num_layers": 60, "hidden": 6656, "num_heads": 52, "ffn_hidden": 17920, "vocab_size": 32000}
PIPELINES = (4, 8, 16)
NVLINK = 200e9
"""Of an A800, bytes/s in each direction (400 GB/s in both)."""
NICS = (50e9, 12.5e9)
"""Bytes/s for each device; the first is the catalogue's."""
SEARCH_S = 2.0
NEAR = 1.02
"""Orders are searched for degrees whose plan is so near the best one's step."""
MORE_SLICES = 1
MANY_CHUNKS = range(1, 2000)
_PUBLISHED = BatchOptions(shrinks=False, may_keep_attention=False)
"""Options of others' methods, whose recomputed layers keep nothing."""
SEARCHED = {"searched": BatchOptions(), "fixed, searched": replace(_PUBLISHED, equal="tokens")}
WAYS = {
    "elastic": BatchOptions(),
    "as many in flight": BatchOptions(shrinks=False),
    "literal packing": replace(_PUBLISHED, rule="literal"),
    "fixed, adaptive": replace(_PUBLISHED, equal="tokens"),
    "fixed, static": replace(_PUBLISHED, equal="tokens", checkpointing="uniform", several_pipelines=False),
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


def pipelines(model: Model) -> list[int]:
    """Stages whose devices can share heads."""
    return [stages for stages in PIPELINES if model.divides_heads(NUM_DEVICES // stages)]


def a800(nic: float = NICS[0]) -> Site:
    """The paper's machines, with NICs of so many bytes/s for each device."""
    site = preset_site("a", "a100-80gb", NUM_DEVICES)
    machine = site.machine_link.model_copy(update={"bandwidth_bytes_per_s": NVLINK})
    between = site.site_link.model_copy(update={"bandwidth_bytes_per_s": nic})
    return site.model_copy(update={"machine_link": machine, "site_link": between})


def best_pipeline(model: Model, lengths: Any, options: BatchOptions, *, searched: bool) -> tuple[float, str]:
    """(step time, degrees) of one method at its best; infinite where nothing fits."""
    found: list[tuple[float, str, ChunkCosts, SequencePlan]] = []
    for pipeline in pipelines(model):
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
    yield searched_s(plan, SEARCH_S), described(costs, plan)
    for count in range(max(1, plan.num_slices - MORE_SLICES), plan.num_slices + MORE_SLICES + 1):
        with suppress(InfeasibleError, InputError):
            other = plan_sequences(costs, lengths, replace(options, num_slices=count))
            yield searched_s(other, SEARCH_S), described(costs, other)


def described(costs: ChunkCosts, plan: SequencePlan) -> str:
    """Degrees and chunks of a plan in words."""
    return f"{costs.num_stages} x {costs.context}, {plan.num_slices} slices, {len(plan.chunks)} chunks"


def bound(model: Model, lengths: Any, *, equal: bool) -> tuple[float, str]:
    """The least that the slowest stage has to do; `equal`: it waits until a chunk has come through the others."""
    found = []
    for pipeline in pipelines(model):
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
    """(costs of the whole model on `devices` that share sequences, tokens that fit, the same recomputing all).

    Outside the pipeline there is the optimizer alone, on all devices: gradients are summed for nothing.
    """
    one = job(model, 1)
    costs = JobCosts(model, one.training)
    placed = place_evenly(["a"], [model.num_layers])
    cluster = Cluster(sites=(a800(nic),))
    alone, chunks = (
        job_chunk_costs(costs, Layout(1, 1, 1, 1, 1, 1), placed, cluster, longest, each) for each in (1, devices)
    )
    return replace(chunks, overhead_s=alone.overhead_s / NUM_DEVICES), *capacities(model, chunks)


def capacities(model: Model, chunks: ChunkCosts) -> tuple[float, float]:
    """(tokens that fit one stage, the same recomputing all layers), all states sharded over all devices."""
    stage, room = chunks.stages[0], a800().plannable_bytes - 18 * model.num_params / NUM_DEVICES
    least = stage.activation_bytes - model.num_layers * stage.saved_bytes + stage.working_bytes
    return room / stage.activation_bytes, room / least


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
    degrees: tuple[int, ...] = (2, 4, 8, 16, 32),
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


def methods(*, searched: bool) -> dict[str, Callable[[Model, Any], tuple[float, str]]]:
    """Everything that is compared, by name; the first is what the others are held against."""
    found: dict[str, Callable[[Model, Any], tuple[float, str]]] = {
        name: partial(best_pipeline, options=options, searched=name in SEARCHED)
        for name, options in (WAYS | (SEARCHED if searched else {})).items()
    }
    found |= {"bound": partial(bound, equal=False), "bound, equal chunks": partial(bound, equal=True)}
    found |= {"ulysses": ulysses, "flexsp, ideal": flexsp}
    for nic, exposed in product(NICS, (False, True)):
        name = f"ulysses, ZeRO-3, {nic / 1e9:g} GB/s{', exposed' if exposed else ''}"
        found[name] = partial(ulysses, nic=nic, zero3=True, exposed=exposed, degrees=(32,), short=True)
    return found


def batches(draws: list[int]) -> Iterator[tuple[str, int, Any]]:
    """Corpus, draw and uncut lengths of every batch."""
    corpora = read_corpora()
    for draw in draws:
        drawn = {name: sample_lengths(corpus, BATCH, draw) for name, corpus in corpora.items()}
        drawn["mixed"] = np.concatenate([lengths[: BATCH // 2] for lengths in drawn.values()])
        yield from ((name, draw, lengths) for name, lengths in drawn.items())


def rows(names: list[str], draws: list[int]) -> Iterator[dict[str, Any]]:
    """One per model, cut, batch and method."""
    for (corpus, draw, uncut), name, cut in product(list(batches(draws)), names, CUTS):
        lengths = np.minimum(uncut, cut)
        steps: dict[str, float] = {}
        for method, call in methods(searched=(corpus, draw) == ("code", draws[0])).items():
            steps[method], what = call(models()[name], lengths)
            beside = steps["searched" if method == "fixed, searched" else "elastic"]
            ratio = round(steps[method] / beside, 3) if math.isfinite(steps[method]) else None
            facts = {"corpus": corpus, "draw": draw, "model": name, "cut": cut, "way": method, "degrees": what}
            yield facts | {"step_s": round(steps[method], 2) if ratio else None, "ratio": ratio}


def table(found: list[dict[str, Any]], names: list[str]) -> Iterator[str]:
    """Ratios over all draws, from the least to the most, as Markdown."""
    yield f"| corpus | model | cut at | elastic, s | {' | '.join(names)} |"
    yield "|---" * (4 + len(names)) + "|"
    for key in dict.fromkeys((row["corpus"], row["model"], row["cut"]) for row in found):
        mine = [row for row in found if (row["corpus"], row["model"], row["cut"]) == key]
        cells = [spread([row["ratio"] for row in mine if row["way"] == name]) for name in names]
        steps = spread([row["step_s"] for row in mine if row["way"] == "elastic"])
        yield f"| {' | '.join(map(str, key))} | {steps} | {' | '.join(cells)} |"


def spread(values: list[float | None]) -> str:
    """``1.01 to 1.03``; a dash where nothing fits."""
    known = [f"{value:.2f}" for value in sorted(value for value in values if value is not None)]
    return " to ".join(dict.fromkeys([known[0], known[-1]])) if known else "–"


def main() -> None:
    """Print the table of ratios and, with --rows, keep every row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=list(models()), default=list(models()))
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", type=Path, help="File that gets every row as it comes.")
    arguments = parser.parse_args()
    found = []
    for row in rows(arguments.models, arguments.draws):
        found.append(row)
        if arguments.rows is not None:
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(*table(found, list(dict.fromkeys(row["way"] for row in found))[1:]), sep="\n")


if __name__ == "__main__":
    main()
