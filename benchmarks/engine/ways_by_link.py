"""Which way to use two sites, by the link between them: loss after equal time, predicted and executed. By hand.

    python -m benchmarks.engine.ways_by_link --times TIMES.jsonl                         execute rehearsals, append times
    python -m benchmarks.engine.ways_by_link --losses LOSSES.jsonl --times TIMES.jsonl   print the tables, write the picture

Losses are those of `local_losses`. Times are of steps that sleep over emulated links; the predicted ones are the
planner's closed form and simulated steps. All times are in units of the step of one site with its half of the batch,
so the picture holds for any job whose link and step have the same proportions. The picture needs matplotlib.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.engine.local_losses import DATA, LENGTH, MODELS, NUM_SITES, NUM_STEPS, SEQUENCES, STREAMING
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.spec import LocalSteps, SiteLink
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Sync, Transfer
from farpipe.planning.explain.separate_sites import SeparateSites

SITES: Final = ("zurich", "lugano")
MODEL: Final = MODELS["28k"]
GRADIENT_BYTES: Final = 4 * MODEL.num_params
ACTIVATION_BYTES: Final = 4 * LENGTH * MODEL.hidden
"""Of one sequence, which is a microbatch of the pipeline."""
LOCAL: Final = {"local steps": LocalSteps(every=30), "streaming": LocalSteps(every=30, **STREAMING)}
EXECUTED: Final = ((0.1, 0.1), (1.0, 0.3), (4.0, 1.0))
"""Seconds to send the gradient once, and one-way latency, in steps."""
UNIT_S: Final = {"pipeline": 0.6, "replicas": 0.3, "local steps": 0.2, "streaming": 0.2}
"""Step of one site in a rehearsal: long beside what a busy machine adds."""
REHEARSED: Final = {"pipeline": 12, "replicas": 16, "local steps": 60, "streaming": 60}
LATENCIES: Final = (0.03, 0.3, 3.0)
PICTURE: Final = Path(__file__).parents[2] / "docs" / "pictures" / "ways_by_link.svg"
COLOURS: Final = {
    "replicas": "#2a6fbb",
    "pipeline": "#7b4fa3",
    "local steps": "#d9822b",
    "streaming": "#3a9d5d",
    "one site, its half": "#555555",
    "one site, whole batch": "#aaaaaa",
}
Row = dict[str, Any]


def link_of(send: float, latency: float, unit_s: float) -> Link:
    """The link over which the gradient takes `send` steps, of `unit_s` each."""
    return Link(latency_s=latency * unit_s, bandwidth_bytes_per_s=GRADIENT_BYTES / (send * unit_s))


def problem_of(way: str, link: Link, unit_s: float) -> Problem:
    """A step of the pipeline over both sites, or of replicas at each."""
    num_stages, count = (2, NUM_SITES * SEQUENCES) if way == "pipeline" else (1, SEQUENCES)
    part_s = unit_s / SEQUENCES / num_stages / 3  # of a sequence in F, I or W
    forward, backward = (Transfer(link=name, bytes=ACTIVATION_BYTES) for name in ("zurich>lugano", "lugano>zurich"))
    reduce = Sync(reduce=Transfer(link="zurich>lugano", bytes=GRADIENT_BYTES))
    return Problem(
        num_microbatches=count,
        ranks=(Rank(),) * num_stages,
        stages=tuple(
            Stage(rank=rank, forward_s=part_s, input_grad_s=part_s, weight_grad_s=part_s) for rank in range(num_stages)
        ),
        links={"zurich>lugano": link, "lugano>zurich": link},
        hops=(Hop(forward=forward, backward=backward),) * (num_stages - 1),
        sync=None if way == "pipeline" else (reduce,),
    )


def predicted_step(way: str, send: float, latency: float) -> float:
    """Step of both sites, in steps of one with its half."""
    link = link_of(send, latency, 1.0)
    if way == "pipeline":
        problem = problem_of(way, link, 1.0)
        return min(simulate(problem, order(name, problem)).makespan_s for name in ("1f1b", "eager", "zb-h1"))
    if way.startswith("one site"):
        return 1.0 if way.endswith("half") else 2.0
    ends = (SITES, SITES[::-1])
    links = tuple(
        SiteLink(source=a, target=b, latency_s=link.latency_s, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s)
        for a, b in ends
    )
    site: Any = SimpleNamespace(step_s=1.0)
    both = SeparateSites((site, site), (SEQUENCES,) * 2, links, MODEL.num_params, 4, True, LOCAL.get(way))
    return both.step_s


def executed_step(way: str, send: float, latency: float) -> float:
    """The same, measured."""
    unit_s = UNIT_S[way]
    link = link_of(send, latency, unit_s)
    with tempfile.TemporaryDirectory() as folder:
        step_s = _locally(way, link, Path(folder)) if way in LOCAL else _by_engine(way, link, Path(folder))
    return step_s / unit_s


def _by_engine(way: str, link: Link, folder: Path) -> float:
    """Median step of a rehearsal."""
    from farpipe.engine.launch.run import run
    from farpipe.engine.run_spec import RunSpec

    problem = problem_of(way, link, UNIT_S[way])
    name = min(("1f1b", "eager", "zb-h1"), key=lambda name: simulate(problem, order(name, problem)).makespan_s)
    sites = SITES if way == "pipeline" else SITES[:1]
    replicas = () if way == "pipeline" else ((SITES[0],), (SITES[1],))
    spec = RunSpec.bare(
        problem=problem,
        schedule=order(name, problem),
        sites=sites,
        replicas=replicas,
        num_steps=REHEARSED[way],
        device="sleep",
    )
    run(spec, folder / "run", allow_plaintext=True)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return statistics.median([line["makespan_s"] for line in lines][2:])


def _locally(way: str, link: Link, folder: Path) -> float:
    """Mean step of two processes that sleep and exchange."""
    from farpipe.engine.launch.launcher import launch

    shape = {"way": way, "latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}
    (folder / "case.json").write_text(json.dumps(shape), encoding="utf-8")
    launch(lambda rank: [sys.executable, "-m", "benchmarks.engine.ways_by_link", "--rank-of", str(folder)], NUM_SITES)
    return max(float((folder / f"step-{rank}").read_text(encoding="utf-8")) for rank in range(NUM_SITES))


def rank_main(folder: Path) -> None:
    """One site of a rehearsal of local steps: it sleeps, and exchanges differences that are zero."""
    import torch

    from farpipe.engine.checkpoint.files import Piece
    from farpipe.engine.executor.peers import TensorPeers
    from farpipe.engine.launch.reports import report_done
    from farpipe.engine.links import LinkShape
    from farpipe.engine.outer.local_exchange import LocalExchange, SitePlace
    from farpipe.engine.rendezvous import rendezvous_from_env
    from farpipe.engine.transport import TransportConfig, connect

    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    shape = LinkShape(case["latency_s"], case["bandwidth_bytes_per_s"])
    rendezvous = rendezvous_from_env()
    rank = rendezvous.rank
    links = {(a, b): (f"{SITES[a]}>{SITES[b]}", shape) for a, b in ((0, 1), (1, 0))}
    config = TransportConfig(sites=SITES, links=links, latency_s=shape.latency_s, timeout_s=120.0)
    num_steps, sixth = REHEARSED[case["way"]], MODEL.num_params // 6
    pieces = [Piece(f"weight/{name}", (sixth,), 0, torch.zeros(sixth)) for name in "abcdef"]
    with connect(rank, NUM_SITES, config, rendezvous) as transport:
        peers = TensorPeers(transport)
        exchange = LocalExchange(LOCAL[case["way"]], SitePlace(rank, 0), pieces, peers, peers)
        peers.exchange("begin", b"", waiting_for="the other site")
        begin_s = time.monotonic()
        for step in range(num_steps):
            time.sleep(max(0.0, begin_s + (step + 1) * 0 + UNIT_S[case["way"]]) if False else UNIT_S[case["way"]])
            exchange.after(step + 1)
        step_s = (time.monotonic() - begin_s) / num_steps
        (folder / f"step-{rank}").write_text(str(step_s), encoding="utf-8")
        peers.exchange("end", b"", waiting_for="the other site")
    report_done(0)
