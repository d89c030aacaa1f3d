"""Pipelines over slow links, measured by others, as jobs over as many sites: `dtfm-slow-links` of turn4_rows.csv."""

from pathlib import Path
from typing import Final

from benchmarks.cost_model.narrow_steps import Row, rows
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.spec import parse_job
from farpipe.planning.cost import JobCosts, Layout, place_evenly, step_cost

VOCABULARY: Final = 256
"""The rows are of a classification; a head as small as this takes no time."""
JOB: Final = """
[model]
num_layers = {layers}
hidden = {hidden}
num_heads = {heads}
ffn_hidden = {ffn}
vocab_size = {vocab}
gated_mlp = false
norm = "layernorm"
positions = "learned"
max_sequence_length = {seq}
bias = true
[training]
sequence_length = {seq}
global_batch = {gbs}
microbatch_size = {mbs}
precision = "{precision}"
recompute = "full"
kernels = "eager"
flash_attention = false
overlap = false
zero = 0
"""
SITE: Final = '[[cluster.sites]]\nname = "r{index}"\ndevice = "v100-16gb"\nnum_devices = 1\n'
LINK: Final = '[[cluster.links]]\nbetween = ["r{index}", "r{next}"]\nlatency = "{latency}"\nbandwidth = "{bandwidth}"\n'


def predicted_s(row: Row) -> float:
    """The step of a row, each of whose devices is a site; where it names several links the first is the farthest."""
    last = int(row["PP"]) - 1
    links = list(zip(row["link_latency"].split("; "), row["link_bandwidth"].split("; "), strict=True))
    text = JOB.format(**row | {"vocab": VOCABULARY})
    text += "".join(SITE.format(index=index) for index in range(last + 1))
    for index in range(last):
        latency, bandwidth = links[min(index, len(links) - 1)]
        text += LINK.format(index=index, next=index + 1, latency=latency, bandwidth=_mean_rate(bandwidth))
    job = parse_job(text)
    layout = Layout(last + 1, 1, 1, 1, int(row["mbs"]), int(row["gbs"]) // int(row["mbs"]))
    places = place_evenly([site.name for site in job.cluster.sites], _even(int(row["layers"]), last + 1), "full")
    step = step_cost(JobCosts(job.model, job.training), layout, places, job.cluster)
    return simulate(step.problem, order(row["schedule"], step.problem)).makespan_s + step.overhead_s


def _even(num_layers: int, num_stages: int) -> list[int]:
    each, more = divmod(num_layers, num_stages)
    return [each + (stage < more) for stage in range(num_stages)]


def _mean_rate(bandwidth: str) -> str:
    """The middle of ``0.79 to 1.15 Gbit/s``; any other rate as it is."""
    low, to, high = bandwidth.removesuffix(" Gbit/s").partition(" to ")
    return f"{(float(low) + float(high or low)) / 2} Gbit/s" if to else bandwidth


def link_ratios(base: Path) -> list[float]:
    """Seconds that slower links add to a step, measured over predicted, beside the same step over the fastest ones."""
    same: dict[tuple[str, ...], list[Row]] = {}
    for row in rows(base / "published" / "turn4_rows.csv"):
        if row["benchmark"] == "dtfm-slow-links":
            key = (row["layers"], row["precision"], row["schedule"], row["mbs"])
            same.setdefault(key, []).append(row)
    found = []
    for several in same.values():
        first, *others = sorted(several, key=lambda row: float(row["link_latency"].split()[0]))
        for row in others:
            measured = float(row["step_s"]) - float(first["step_s"])
            found.append(measured / (predicted_s(row) - predicted_s(first)))
    return found
