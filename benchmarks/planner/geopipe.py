"""GeoPipe's setting: Llama-2 on 8 stages of 8 Ascend 910B, four at each of two sites, by distance, bandwidth, memory.
Step time and bubble of 1F1B, of GeoPipe's order and of the joint choice of microbatch size, recomputation by stage,
placement and order. The limit to hold this against: arXiv 2510.12064 reports up to 78.91 % less bubble than 1F1B, and
about 9.1 % less step time.

    python -m benchmarks.planner.geopipe [--plot PICTURE.svg]

Tensor parallelism stays inside a machine, so only the pipeline crosses between the sites; 4.9 us/km one way, no loss.
Every step has the same 64 sequences of 4096 tokens. `1f1b` is what that paper compares with: one sequence per
microbatch, 1F1B's warm-up, as little recomputation as 1F1B's memory allows; messages never block a rank, as farpipe's
engine sends them, so it is faster than a 1F1B that waits for its sends. `geopipe` has the same microbatches and, as far
as memory lets it, the extra warm-up forwards of the paper. The bubble is the share of the ranks' time that is not
computing. It flatters: larger microbatches and recomputation change the work, so look at the step time first.
The times come from the cost model, whose constants for this device were never compared with a measured step.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from farpipe import planning
from farpipe.core.errors import InfeasibleError
from farpipe.core.simulate import simulate
from farpipe.core.spec import Cluster, Job, Pins, SiteLink, Training, preset_model, preset_site
from farpipe.planning import Plan
from farpipe.planning.planner.bandwidth import link_bounds

S_PER_KM = 4.9e-6
SEQUENCE_LENGTH, GLOBAL_BATCH = 4096, 64
PUBLISHED_REDUCTION = 0.7891
MODELS = ("llama-2-13b", "llama-2-70b")
DISTANCES_KM = (100, 1000, 3000)
RATES_GBIT_PER_S = (50, 400)
MEMORIES_GIB = (32, 64)
SENSITIVITY_CASE = ("llama-2-13b", 1000, 64)
"""Of the curve: model, distance, memory."""
KNEE_GBIT_PER_S = (4, 5, 7, 8, 10, 14, 20, 28, 40, 57, 80, 113, 160, 226, 320, 453, 640)
COLOURS = {"1f1b": "#b3543b", "geopipe": "#3b6fb3", "joint": "#2f8f5b"}


def job(model: str, km: float, gbit_per_s: float, memory_gib: float, **choice: Any) -> Job:
    """One job of the grid; `choice` pins the microbatch size, the order and the stages per rank."""
    rate, latency_s = gbit_per_s * 1e9 / 8, km * S_PER_KM
    sites = [preset_site(name, "ascend-910b", 32) for name in ("a", "b")]
    sites = [
        s.model_copy(update={"device": s.device.model_copy(update={"memory_bytes": memory_gib * 2**30})}) for s in sites
    ]
    links = [SiteLink(source=a, target=b, latency_s=latency_s, bandwidth_bytes_per_s=rate) for a, b in ("ab", "ba")]
    return Job(
        model=preset_model(model),
        training=Training(
            sequence_length=SEQUENCE_LENGTH, global_batch=GLOBAL_BATCH, microbatch_size=choice.get("microbatch_size")
        ),
        cluster=Cluster(sites=tuple(sites), links=tuple(links)),
        layout=Pins(pipeline=8, data=1, tensor=8, sites=("a", "b"), virtual=choice.get("virtual")),
        schedule=choice.get("schedule"),
    )


WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "microbatch_size": 1},
    "geopipe": {"schedule": "geopipe", "microbatch_size": 1},
    "joint": {},
}
"""Pins of each column."""


def plans(*setting: Any) -> dict[str, Plan]:
    """The plan of every column that fits memory."""
    found = {}
    for name, pins in WAYS.items():
        try:
            found[name] = planning.plan(job(*setting, **pins))
        except InfeasibleError:
            continue
    return found


def choice(plan: Plan) -> str:
    """The joint choice, in words."""
    placed = ", two stages per rank in a V" if plan.layout.virtual == 2 else ""
    counted = [plan.recompute.count(way) for way in ("full", "selective")]
    recompute = "nothing" if not any(counted) else f"{counted[0]} of {len(plan.recompute)} stages"
    return f"{plan.schedule.method}{placed}, microbatch {plan.layout.microbatch_size}, recomputes {recompute}"


def row(found: dict[str, Plan]) -> str:
    """One line of the table: step time and bubble of each, what was saved, what was chosen."""
    cells = [f"{name} {p.prediction.step_s:.2f} s, {p.prediction.bubble_ratio:.1%}" for name, p in found.items()]
    seconds = steps(found)
    saved = f"joint - 1f1b: bubble {-reduction(found):+.1%}, time {seconds['joint'] / seconds['1f1b'] - 1:+.1%}"
    return "; ".join([*cells, saved, choice(found["joint"])])


def steps(found: dict[str, Plan]) -> dict[str, float]:
    """Seconds of a step."""
    return {name: plan.prediction.step_s for name, plan in found.items()}


def reduction(found: dict[str, Plan]) -> float:
    """Reduction of the bubble by the joint choice, relative to that of 1F1B."""
    return 1 - found["joint"].prediction.bubble_ratio / found["1f1b"].prediction.bubble_ratio


def is_plain(found: dict[str, Plan]) -> bool:
    """True if the joint choice differs from GeoPipe's configuration in order and placement alone."""
    joint = found["joint"]
    return joint.layout.microbatch_size == 1 and set(joint.recompute) == {"none"}


def bandwidth_sensitivity() -> dict[float, dict[str, float]]:
    """Seconds of a step by bandwidth, each time planned anew."""
    model, km, memory_gib = SENSITIVITY_CASE
    return {rate: steps(plans(model, km, rate, memory_gib)) for rate in KNEE_GBIT_PER_S}


def link_bound_gbit_per_s() -> float:
    """Bandwidth at which x = tf + tb for microbatches of one sequence: below, the step is link-bound."""
    model, km, memory_gib = SENSITIVITY_CASE
    plan = planning.plan(job(model, km, 1e-2, memory_gib, **WAYS["1f1b"]))
    return (
        max(bound.enough_bytes_per_s for bound in link_bounds(plan.problem, simulate(plan.problem, plan.schedule)))
        * 8
        / 1e9
    )


def draw(curve: dict[float, dict[str, float]], bound: float, path: Path) -> None:
    """The curve as a picture; needs matplotlib (the extra ``plot``)."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "farpipe"
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, colour in COLOURS.items():
        axes.plot(list(curve), [found[name] for found in curve.values()], "o-", ms=3, color=colour, label=name)
    axes.axvline(bound, color="#888888", ls=":", lw=1)
    axes.annotate("x = tf + tb", (bound, axes.get_ylim()[1]), (4, -12), textcoords="offset points", color="#555555")
    axes.set_xscale("log")
    axes.set_xticks([5, 10, 20, 50, 100, 200, 500], labels=["5", "10", "20", "50", "100", "200", "500"])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bandwidth between the sites, Gbit/s")
    axes.set_ylabel("seconds a step")
    axes.set_title(
        f"{SENSITIVITY_CASE[0]}, 8 stages of 8 Ascend 910B, {SENSITIVITY_CASE[1]} km between the sites", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the table and the curve as JSON, and draw the curve where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="where to draw the curve, as SVG")
    target = parser.parse_args().plot
    table = {}
    for model, km, rate, memory_gib in product(MODELS, DISTANCES_KM, RATES_GBIT_PER_S, MEMORIES_GIB):
        table[f"{model}, {km} km, {rate} Gbit/s, {memory_gib} GiB"] = plans(model, km, rate, memory_gib)
        print(len(table), end=" ", file=sys.stderr, flush=True)
    best = max((name for name in table if is_plain(table[name])), key=lambda name: reduction(table[name]))
    curve, bound = bandwidth_sensitivity(), link_bound_gbit_per_s()
    if target is not None:
        draw(curve, bound, target)
    result = {
        "benchmark": "geopipe",
        "step time and bubble": {name: row(found) for name, found in table.items()},
        "most bubble saved with the same microbatches and no recomputation": f"{best}: {reduction(table[best]):.2%}",
        "published reduction": PUBLISHED_REDUCTION,
        "link-bound below, Gbit/s": bound,
        "seconds a step by bandwidth": {
            f"{rate} Gbit/s": ", ".join(f"{name} {seconds:.2f}" for name, seconds in found.items())
            for rate, found in curve.items()
        },
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
