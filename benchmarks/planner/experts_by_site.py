"""Would experts at another site, to which tokens go, ever beat a pipeline between the sites? Prints JSON.

Mixtral-8x7B and DeepSeek-V3 in bf16 at two sites of H100, 20 ms apart, over 10 Gbit/s to 10 Tbit/s: the best planned
pipeline, against a bound that no training with experts by site goes below. The bound has the step of one site with the
devices of both, the latency hidden, and the link never idle; a token crosses once a layer however many of its experts
are there, and not at all where none is (every expert equally likely). It sends hidden states there, results back and
the gradients of both: per layer and direction 2 x tokens x hidden numbers times the share that crosses. That is the
same for experts at one site alone (a share of 1) but for the tokens that stay where half of the experts are.

    python -m benchmarks.planner.experts_by_site [--wan]

`--wan` measures one layer's exchange in float32 over the kernel's TCP at 20 ms and 200 Mbit/s: transformers' all-to-all
between a process at each site, over gloo, forward and backward, beside the two messages by which a pipeline carries the
same tokens through any number of layers; medians, and the bytes of both. Needs root and /dev/net/tun.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from datetime import timedelta
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

if __package__ is None or __package__ == "":  # a rank is started by its path
    sys.path[0] = str(Path(__file__).parents[2])

from benchmarks.shared.jobs import job_head, link_table
from benchmarks.shared.kernel_wan import print_where_possible

MODELS: Final = {"mixtral-8x7b": 16, "deepseek-v3": 128}
"""Devices of each site."""
GBITS: Final = (10, 100, 400, 1000, 3200, 10000)
BATCH, LENGTH, NUMBER_BYTES = 256, 4096, 2
SITES: Final = ("west", "east")
LATENCY_S, BYTES_PER_S = 0.02, 25e6
NUM_TOKENS, HIDDEN, NUM_EXPERTS, PER_TOKEN = 2048, 64, 8, 2
NUM_SKIPPED, NUM_REPEATS = 2, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wan", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        run_rank(Path(given.rank))
    elif given.wan:
        print_where_possible(lambda: {"experts_over_wan": [over_wan()]})
    else:
        found = [compared(model, gbit) for model, gbit in product(MODELS, GBITS)]
        print(json.dumps({"experts_by_site": found}))


def compared(model: str, gbit: int) -> dict[str, Any]:
    """One line: the step of the best pipeline and the bound of experts by site."""
    from farpipe.core.spec import parse_job
    from farpipe.planning.explain.strategies import strategies_of
    from farpipe.planning.planner.find import find

    count, training = MODELS[model], 'precision = "bf16"\nsequence_parallel = true'
    link = link_table("s0", "s1", "20 ms", f"{gbit} Gbit/s")
    asked = parse_job(job_head(model, LENGTH, BATCH, (count, count), "h100-sxm", training) + link)
    (found, *_) = find(asked)
    every, _ = strategies_of(asked, found.found.costs, found.ranked)
    step_s = min(one.step_s for one in every if one.kind == "pipeline" and one.same_training)
    one_site = find(parse_job(job_head(model, LENGTH, BATCH, (2 * count,), "h100-sxm", training)))[0]
    sent = sent_bytes(asked.model)
    bound_s = max(one_site.plan.prediction.step_s, sent / (gbit * 1e9 / 8))
    return {
        "model": model,
        "Gbit/s": gbit,
        "pipeline_s": round(step_s, 2),
        "experts by site, at least_s": round(bound_s, 2),
        "GB a direction": round(sent / 1e9, 1),
        "faster": "experts by site, perhaps" if bound_s < step_s else "pipeline",
    }


def sent_bytes(model: Any) -> float:
    """Bytes of a step in each direction of the link."""
    at = model.experts
    share = 1 - 0.5**at.per_token
    return 2 * share * BATCH * LENGTH * model.hidden * NUMBER_BYTES * (model.num_layers - at.num_dense_layers)


def over_wan() -> dict[str, Any]:
    """Medians of both ways."""
    from farpipe.core.spec import SiteLink
    from farpipe.engine.launch.launcher import launch
    from farpipe.engine.links.wan import Wan

    speed: dict[str, Any] = {"latency_s": LATENCY_S, "bandwidth_bytes_per_s": BYTES_PER_S}
    links = [SiteLink(source=a, target=b, **speed) for a, b in (SITES, SITES[::-1])]
    with tempfile.TemporaryDirectory() as name, Wan.up(SITES, links, name=f"experts{os.getpid()}") as wan:
        places = [wan.namespaces[site] for site in SITES]
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", name]
        launch(lambda rank: command, 2, log_dir=Path(name) / "logs", namespaces=places)
        found: dict[str, Any] = json.loads((Path(name) / "0.json").read_text())
    return found


def run_rank(folder: Path) -> None:
    """One process; leaves the seconds of an exchange by experts, and of a pipeline's two messages."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import AllToAllEP

    from benchmarks.transport.torch_backend import store_of_launcher

    rank = int(os.environ["RANK"])
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name != "lo")
    dist.init_process_group(
        "gloo", store=store_of_launcher(rank), rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("both", "alone"))
    torch.manual_seed(rank)

    class Echo(torch.nn.Module):
        """Experts that compute nothing."""

        num_experts = NUM_EXPERTS // 2

        def forward(self, tokens: Any, experts: Any, weights: Any) -> Any:
            return tokens * 1.0

    exchange = AllToAllEP(Echo(), mesh["both"], mesh["alone"])
    x = torch.randn(NUM_TOKENS, HIDDEN, requires_grad=True)
    weights = torch.full((NUM_TOKENS, PER_TOKEN), 1 / PER_TOKEN)

    def by_experts() -> None:
        chosen = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(PER_TOKEN).indices
        exchange(x, chosen, weights).sum().backward()

    def by_pipeline() -> None:
        message = torch.empty_like(x)
        for sender in (0, 1):  # an activation there, its gradient back
            if rank == sender:
                dist.send(x.detach(), 1 - sender)
            else:
                dist.recv(message, sender)

    result: dict[str, Any] = {"tokens": NUM_TOKENS, "hidden": HIDDEN}
    for name, work in (("exchange of a layer_s", by_experts), ("both messages of a pipeline_s", by_pipeline)):
        spans = []
        for _ in range(NUM_SKIPPED + NUM_REPEATS):
            dist.barrier()
            begin_s = time.monotonic()
            work()
            dist.barrier()
            spans.append(time.monotonic() - begin_s - 2 * LATENCY_S)  # the last barrier's way there and back
        result[name] = round(median(spans[NUM_SKIPPED:]), 3)
    size = NUM_TOKENS * HIDDEN * 4
    result |= {"MB of a layer a direction": round(2 * PER_TOKEN * size / 1e6, 2), "MB of a pipeline": size / 1e6}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
