"""torch's pipelining over gloo and over the backend "farpipe", and farpipe's Pipeline in its place, across a kernel
link (network namespaces; needs root). Prints JSON.

    python -m benchmarks.transport.torch_backend [near|far] [--loss 0.001] [--cut]

Two stages at two sites. *near*: 20 ms one way and 200 Mbit/s, asleep for F = 20 ms and B = 40 ms, 16 microbatches,
messages of 0.5 MB. *far*: 50 ms and 1 Gbit/s, 40 and 80 ms, 12 microbatches, 4 MB. Seconds of a step are those of the
slower rank, medians of the steps after the first two; CPU is that of both processes, divided by the messages. With
--cut the link is dead for 5 s in the middle: the longest step, or the error.

`eager`: farpipe's order of that name in torch's own runtime, whose first stage runs ahead by the round trip.
`pipeline`: `farpipe.torch.Pipeline` with the order that a search finds. Congestion control is the system's for gloo;
farpipe takes BBR where it is allowed and knows the link's rate.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.torch_side_by_side import CASES, Case, sleeping_module
from benchmarks.shared.kernel_wan import print_where_possible

SITES = ("west", "east")
ROWS = (("gloo", "1f1b"), ("farpipe", "1f1b"), ("gloo", "eager"), ("farpipe", "eager"), ("farpipe", "pipeline"))
NUM_STEPS, NUM_SKIPPED_STEPS = 7, 2
CUT_S, CUT_AFTER_S = 5.0, 8.0
LIMIT_S = 240.0
CLUSTER = """
[cluster]
sites = [{{ name = "west", device = "cpu", num_devices = 1 }}, {{ name = "east", device = "cpu", num_devices = 1 }}]
links = [{{ between = ["west", "east"], latency = "{latency_ms:g} ms", bandwidth = "{mbit_per_s:g} Mbit/s" }}]
"""


def main(asked: argparse.Namespace) -> None:
    rows = [("gloo", "1f1b"), ("farpipe", "1f1b"), ("farpipe", "pipeline")] if asked.cut else ROWS
    print_where_possible(lambda: {"case": asked.case, "loss": asked.loss, "steps": measure_all(asked, rows)})


def measure_all(asked: argparse.Namespace, rows: Any) -> list[dict[str, Any]]:
    """A row per backend and order."""
    return [{"backend": backend, "order": order} | measure(asked, backend, order) for backend, order in rows]


def measure(asked: argparse.Namespace, backend: str, order: str) -> dict[str, Any]:
    """Seconds of a step and CPU of a message, or how the run ended."""
    from farpipe.core.errors import RunError
    from farpipe.core.spec import SiteLink
    from farpipe.engine.launch.launcher import launch
    from farpipe.engine.links.wan import Wan

    case = CASES[asked.case]
    speed = {"latency_s": case.latency_s, "bandwidth_bytes_per_s": case.bytes_per_s, "loss": asked.loss}
    links = [SiteLink(source=a, target=b, **speed) for a, b in (SITES, SITES[::-1])]
    with tempfile.TemporaryDirectory() as name, Wan.up(list(SITES), links, name=f"bench{os.getpid()}") as wan:
        folder, places = Path(name), [wan.namespaces[site] for site in SITES]
        facts = {"latency_ms": case.latency_s * 1e3, "mbit_per_s": case.bytes_per_s * 8e-6}
        (folder / "cluster.toml").write_text(CLUSTER.format(**facts))
        words = [sys.executable, __file__, asked.case, "--backend", backend, "--order", order, "--folder", name]
        commands = [[*words, *(["--cut"] if asked.cut else []), "--host", place.address] for place in places]
        if asked.cut:
            threading.Thread(target=cut, args=(wan, folder), daemon=True).start()
        try:
            launch(lambda rank: commands[rank], 2, log_dir=folder / "logs", namespaces=places)
        except RunError:
            logs = "".join(path.read_text() for path in sorted((folder / "logs").iterdir()))
            errors = [line for line in logs.splitlines() if "Error: " in line]
            return {"error": errors[0][-300:] if errors else logs[-300:]}
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    spans = [max(pair) for pair in zip(*(one["spans"] for one in found), strict=True)]
    cpu_s = sum(one["cpu_s"] for one in found) / (2 * case.num_microbatches * len(spans))
    times = {"longest_step_s": round(max(spans), 3)} if asked.cut else {}
    return {"step_s": round(median(spans), 4), "cpu_ms_per_message": round(cpu_s * 1e3, 2), **times}


def cut(wan: Any, folder: Path) -> None:
    """Cut the link for a while, some time after the first step."""
    deadline_s = time.monotonic() + LIMIT_S
    while not (folder / "begun").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(CUT_AFTER_S)
    wan.cut("west<>east")
    time.sleep(CUT_S)
    wan.mend("west<>east")


def run_rank(asked: argparse.Namespace) -> None:
    """One rank; leaves the seconds of its steps."""
    import torch
    import torch.distributed as dist

    import farpipe.torch  # noqa: F401

    rank, case = int(os.environ["RANK"]), CASES[asked.case]
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name != "lo")
    os.environ |= {"FARPIPE_SITE": SITES[rank], "FARPIPE_HOST": asked.host, "FARPIPE_ALLOW_PLAINTEXT": "1"}
    os.environ["FARPIPE_LINKS"] = str(asked.folder / "cluster.toml")
    store = store_of_launcher(rank)
    dist.init_process_group(asked.backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    schedule = make_schedule(torch, asked.order, rank, case)
    whole = torch.zeros(case.num_microbatches, case.message_bytes // 4)
    spans = []
    for step in range(NUM_STEPS * (2 if asked.cut else 1)):
        dist.barrier()
        if step == NUM_SKIPPED_STEPS:
            start_cpu_s = time.process_time()
            (asked.folder / "begun").touch()
        start_s = time.monotonic()
        schedule.step(*([] if rank else [whole]), **({"target": whole} if rank else {}))
        spans.append(time.monotonic() - start_s)
    cpu_s = time.process_time() - start_cpu_s
    (asked.folder / f"{rank}.json").write_text(json.dumps({"spans": spans[NUM_SKIPPED_STEPS:], "cpu_s": cpu_s}))
    dist.destroy_process_group()


def store_of_launcher(rank: int) -> Any:
    """The store at farpipe's launcher, whose rank 0 inherits the listening socket."""
    import torch.distributed as dist

    from farpipe.engine.rendezvous import LISTENER_VARIABLE

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = int(os.environ[LISTENER_VARIABLE]) if rank == 0 else None
    limit = timedelta(seconds=60)
    return dist.TCPStore(host, port, is_master=rank == 0, timeout=limit, master_listen_fd=listener)


def make_schedule(torch: Any, order: str, rank: int, case: Case) -> Any:
    """torch's Schedule1F1B, or its runtime with farpipe's order of that name, or farpipe's Pipeline."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules

    import farpipe.torch

    stage = PipelineStage(sleeping_module(torch, case), rank, 2, torch.device("cpu"))
    options = {"loss_fn": lambda y, _: y.sum()}
    if order == "1f1b":
        return Schedule1F1B(stage, case.num_microbatches, **options)
    if order == "pipeline":
        plan = plan_of(case)
        return farpipe.torch.Pipeline(stage, case.num_microbatches, plan=plan, method="auto", **options)
    runtime = schedules._PipelineScheduleRuntime([stage], case.num_microbatches, **options)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(csv_of(order, case))
        file.flush()
        runtime._load_csv(file.name, format="compute_only")
    return runtime


def csv_of(order: str, case: Case) -> str:
    """The order for this case as torch's CSV."""
    from farpipe.core.schedule import library
    from farpipe.core.schedule.torch_csv import to_torch_csv

    return to_torch_csv(library.order(order, problem_of(case)))


def problem_of(case: Case) -> Any:
    """The step as numbers; a sleeping stage has its whole backward in I."""
    from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer

    figures = {"forward_s": case.forward_s, "input_grad_s": case.backward_s, "weight_grad_s": 0.0}
    link = Link(latency_s=case.latency_s, bandwidth_bytes_per_s=case.bytes_per_s)
    there, back = (Transfer(link=name, bytes=case.message_bytes) for name in ("west>east", "east>west"))
    return Problem(
        num_microbatches=case.num_microbatches,
        ranks=(Rank(),) * 2,
        stages=tuple(Stage(rank=rank, **figures) for rank in range(2)),
        links={"west>east": link, "east>west": link},
        hops=(Hop(forward=there, backward=back),),
    )


def plan_of(case: Case) -> Any:
    """A plan whose step is this case's."""
    from farpipe import planning
    from farpipe.core.spec import parse_job

    facts = {"latency_ms": case.latency_s * 1e3, "mbit_per_s": case.bytes_per_s * 8e-6}
    model = 'name = "small"\nnum_layers = 2\nhidden = 256\nnum_heads = 8\nffn_hidden = 1024\nvocab_size = 2048'
    training = f'sequence_length = 256\nglobal_batch = {case.num_microbatches}\nmicrobatch_size = 1\nprecision = "fp32"'
    layout = 'sites = ["west", "east"]\nvirtual = 1\npipeline = 2'
    text = f"[model]\n{model}\n[training]\n{training}\n{CLUSTER.format(**facts)}\n[layout]\n{layout}\n"
    plan = planning.plan(parse_job(text))
    return plan.model_copy(update={"problem": problem_of(case)})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", nargs="?", default="near", choices=[*CASES])
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--cut", action="store_true")
    for name in ("--backend", "--order", "--host"):  # of a rank
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    found = arguments()
    run_rank(found) if found.folder else main(found)
