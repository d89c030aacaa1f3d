"""Kinds of long links and their effect on the plan: one training at two sites, 100 to 3000 km of fibre apart.

    python -m benchmarks.optical.long_haul [--model llama-2-13b] [--plot PICTURE.svg]

64 A100 at two sites, 400 Gbit/s between them; every kind of `[[cluster.links]]` at every distance is planned from a
job.toml, with all that the planner may choose (sites, layout, recomputation, order), and once more with 1F1B. Per row:
the rate that the kind leaves, the plan, its order and microbatches, step time, the link's utilisation (share of the
step in which it is busy at the rate that is left, and of the 400 Gbit/s), and 1F1B's step. `alone`: the best plan at
one site. Prints Markdown.
"""

import argparse
from collections.abc import Iterable
from typing import Any

from farpipe import planning
from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Job, parse_job
from farpipe.planning import Plan

KM = (100, 300, 1000, 2000, 3000)
BANDWIDTH = 400e9 / 8
KINDS = {
    "TCP, 8 streams of 2.7 MB": "streams = 8",
    "TCP, 64 streams of 2.7 MB": "streams = 64",
    "RDMA, window 16 MB": 'kind = "rdma"',
    "RDMA, window 256 MB": 'kind = "rdma"\nwindow = "256 MB"',
    "RDMA, source acknowledges": 'kind = "rdma"\nacknowledged = "source"',
    "the same, budget 100 Gbit/s": 'kind = "rdma"\nacknowledged = "source"\nbudget = "100 Gbit/s"',
    "lossless OTN": 'kind = "lossless-otn"',
    "lossless OTN, buffer 100 MB": 'kind = "lossless-otn"\nbuffer = "100 MB"',
}
HEADS = ("km", "kind of link", "Gbit/s", "plan", "order", "m", "step s", "link busy", "of 400 Gbit/s", "1f1b s")
JOB = """
[model]
preset = "{model}"
[training]
sequence_length = 4096
global_batch = 128
[[cluster.sites]]
name = "a"
device = "a100-80gb"
num_devices = 32
[[cluster.sites]]
name = "b"
device = "a100-80gb"
num_devices = 32
[[cluster.links]]
between = ["a", "b"]
fibre_km = {km}
bandwidth = "400 Gbit/s"
{link}
[layout]
{layout}
[schedule]
method = "{method}"
"""


def job(model: str, km: float, link: str, method: str = "auto", sites: str = '["a", "b"]') -> Job:
    return parse_job(JOB.format(model=model, km=km, link=link, method=method, layout=f"sites = {sites}"))


def layout_of(plan: Plan) -> str:
    layout = plan.layout
    return f"{layout.pipeline} x {layout.data} x {layout.tensor}" + (" in a V" if layout.virtual == 2 else "")


def busy(plan: Plan, rate: float) -> float:
    """Largest share of the step in which a link between the sites is busy."""
    return max(num_bytes / rate / plan.prediction.step_s for num_bytes in plan.prediction.link_bytes.values())


def row(model: str, km: float, kind: str) -> tuple[list[str], float]:
    there = job(model, km, KINDS[kind])
    rate = there.cluster.links[0].bandwidth_bytes_per_s
    plan, usual = planning.plan(there), _or_none(job(model, km, KINDS[kind], "1f1b"))
    share, step_s = busy(plan, rate), plan.prediction.step_s
    cells = [f"{km:g}", kind, f"{rate * 8e-9:.1f}", layout_of(plan), plan.schedule.method]
    cells += [f"{plan.problem.num_microbatches} of {plan.layout.microbatch_size}", f"{step_s:.3f}", f"{share:.1%}"]
    cells += [f"{share * rate / BANDWIDTH:.1%}", f"{usual.prediction.step_s:.3f}" if usual else "does not fit"]
    return cells, step_s


def _or_none(one: Job) -> Plan | None:
    try:
        return planning.plan(one)
    except InfeasibleError:
        return None


def draw(path: str, steps: dict[str, list[float]], alone_s: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for (kind, seconds), style in zip(steps.items(), _styles(), strict=False):
        axes.plot(KM, seconds, label=kind, **style)
    axes.axhline(alone_s, color="grey", linestyle=":", label="one site alone")
    axes.set_xlabel("fibre between the sites, km")
    axes.set_ylabel("step time of the best plan over both sites, s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(path)


def _styles() -> Iterable[dict[str, Any]]:
    markers = ("o", "s", "^", "v", "D", "P", "x", "*")
    return [{"marker": marker, "markersize": 5, "linewidth": 1.2} for marker in markers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-2-13b")
    parser.add_argument("--km", type=float, nargs="+", default=KM)
    parser.add_argument("--plot")
    args = parser.parse_args()
    alone = planning.plan(job(args.model, 100, "", sites='["a"]'))
    print(f"{args.model}, one site alone: {alone.prediction.step_s:.3f} s, {layout_of(alone)}\n")
    print("| " + " | ".join(HEADS) + " |\n|" + "---|" * len(HEADS), flush=True)
    steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for km in args.km:
        for kind in KINDS:
            cells, step_s = row(args.model, km, kind)
            steps[kind].append(step_s)
            print("| " + " | ".join(cells) + " |", flush=True)
    if args.plot:
        draw(args.plot, steps, alone.prediction.step_s)


if __name__ == "__main__":
    main()
