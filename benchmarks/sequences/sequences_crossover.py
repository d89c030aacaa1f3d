"""Chunks over two sites, or a replica at each: which is faster, by bandwidth, model and context length.

    FARPIPE_DATA=... python -m benchmarks.sequences.sequences_crossover --rows ROWS [--models 7b] [--cuts 49152]
    python -m benchmarks.sequences.sequences_crossover --rows ROWS --table [--plot FILE.svg]

Two sites of 16 A100 with 80 GB, 20 ms apart; 512 code files a step, cut at 48K, 128K and 256K tokens, gradients summed
in bf16. Each setting is planned once with all free; a row has the best plan of every kind that the planner of batches
finds: `pipeline` sends chunks over the sites; `replicas` have whole pipelines, or none, in each site (Ulysses, tensor
parallelism, ZeRO-1 or 3, groups of several context degrees), and gradients cross, beside the last backward as far as
that lasts.
Ratios above 1: chunks over the sites are faster. `whole`: the best pipeline over the sites of documents that stay whole
(a second table has its step over that of chunks). Simulated.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sequences.sequences_many import read_corpora
from benchmarks.sequences.sequences_paper import models
from benchmarks.sequences.sequences_rivals import interval
from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Cluster, Job, Model, Pins, SiteLink, Training, preset_model, preset_site
from farpipe.planning.planner.batches import plan_batch
from farpipe.planning.workload import BatchOptions, BatchPlan, sample_lengths

CUTS = (49152, 131072, 262144)
GBITS = (10, 25, 50, 100, 200)
BATCH, DEVICES, LATENCY_S = 512, 16, 0.02
KINDS = {"pipeline": "pipeline over sites", "replicas": "replicas across sites"}


def job(model: Model, gbit: float) -> Job:
    """The training on both sites, else free in its layout."""
    ends, rate = (("a", "b"), ("b", "a")), gbit * 1e9 / 8
    links = tuple(SiteLink(source=a, target=b, latency_s=LATENCY_S, bandwidth_bytes_per_s=rate) for a, b in ends)
    sites = tuple(preset_site(name, "a100-80gb", DEVICES) for name in "ab")
    return Job(
        model=model,
        training=Training(sequence_length=max(CUTS), global_batch=BATCH, grad_reduce_in_fp32=False),
        cluster=Cluster(sites=sites, links=links),
        layout=Pins(sites=("a", "b")),
    )


def row(model: Model, cut: int, gbit: float, draw: int) -> dict[str, Any]:
    """Step and layout of every kind's best plan; None where nothing fits."""
    lengths = np.minimum(sample_lengths(read_corpora()["code"], BATCH, draw), cut)
    plans, whole = (planned(job(model, gbit), lengths, number) for number in (None, 1))
    found = {name: described([plan for plan in plans if plan.kind.startswith(kind)]) for name, kind in KINDS.items()}
    return found | {"whole": described([plan for plan in whole if plan.kind.startswith(KINDS["pipeline"])])}


def planned(request: Job, lengths: Any, num_slices: int | None) -> Sequence[BatchPlan]:
    """The best plan of every kind, the fastest first; none where nothing fits."""
    try:
        best = plan_batch(request, lengths, BatchOptions(num_slices=num_slices))
    except InfeasibleError:
        return ()
    return (best, *best.others)


def described(plans: Sequence[BatchPlan]) -> dict[str, Any] | None:
    """The first, the fastest, in figures."""
    if not plans:
        return None
    one = plans[0]
    return {"step_s": round(one.step_s, 3), "degrees": one.degrees, "slices": one.num_slices}


def ratio(found: dict[str, Any], rival: str) -> float:
    """Step of the rival over that of chunks over the sites; infinite if the rival does not fit, NaN if neither does."""
    steps = [(found.get(name) or {"step_s": np.inf})["step_s"] for name in (rival, "pipeline")]
    return float(np.nan if min(steps) == np.inf else steps[0] / steps[1])


def table(rows: Sequence[dict[str, Any]], rival: str) -> Iterator[str]:
    """Ratios as Markdown, bandwidth to the right; the mean of the draws with its interval."""
    yield f"| model | cut at | draws | {' | '.join(f'{gbit} Gbit/s' for gbit in GBITS)} |"
    yield "|---" * (3 + len(GBITS)) + "|"
    for model, cut in dict.fromkeys((found["model"], found["cut"]) for found in rows):
        found = ratios(rows, model, cut, rival)
        yield f"| {model} | {cut} | {max(map(len, found.values()))} | {' | '.join(map(cell, found.values()))} |"


def ratios(rows: Sequence[dict[str, Any]], model: str, cut: int, rival: str) -> dict[int, list[float]]:
    """`ratio` of every draw that has it, by bandwidth."""
    mine = [found for found in rows if (found["model"], found["cut"]) == (model, cut) and rival in found]
    return {gbit: [ratio(found, rival) for found in mine if found["gbit"] == gbit] for gbit in GBITS}


def cell(values: Sequence[float]) -> str:
    """``1.36 ± 0.02``, and what fits where one of the two does not in some draw."""
    if not values:
        return ""
    if np.isfinite(values).all():
        return interval(values)
    return "none fits" if np.isnan(values).any() else "chunks only"


def draw_map(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each context length, bandwidth to the right, a line for each model; bars from the least draw to the
    most."""
    from matplotlib import pyplot as plt

    cuts = sorted({found["cut"] for found in rows})
    figure, grid = plt.subplots(
        1, len(cuts), figsize=(1 + 3.5 * len(cuts), 3.6), sharey=True, layout="constrained", squeeze=False
    )
    panels = grid[0]
    for panel, cut in zip(panels, cuts, strict=True):
        for model in dict.fromkeys(found["model"] for found in rows):
            every = ratios(rows, model, cut, "replicas")
            found = {gbit: values for gbit, values in every.items() if values and np.isfinite(values).all()}
            if found:
                means = np.array([np.mean(values) for values in found.values()])
                ends = np.array([(min(values), max(values)) for values in found.values()]).T
                spread = np.abs(ends - means)
                panel.errorbar(list(found), means, spread, marker="o", markersize=3, capsize=2, label=model)
        panel.axhline(1, color="#555", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_xticks(GBITS, [str(gbit) for gbit in GBITS])
        panel.minorticks_off()
        panel.set_title(f"documents cut at {cut // 1024}K tokens")
        panel.set_xlabel("Gbit/s between the sites")
    panels[0].set_ylabel("step of a replica at each site\n/ step of chunks over the sites")
    panels[0].legend()
    figure.savefig(path)


def main() -> None:
    """Write a row for every setting, or print the table of those that are there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    known = models() | {"70b": preset_model("llama-3-70b")}
    parser.add_argument("--models", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--cuts", type=int, nargs="+", default=CUTS)
    parser.add_argument("--gbits", type=int, nargs="+", default=GBITS)
    parser.add_argument("--draws", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=Path, required=True, help="File that gets every row as it comes.")
    parser.add_argument("--table", action="store_true", help="Print and plot the rows that are there.")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    lines = arguments.rows.read_text(encoding="utf-8").splitlines() if arguments.rows.exists() else []
    keys = ("model", "cut", "gbit", "draw")
    done = [[one[key] for key in keys] for one in map(json.loads, lines)]
    if not arguments.table:
        for draw, cut, gbit, name in product(arguments.draws, arguments.cuts, arguments.gbits, arguments.models):
            facts = {"model": name, "cut": cut, "gbit": gbit, "draw": draw}
            if [facts[key] for key in keys] in done:
                continue
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(facts | row(known[name], cut, gbit, draw)) + "\n")
    rows = sorted(
        map(json.loads, arguments.rows.read_text(encoding="utf-8").splitlines()),
        key=lambda found: (list(known).index(found["model"]), found["cut"], found["gbit"]),
    )
    for rival in ("replicas", "whole"):
        print(*table(rows, rival), sep="\n")
    if arguments.plot is not None:
        draw_map(rows, arguments.plot)


if __name__ == "__main__":
    main()
