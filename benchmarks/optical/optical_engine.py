"""Prediction against runs of the engine over links that change with light paths. Prints Markdown.

    python -m benchmarks.optical.optical_engine [--wan | --messages] [--phases 4] [--steps 4]

Six sleeping ranks at six nodes of NSFNET (F 26, B 52 ms, 16 microbatches, 1F1B) among a background of 90 E on shared
fibres. In every phase each hop has one light path, chosen by arrival; between phases all are given back and set up
anew, so that rates and delays of the links change. Scaled: messages of 512 KB and 75 Mbit/s per slot stand for 512 MB
and 75 Gbit/s. The simulator of light paths predicts the step of each phase; the engine's links take on rate and delay
of the light paths at the phase's first step. With --wan they are the kernel's (root, /dev/net/tun), changed while the
run goes on; then the first step of a phase may be half in the old one, and is left out, as is the run's first step.
Over the kernel's links the prediction is that for the share of a link's rate that messages get of it (headers, pacing);
`as lit` is the one for the whole rate. With --messages every message of --steps steps has a light path of its own.
"""

import argparse
import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.optical.optical_training import pipeline_problem
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Link, Problem
from farpipe.engine.launch.run import run
from farpipe.engine.links.wan import Wan, links_of_problem
from farpipe.engine.run_settings import LinkChange
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.transport.tcp import PACED_SHARE
from farpipe.optical import Grid, PoissonTraffic, find_network, k_shortest
from farpipe.optical.demands import find_transfer_policy
from farpipe.optical.modulation import Modulation
from farpipe.optical.shared_network import NetworkPlayer, SharedNetwork, play_steps
from farpipe.optical.study import LightScenario
from farpipe.optical.transfers import BYTES_PER_GBIT, LightTraining, Step, light_paths, nominal_problem, over_pairs

NODES = ("1", "4", "10", "14", "8", "12")
SCALE = 4000
"""Of bytes and rates, not of times: TLS and the kernel WAN carry all links on this machine's cores."""
SCALED = Modulation(f"64qam / {SCALE}", ((float("inf"), 6 / SCALE),))


KEEP_S = 60.0
"""Time for which a hop keeps its light path: far more than it is idle within a step."""


@dataclass(frozen=True)
class Phase:
    """The light paths of some steps as links by name, and how long a step over them is predicted to take."""

    links: dict[str, Link]
    step_s: float

    def problem(self, training: LightTraining) -> Problem:
        """The training's Problem with these links."""
        return over_pairs(training.problem, training.nodes, lambda a, b: self.links[f"{a}>{b}"])


def links_of(shared: SharedNetwork, step: Step) -> dict[str, Link]:
    """The light path of every hop: its fibre's delay, and its units' rate."""
    firsts = range(0, step.training.num_messages, step.training.problem.num_microbatches)
    return {
        ">".join(ends): Link(
            latency_s=float(shared.table.latency_s[step.out.path[first]]),
            bandwidth_bytes_per_s=float(step.out.units[first]) * step.unit_gbit * BYTES_PER_GBIT,
        )
        for first, ends in zip(firsts, step.training.hops, strict=True)
        if ends is not None
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wan", action="store_true")
    parser.add_argument("--messages", action="store_true")
    parser.add_argument("--phases", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    training = make_training()
    if options.messages:
        print_messages(training, options.steps, options.seed)
        return
    phases = make_phases(training, options.phases, options.seed)
    steps = measured(training, phases, options.steps, wan=options.wan)
    titles = ("phase", "link rates Mbit/s", "one-way delays ms", "as lit s", "predicted s", "measured s", "error")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for index, phase in enumerate(phases):
        own = steps[index * options.steps : (index + 1) * options.steps]
        measured_s = median(own[1:])
        predicted_s = step_s(phase.problem(training), training, PACED_SHARE) if options.wan else phase.step_s
        rates = sorted({round(8e-6 * link.bandwidth_bytes_per_s) for link in phase.links.values()})
        delays = [1e3 * link.latency_s for link in phase.links.values()]
        print(
            f"| {index + 1} | {', '.join(map(str, rates))} | {min(delays):.1f} to {max(delays):.1f} | "
            f"{phase.step_s:.4f} | {shown(predicted_s, measured_s)} |"
        )
    print("\nevery step s: " + ", ".join(f"{step:.3f}" for step in steps))


def shown(predicted_s: float, measured_s: float) -> str:
    """Three cells: both times and the error of the prediction."""
    return f"{predicted_s:.4f} | {measured_s:.4f} | {100 * (predicted_s / measured_s - 1):+.2f} %"


def step_s(problem: Problem, training: LightTraining, share: float) -> float:
    """Time of a step whose messages get `share` of the links' rates."""
    links = {
        name: link.model_copy(update={"bandwidth_bytes_per_s": share * link.bandwidth_bytes_per_s})
        for name, link in problem.links.items()
    }
    return simulate(problem.model_copy(update={"links": links}), training.schedule).makespan_s


def print_messages(training: LightTraining, num_steps: int, seed: int) -> None:
    """Run with a light path per message, every step three times, and print every light path's step."""
    scenario, policy = make_scenario(), find_transfer_policy("earliest", unit_gbit=75 / SCALE)
    shared = scenario.shared(seed, 100.0)
    steps = play_steps(shared, training, policy, num_steps=num_steps, begin_s=scenario.begin_s).steps
    nominal = {name: Link(latency_s=0.02, bandwidth_bytes_per_s=1e7) for name in training.problem.links}
    spec = RunSpec.bare(
        problem=training.problem.model_copy(update={"links": nominal}),
        schedule=training.schedule,
        sites=NODES,
        num_steps=3 * num_steps,
        device="sleep",
        light_paths=light_paths(steps),
    )
    with tempfile.TemporaryDirectory() as folder:
        run(spec, Path(folder) / "run")
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    print("| step | rates Mbit/s | predicted s | measured s | error |\n|" + "---|" * 5)
    for index, step in enumerate(steps):
        measured_s = median(line["makespan_s"] for line in lines[index::num_steps])
        rates = sorted({round(1e3 * int(units) * 75 / SCALE) for units in step.out.units[training.sent]})
        print(f"| {index + 1} | {rates[0]} to {rates[-1]} | {shown(step.makespan_s, measured_s)} |")
    print("\nevery step s: " + ", ".join(f"{line['makespan_s']:.3f}" for line in lines))


def make_scenario() -> LightScenario:
    paths = k_shortest(find_network("nsfnet", shared=True), k=8, by="hops")
    return LightScenario(paths, paths, Grid(80), PoissonTraffic(90.0, 0.2, 4, 20), SCALED)


def make_training() -> LightTraining:
    problem = pipeline_problem([0.026] * len(NODES), [0.052] * len(NODES), 16, NODES, 512e6 / SCALE)
    nominal = nominal_problem(problem, NODES, k_shortest(find_network("nsfnet"), k=8, by="hops"), 450 / SCALE)
    return LightTraining(nominal, order("1f1b", nominal), NODES)


def make_phases(training: LightTraining, count: int, seed: int) -> tuple[Phase, ...]:
    scenario = make_scenario()
    policy = find_transfer_policy("earliest", keep_s=1.0, unit_gbit=75 / SCALE)
    shared = scenario.shared(seed, count * 100.0)
    coupled = NetworkPlayer(shared, training, replace(policy.rule, keep_s=KEEP_S), begin_s=scenario.begin_s)
    demands, phases = policy.demands(training, None), []
    for _ in range(count):
        lit = coupled.step(demands)  # in the first step of a phase messages wait until light paths are there
        phases.append(Phase(links_of(shared, lit), coupled.step(demands).makespan_s))
        coupled.wait_until(coupled.now_s + KEEP_S)
    return tuple(phases)


def measured(training: LightTraining, phases: tuple[Phase, ...], num_steps: int, *, wan: bool) -> list[float]:
    """Time of every step in the engine."""
    problem = phases[0].problem(training)
    changes = tuple(
        LinkChange(step=index * num_steps, link=name, **link.model_dump(include={"latency_s", "bandwidth_bytes_per_s"}))
        for index, phase in enumerate(phases[1:], start=1)
        for name, link in phase.links.items()
    )
    spec = RunSpec.bare(
        problem=problem,
        schedule=training.schedule,
        sites=NODES,
        num_steps=num_steps * len(phases),
        device="sleep",
        emulate_links=not wan,
        link_changes=changes,
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
