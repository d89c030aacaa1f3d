"""SlimPipe's exchange of attention over a WAN: what it costs where a pipeline of chunks spans two sites.

    FARPIPE_DATA=... python -m benchmarks.sequences.sequences_wan_exchange --rows ROWS [--models 7b] [--gbits 100]

Sites, links and batches of `sequences_crossover`. `chunks`: the best pipeline of elastic chunks over both sites.
SlimPipe (equal tokens, attention shared out as in `shared_attention`) over both sites: `inside`: each site shares
attention out between its own stages, exposed on their links; `over the WAN`: between all stages, so half of what is
exchanged crosses, all stages of a site on one link, and every layer of every chunk waits for one round trip, forward
and backward. A figure is the step over that of `chunks`, the mean of the draws with its interval (95 %); below 1
SlimPipe is faster. All simulated.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sequences.sequences_crossover import BATCH, LATENCY_S, job
from benchmarks.sequences.sequences_many import read_corpora
from benchmarks.sequences.sequences_paper import models
from benchmarks.sequences.sequences_rivals import interval
from benchmarks.sequences.shared_attention import exchanged_bytes, planning_with, shared_out
from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Model, Pins
from farpipe.planning.cost.chunk_laws import Laws
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.planner.batches import plan_batch
from farpipe.planning.workload import BatchOptions, sample_lengths

INSIDE = "slimpipe, inside sites"
OVER = "slimpipe, over the WAN"
_OVER_BOTH = Pins(data=1, replicas="inside", sites=("a", "b"))


def over_wan(costs: ChunkCosts, sent_bytes: float, bytes_per_s: float) -> ChunkCosts:
    """The same with half of `sent_bytes` of a token and layer on one link for all stages, and a round trip a layer."""
    token_s = sent_bytes / 2 * (costs.num_stages / 2) / bytes_per_s

    def waits(laws: Laws, layers: int) -> Laws:
        both = [
            replace(law, token_s=law.token_s + layers * token_s, fixed_s=law.fixed_s + layers * 2 * LATENCY_S)
            for law in laws[:2]
        ]
        return Laws(*both, laws[2])

    stages = tuple(
        replace(stage, laws=waits(stage.laws, stage.num_layers), layer=waits(stage.layer, 1)) for stage in costs.stages
    )
    return replace(costs, stages=stages)


def slimpipe_s(model: Model, lengths: Any, gbit: float, *, is_over: bool) -> float:
    """Step of one pipeline of equal tokens over both sites."""
    sent_bytes = exchanged_bytes(model)

    def change(costs: ChunkCosts) -> ChunkCosts:
        shared = shared_out(costs, sent_bytes, over_sites=is_over)
        return over_wan(shared, sent_bytes, gbit * 1e9 / 8) if is_over else shared

    pinned = job(model, gbit).model_copy(update={"layout": _OVER_BOTH})
    with planning_with(change):
        return plan_batch(pinned, lengths, BatchOptions(equal="tokens", shrinks=False, may_keep_attention=False)).step_s


def row(name: str, cut: int, gbit: float, draw: int) -> dict[str, Any]:
    """Steps of one batch; None where nothing fits."""
    model = models()[name]
    lengths = np.minimum(sample_lengths(read_corpora()["code"], BATCH, draw), cut)
    pinned = job(model, gbit).model_copy(update={"layout": _OVER_BOTH})
    steps: dict[str, float | None] = {"chunks": plan_batch(pinned, lengths).step_s}
    for method in (INSIDE, OVER):
        try:
            steps[method] = slimpipe_s(model, lengths, gbit, is_over=method == OVER)
        except InfeasibleError:
            steps[method] = None
    return {"model": name, "cut": cut, "gbit": gbit, "draw": draw, "steps": steps}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Ratios of every setting as Markdown."""
    yield f"| model | cut at | Gbit/s | draws | {INSIDE} | {OVER} |"
    yield "|---" * 6 + "|"
    for key in sorted({(row["model"], row["cut"], row["gbit"]) for row in rows}):
        steps = [row["steps"] for row in rows if (row["model"], row["cut"], row["gbit"]) == key]
        cells = [interval([one[name] / one["chunks"] for one in steps if one[name]]) for name in (INSIDE, OVER)]
        yield f"| {' | '.join(map(str, key))} | {len(steps)} | {' | '.join(cells)} |"


def main() -> None:
    """Append rows to a file, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=models(), default=[*models()])
    parser.add_argument("--cuts", nargs="+", type=int, default=[98304])
    parser.add_argument("--gbits", nargs="+", type=int, default=[100])
    parser.add_argument("--draws", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rows", type=Path, required=True, help="File that gets every row as it comes.")
    given = parser.parse_args()
    for draw, cut, gbit, name in product(given.draws, given.cuts, given.gbits, given.models):
        with given.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row(name, cut, gbit, draw)) + "\n")
    print(*table([json.loads(line) for line in given.rows.read_text(encoding="utf-8").splitlines()]), sep="\n")


if __name__ == "__main__":
    main()
