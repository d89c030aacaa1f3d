"""Prediction against runs of the engine over links that change with light paths. Prints Markdown.

    python benchmarks/optical_engine.py [--wan] [--phases 4] [--steps 4]

Six sleeping ranks at six nodes of NSFNET (F 26, B 52 ms, 16 microbatches, 1F1B) among a background of 90 E on shared
fibres. In every phase each hop has one light path, chosen by arrival; between phases all are given back and set up
anew, so that rates and delays of the links change. Scaled: messages of 512 KB and 75 Mbit/s per slot stand for 512 MB
and 75 Gbit/s. The simulator of light paths predicts the step of each phase; the engine's links take on rate and delay
of the light paths at the phase's first step. With --wan they are the kernel's (root, /dev/net/tun), changed while the
run goes on; then the first step of a phase may be half in the old one, and is left out, as is the run's first step.
"""

import argparse
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from farpipe.emulate.wan import Wan, links_of_problem
from farpipe.optical import Grid, PoissonTraffic, find_network, k_shortest
from farpipe.optical.joint import nominal_problem
from farpipe.optical.modulation import Modulation
from farpipe.optical.phases import Phase, light_phases, link_changes
from farpipe.optical.strategies import find_strategy
from farpipe.optical.study import Scenario
from farpipe.optical.training import Training, pipeline_problem
from farpipe.run.run import run
from farpipe.runtime.run_spec import LinkChange, RunSpec
from farpipe.schedule.library import order

NODES = ("1", "4", "10", "14", "8", "12")
SCALE = 4000
"""Of bytes and rates, not of times: TLS and the kernel WAN carry all links on this machine's cores."""
SCALED = Modulation(f"64qam / {SCALE}", ((float("inf"), 6 / SCALE),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wan", action="store_true")
    parser.add_argument("--phases", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    training = make_training()
    phases = make_phases(training, options.phases, options.seed)
    steps = measured(training, phases, options.steps, wan=options.wan)
    print("| phase | link rates Mbit/s | one-way delays ms | predicted s | measured s | error |\n|" + "---|" * 6)
    for index, phase in enumerate(phases):
        own = steps[index * options.steps : (index + 1) * options.steps]
        measured_s = median(own[1:])
        rates = sorted({round(8e-6 * link.bandwidth_bytes_per_s) for link in phase.links.values()})
        delays = [1e3 * link.latency_s for link in phase.links.values()]
        print(
            f"| {index + 1} | {', '.join(map(str, rates))} | {min(delays):.1f} to {max(delays):.1f} | "
            f"{phase.step_s:.4f} | {measured_s:.4f} | {100 * (phase.step_s / measured_s - 1):+.2f} % |"
        )
    print("\nevery step s: " + ", ".join(f"{step:.3f}" for step in steps))


def make_training() -> Training:
    problem = pipeline_problem([0.026] * len(NODES), [0.052] * len(NODES), 16, NODES, 512e6 / SCALE)
    nominal = nominal_problem(problem, NODES, k_shortest(find_network("nsfnet"), k=8, by="hops"), 450 / SCALE)
    return Training(nominal, order("1f1b", nominal), NODES)


def make_phases(training: Training, count: int, seed: int) -> tuple[Phase, ...]:
    paths = k_shortest(find_network("nsfnet", shared=True), k=8, by="hops")
    scenario = Scenario(paths, paths, Grid(80), PoissonTraffic(90.0, 0.2, 4, 20), SCALED)
    strategy = find_strategy("earliest", keep_s=1.0, unit_gbit=75 / SCALE)
    shared = scenario.shared(seed, count * 100.0)
    return light_phases(shared, training, strategy, num_phases=count, begin_s=scenario.begin_s)


def measured(training: Training, phases: tuple[Phase, ...], num_steps: int, *, wan: bool) -> list[float]:
    """Time of every step in the engine."""
    problem, changes = phases[0].problem(training), link_changes(phases, num_steps)
    spec = RunSpec(
        problem=problem,
        schedule=training.schedule,
        sites=NODES,
        num_steps=num_steps * len(phases),
        device="sleep",
        emulate_links=not wan,
        link_changes=tuple(LinkChange(**change) for change in changes),
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        kernel = None
        if wan:
            kernel = stack.enter_context(
                Wan.up([*dict.fromkeys(NODES)], links_of_problem(problem), name=f"light{os.getpid()}")
            )
        run(spec, folder, wan=kernel)
        return [json.loads(line)["makespan_s"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
