"""Which way to use two sites, by the link between them: loss after equal time, predicted and executed. By hand.

    python -m benchmarks.engine.ways_by_link --times TIMES.jsonl                       execute rehearsals, append times
    python -m benchmarks.engine.ways_by_link --losses LOSSES.jsonl --times TIMES.jsonl tables, and the picture

Losses are those of `local_losses`. Times are of steps that sleep over emulated links; the predicted ones are the
planner's closed form and simulated steps. All times are in units of the step of one site with its half of the batch,
so the picture holds for any job whose link and step have the same proportions. The picture needs matplotlib.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from benchmarks.engine.local_losses import LENGTH, MODELS, NUM_SITES, NUM_STEPS, SEQUENCES, STREAMING
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
EXECUTED: Final = ((0.1, 0.03), (1.0, 0.3), (4.0, 3.0))
"""Seconds to send the gradient once, and one-way latency, in steps."""
UNIT_S: Final = {"pipeline": 0.6, "replicas": 0.3, "local steps": 0.2, "streaming": 0.2}
"""Step of one site in a rehearsal: long beside what a busy machine adds."""
REHEARSED: Final = {"pipeline": 12, "replicas": 16, "local steps": 60, "streaming": 60}
LATENCIES: Final = (0.03, 0.3, 3.0)
"""Those of the panels."""
PICTURE: Final = Path(__file__).parents[2] / "docs" / "pictures" / "ways_by_link.svg"
LOWEST, HIGHEST = 1.72, 2.5
"""Losses that are shown."""
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
    return float(both.step_s)


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
    return statistics.median([float(line["makespan_s"]) for line in lines][2:])


def _locally(way: str, link: Link, folder: Path) -> float:
    """Mean step of two processes that sleep and exchange."""
    from farpipe.engine.launch.launcher import launch

    shape = {"way": way, "latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}
    (folder / "case.json").write_text(json.dumps(shape), encoding="utf-8")
    launch(lambda rank: [sys.executable, "-m", "benchmarks.engine.ways_by_link", "--rank-of", str(folder)], NUM_SITES)
    return max(float((folder / f"step-{rank}").read_text(encoding="utf-8")) for rank in range(NUM_SITES))


class Solo:
    """The ranks of a site that is one process."""

    rank, world_size = 0, 1

    def exchange(self, name: str, payload: bytes, *, waiting_for: str) -> list[bytes]:
        """Return what the only rank says."""
        return [payload]


def rank_main(folder: Path) -> None:
    """One site of a rehearsal of local steps: it sleeps, and exchanges differences that are zero."""
    import torch

    from farpipe.engine.checkpoint.files import Piece
    from farpipe.engine.executor.peers import TensorPeers
    from farpipe.engine.launch.reports import report_done
    from farpipe.engine.links import LinkShape
    from farpipe.engine.outer.local_exchange import LocalExchange
    from farpipe.engine.rendezvous import rendezvous_from_env
    from farpipe.engine.transport import TransportConfig, connect

    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    shape = LinkShape(case["latency_s"], case["bandwidth_bytes_per_s"])
    rank = int(os.environ["RANK"])
    links = {(a, b): (f"{SITES[a]}>{SITES[b]}", shape) for a, b in ((0, 1), (1, 0))}
    config = TransportConfig(sites=SITES, links=links, latency_s=shape.latency_s, timeout_s=120.0)
    num_steps, sixth = REHEARSED[case["way"]], MODEL.num_params // 6
    pieces = [Piece(f"weight/{name}", (sixth,), 0, torch.zeros(sixth)) for name in "abcdef"]
    with connect(rank, NUM_SITES, config, rendezvous_from_env()) as transport:
        peers = TensorPeers(transport)
        exchange = LocalExchange(LOCAL[case["way"]], pieces, cast(Any, Solo()))
        exchange.join(peers, rank)
        peers.exchange("begin", b"", waiting_for="the other site")
        begin_s = time.monotonic()
        for step in range(num_steps):
            time.sleep(UNIT_S[case["way"]])
            exchange.after(step + 1)
        step_s = (time.monotonic() - begin_s) / num_steps
        (folder / f"step-{rank}").write_text(str(step_s), encoding="utf-8")
        peers.exchange("end", b"", waiting_for="the other site")
    report_done(0)


class Losses:
    """Losses of the ways after any number of steps, from the lines of `local_losses`."""

    def __init__(self, lines: Sequence[Row]) -> None:
        self._of: dict[tuple[str, int], dict[int, float]] = {}
        for line in (line for line in lines if line["model"] == MODEL.name):
            self._of.setdefault((line["way"], line["num_steps"]), {})[line["seed"]] = line["loss"]

    def mean(self, way: str, num_steps: int = NUM_STEPS) -> float:
        """Mean over the seeds."""
        return statistics.mean(self._of[way, num_steps].values())

    def against(self, way: str, other: str) -> tuple[float, float, int]:
        """Mean difference to `other` at equal steps, half of its 95 % interval, and the number of seeds."""
        one, base = self._of[way, NUM_STEPS], self._of[other, NUM_STEPS]
        found = [one[seed] - base[seed] for seed in one if seed in base]
        return statistics.mean(found), interval(found), len(found)

    def whole(self, num_steps: float) -> float:
        """Of the whole batch: straight lines over the logarithm of the steps, between trainings of that length."""
        known = sorted(count for way, count in self._of if way == "whole")
        if num_steps < known[0]:
            return math.nan
        at = min(num_steps, known[-1])
        high = next(index for index, count in enumerate(known) if count >= at)
        low = max(0, high - 1)
        share = 0.0 if low == high else math.log(at / known[low]) / math.log(known[high] / known[low])
        return (1 - share) * self.mean("whole", known[low]) + share * self.mean("whole", known[high])

    def after(self, way: str, step: float) -> float:
        """After the time of NUM_STEPS steps of one site with its half, where a step takes `step` of these."""
        num_steps = NUM_STEPS / step
        if way in ("replicas", "pipeline", "one site, whole batch"):
            return self.whole(num_steps)
        name = {"local steps": "mean 30", "streaming": "streaming 30", "one site, its half": "half"}[way]
        return self.mean(name) + self.whole(num_steps) - self.whole(NUM_STEPS)


STUDENT: Final = {2: 12.71, 3: 4.30, 4: 3.18}
"""Quantiles for 95 % of the mean of so many numbers (t distribution)."""


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean; not a number for one value."""
    if len(values) not in STUDENT:
        return math.nan
    return STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def rows_of(losses: Losses, times: Sequence[Row]) -> Iterator[Row]:
    """Executed beside predicted: steps, and losses after equal time."""
    for one in times:
        predicted = predicted_step(one["way"], one["send"], one["latency"])
        yield {
            "way": one["way"],
            "send": one["send"],
            "latency": one["latency"],
            "predicted step": round(predicted, 3),
            "measured step": round(one["step"], 3),
            "predicted loss": round(losses.after(one["way"], predicted), 3),
            "loss at the measured step": round(losses.after(one["way"], one["step"]), 3),
        }


def _best(losses: Losses, sends: Sequence[float], latency: float) -> Iterator[tuple[str, float, float]]:
    """The way with the lowest loss, and from where to where it is that."""

    def loss_of(way: str, send: float) -> float:
        loss = losses.after(way, predicted_step(way, send, latency))
        return math.inf if math.isnan(loss) else loss  # it does too few steps

    named = [(min(COLOURS, key=partial(loss_of, send=send)), send) for send in sends]
    for way, run in groupby(named, key=itemgetter(0)):
        found = [send for _, send in run]
        yield way, found[0], found[-1] * sends[1] / sends[0]


def plot(losses: Losses, times: Sequence[Row], path: Path) -> None:
    """Loss after equal time over the link: a panel for each distance, a line for each way, a dot where executed, and
    below the colour of the best."""
    from farpipe.report.pyplot import load_pyplot, save_figure

    pyplot = load_pyplot()
    pyplot.rcParams["svg.fonttype"] = "none"
    figure, axes = pyplot.subplots(1, len(LATENCIES), figsize=(9, 3.4), sharey=True, layout="constrained")
    sends = [10 ** (-2 + 4 * i / 40) for i in range(41)]
    for panel, latency in zip(axes, LATENCIES, strict=True):
        for way, colour in COLOURS.items():
            panel.plot(
                sends,
                [losses.after(way, predicted_step(way, send, latency)) for send in sends],
                color=colour,
                label=way,
                lw=1.6,
            )
        for way, first, end in _best(losses, sends, latency):
            panel.plot([first, end], [LOWEST, LOWEST], color=COLOURS[way], lw=9, solid_capstyle="butt")
        for one in (one for one in times if one["latency"] == latency):
            loss = losses.after(one["way"], one["step"])
            panel.plot(one["send"], loss, "o", ms=4.5, mfc="white", mec=COLOURS[one["way"]])
        panel.set_xscale("log")
        panel.set_ylim(LOWEST, HIGHEST)
        panel.set_title(f"one-way latency: {latency:g} steps", fontsize=9)
        panel.grid(alpha=0.25)
    axes[1].set_xlabel("time to send the gradients once, in steps of one site with its half of the batch", fontsize=8)
    axes[0].set_ylabel(f"loss after the time of {NUM_STEPS:,} steps", fontsize=8)
    axes[0].legend(fontsize=7, loc="upper left")
    save_figure(figure, path, dpi=100)


def main() -> None:
    """Execute rehearsals, or put losses and times together."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=Path, help="Lines of local_losses.")
    parser.add_argument("--times", type=Path, help="Executed steps: written without --losses, else read.")
    parser.add_argument("--plot", type=Path, default=PICTURE)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        rank_main(given.rank_of)
        return
    if given.losses is None:
        text = given.times.read_text(encoding="utf-8") if given.times.exists() else ""
        known = {(one["way"], one["send"], one["latency"]) for one in map(json.loads, text.splitlines())}
        for (send, latency), way in ((case, way) for case in EXECUTED for way in UNIT_S):
            if (way, send, latency) in known:
                continue
            row = {"way": way, "send": send, "latency": latency, "step": executed_step(way, send, latency)}
            with given.times.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return
    losses, times = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (given.losses, given.times)
    )
    found = Losses(losses)
    names = dict.fromkeys(line["way"] for line in losses if line["num_steps"] == NUM_STEPS)
    against = {name: found.against(name, "half") for name in names if name != "half"}
    differences = [
        {
            "way": name,
            "loss": round(found.mean(name), 3),
            "to half alone": round(mean, 3),
            "95 %": round(half, 3),
            "seeds": n,
        }
        for name, (mean, half, n) in against.items()
    ]
    print(json.dumps({"losses": differences, "executed": [*rows_of(found, times)]}, indent=1))
    plot(found, times, given.plot)


if __name__ == "__main__":
    main()
