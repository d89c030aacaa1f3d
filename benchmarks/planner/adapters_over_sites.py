"""Adapters instead of all weights: what that does to the verdict between one site, replicas and a pipeline over two.

Llama-3-8B and 70B in bf16 at two sites of 16 H100 (batch 128, 4,096 tokens), 20 ms apart, over 1, 10 and 100 Gbit/s;
LoRA of rank 16 beside all linear maps, and all weights. Steps are predictions for the best layout of each kind, with
the bytes that a step sends between the sites. Prints JSON.

    python -m benchmarks.planner.adapters_over_sites
"""

import json
from itertools import product
from typing import Any, Final

from benchmarks.shared.jobs import job_head, link_table
from farpipe.core.spec import Job, parse_job
from farpipe.planning.explain.strategies import strategies_of
from farpipe.planning.planner.find import find

MODELS: Final = ("llama-3-8b", "llama-3-70b")
GBITS: Final = (1, 10, 100)
TRAINED: Final = {"adapters": "[training.lora]\nrank = 16\n", "all weights": ""}
KINDS: Final = ("one site", "replicas", "pipeline")


def job(model: str, gbit: int, lora: str) -> Job:
    """The training over two sites."""
    head = job_head(model, 4096, 128, (16, 16), "h100-sxm", 'precision = "bf16"')
    training, sites = head.split("[[cluster.sites]]", 1)
    return parse_job(f"{training}{lora}[[cluster.sites]]{sites}" + link_table("s0", "s1", "20 ms", f"{gbit} Gbit/s"))


def measure(model: str, gbit: int, trained: str) -> dict[str, Any]:
    """One line: the best step of each kind of layout with the same training, and the bytes between the sites."""
    (found, *_), line = find(asked := job(model, gbit, TRAINED[trained])), dict[str, Any]()
    every, _ = strategies_of(asked, found.found.costs, found.ranked)
    same = [one for one in every if one.same_training]
    for kind in KINDS:
        best = min((one for one in same if one.kind == kind), key=lambda one: one.step_s, default=None)
        line[kind] = None if best is None else round(best.step_s, 3)
        line[f"{kind}, MB sent"] = None if best is None else round(best.inter_site_bytes / 1e6, 1)
    return {
        "model": model,
        "trained": trained,
        "Gbit/s": gbit,
        **line,
        "best": min(same, key=lambda one: one.step_s).kind,
    }


def main() -> None:
    lines = [measure(model, gbit, trained) for model, trained, gbit in product(MODELS, TRAINED, GBITS)]
    print(json.dumps({"adapters_over_sites": lines}))


if __name__ == "__main__":
    main()
