"""Pipelines of others over delayed links, measured and predicted: FARPIPE_DATA=FOLDER python -m
benchmarks.cost_model.far_pipelines.

``published/turn4_rows.csv`` has steps of GPT-3 small over 3 and XL over 12 V100, one a machine, with latency and rate
of every link set by tc on AWS, and over three AWS regions by VPN. Devices are calibrated by one step without delay
of the same model, precision and order (the rows of 0.05 ms; in 16 bit those of 1 ms), so that what is left is the
links. NCCL has 16 connections on AWS (NCCL_SOCKET_NTHREADS 2, NCCL_NSOCKS_PERTHREAD 8), whose packets have 9001 bytes
inside a region and 1500 over a VPN. *warm*: as over farpipe's own transport.
"""

import csv
import sys
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Final

from benchmarks.shared.data import data_folder
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.spec import Cluster, Model, Site, SiteLink, Training, preset_site
from farpipe.core.spec.cluster import PlainTcp
from farpipe.core.strict import read_text
from farpipe.planning.cost import JobCosts, Layout, place_evenly, step_cost

Row = Mapping[str, str]
Key = tuple[str, ...]
TOKENS: Final = 2048
REGIONS: Final = ((0.0335, 0.97e9 / 8), (0.0055, 1.12e9 / 8))
"""Oregon to Virginia and Virginia to Ohio: one way, and the mean rate of both directions."""


def predicted_s(row: Row, plain: PlainTcp | None, scale: float = 1.0) -> float:
    """Seconds of a step whose computing takes `scale` times what the catalogue says."""
    model = Model(
        name=row["model"],
        num_layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        num_heads=int(row["heads"]),
        ffn_hidden=int(row["ffn"]),
        vocab_size=256,  # a classification has no head to speak of
        tied_embeddings=False,
        max_sequence_length=TOKENS,
    )
    size, batch, num_ranks = int(row["mbs"]), int(row["gbs"]), int(row["GPUs"])
    how = {"flash_attention": False, "kernels": "eager", "overlap": False, "dropout": True, "recompute": "full"}
    shape = {"sequence_length": TOKENS, "global_batch": batch, "microbatch_size": size, "zero": 0}
    training = Training.model_validate({"precision": row["precision"]} | shape | how)
    layout = Layout(num_ranks, 1, 1, 1, size, batch // size)
    cluster = _cluster(row, num_ranks, plain)
    names = [site.name for site in cluster.sites]
    placements = place_evenly(names, [model.num_layers // num_ranks] * num_ranks, "full")
    step = step_cost(JobCosts(model, training), layout, placements, cluster)
    durations = ("forward_s", "input_grad_s", "weight_grad_s")
    stages = [
        stage.model_copy(update={n: getattr(stage, n) * scale for n in durations}) for stage in step.problem.stages
    ]
    problem = step.problem.model_copy(update={"stages": tuple(stages)})
    return simulate(problem, order(row["schedule"], problem)).makespan_s + step.overhead_s


def _cluster(row: Row, num_ranks: int, plain: PlainTcp | None) -> Cluster:
    hops = list(REGIONS)
    if "regions" not in row["model"]:
        latency_s, rate = (float(row[name].split()[0]) for name in ("link_latency", "link_bandwidth"))
        hops = [(latency_s / 1e3, rate * 1e9 / 8)] * (num_ranks - 1)
    sites: list[Site] = [preset_site(f"s{i}", "v100-16gb", 1) for i in range(num_ranks)]
    links = [
        SiteLink(source=f"s{a}", target=f"s{b}", latency_s=latency_s, bandwidth_bytes_per_s=rate, plain_tcp=plain)
        for i, (latency_s, rate) in enumerate(hops)
        for a, b in ((i, i + 1), (i + 1, i))
    ]
    return Cluster(sites=tuple(sites), links=tuple(links))


def _key(row: Row) -> Key:
    return (row["model"].split()[1], row["precision"], row["schedule"])


def _scales(rows: list[Row]) -> dict[Key, float]:
    """Measured over predicted seconds of the steps with the shortest links."""
    near = sorted(rows, key=lambda row: float(row["link_latency"].split()[0]), reverse=True)
    return {_key(row): float(row["step_s"]) / predicted_s(row, None) for row in near if row["mbs"] == "1"}


def errors() -> Iterator[tuple[Row, float, float]]:
    """Each row beyond the shortest links, with the errors over warm connections and over plain TCP."""
    table = data_folder("published/") / "published" / "turn4_rows.csv"
    rows: list[Row] = [r for r in csv.DictReader(read_text(table).splitlines()) if r["benchmark"] == "dtfm-slow-links"]
    scales = _scales(rows)
    for row in rows:
        if float(row["link_latency"].split()[0]) > 0.05:
            plain = PlainTcp(num_streams=16, mtu_bytes=1500 if "regions" in row["model"] else 9001)
            warm, cold = (
                predicted_s(row, over, scales[_key(row)]) / float(row["step_s"]) - 1 for over in (None, plain)
            )
            yield row, warm, cold


def main() -> None:
    """Print a line for each row, and the means."""
    found = list(errors())
    for row, warm, cold in found:
        where = f"{row['link_latency']:>14}, {row['link_bandwidth'][:12]:12}"
        print(f"{row['model']:44} b{row['mbs']} {where} {float(row['step_s']):6.2f} s  {warm:+7.1%} {cold:+7.1%}")
    for name, column in (("warm", 1), ("plain TCP", 2)):
        each = [float(line[column]) for line in found]
        print(f"{name}: mean error {fmean(map(abs, each)):.1%} (bias {fmean(each):+.1%}), {len(each)} rows")


if __name__ == "__main__":
    sys.exit(main())
