"""CBA's background as its paper has it: every message between sites brings a burst of requests.

    python -m benchmarks.optical.optical_bursts [--draws 10] [--size 60] [--orders gpipe,1f1b]

The paper's setting as in `optical_training` (NSFNET, 80 slots, 75 Gbit/s per slot at any length, no set-up time), over
random placements of 8 stages on 6 sites, directed fibres and shared ones. With a probability of 0.95 each message
between sites brings `size` requests of 4 to 20 slots, held 0.2 s on average, when it is sent; the moments are those of
a step without contention, stretched to what a step of 3 fixed units (KSP-FF) takes beside these bursts. Messages that
are refused try again every 10 ms. `on plain`: change of the step by CBA on the same rule of paths. Intervals are 95 %,
paired by placement. Prints Markdown.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.optical.optical_grid import LABELS
from benchmarks.optical.optical_training import candidates, scenario, training
from farpipe.core.simulate import simulate
from farpipe.optical import PoissonTraffic, find_modulation, find_network
from farpipe.optical.confidence import mean_interval, paired_change
from farpipe.optical.demands import TRANSFER_POLICIES, Cba, Fixed
from farpipe.optical.paths import Pair
from farpipe.optical.policies import POLICIES
from farpipe.optical.study import LightScenario, Run, bound_s, compare_policies, no_network_s, random_nodes
from farpipe.optical.traffic import Traffic
from farpipe.optical.transfers import LightTraining, TransferRule

SHARE, HOLDING_S, RETRY_S = 0.95, 0.2, 0.01
ROUNDS = 3
"""Times that the length of a step is worked out anew from the bursts that it brings."""
PLAIN = {"cba": "ksp-ff", "cba on sd-ff": "sd-ff", "cd-cba": "cd"}


@dataclass(frozen=True)
class Bursts(PoissonTraffic):
    """`size` requests at once, with a probability, at each of the moments of a step that is repeated."""

    moments_s: tuple[float, ...] = ()
    step_s: float = 1.0
    size: int = 60

    def draw(self, pairs: tuple[Pair, ...], num_requests: int, seed: int) -> Traffic:
        """As in `PoissonTraffic`; the arrivals alone differ."""
        steps = math.ceil(num_requests / (len(self.moments_s) * SHARE * self.size)) + 3
        times = (np.arange(steps)[:, None] * self.step_s + np.array(self.moments_s)).ravel()
        comes = np.random.default_rng((seed, 4)).random(times.size) < SHARE
        found = super().draw(pairs, num_requests, seed)
        return replace(found, arrival_s=np.repeat(times[comes], self.size)[:num_requests])


def bursts(one: LightTraining, step_s: float, size: int) -> Bursts:
    """The bursts of a training whose step lasts `step_s`: at its messages' moments without a network, stretched."""
    timeline = simulate(one.problem, one.schedule)
    inter_site = [index for index, name in enumerate(timeline.links) if len(set(name.split(">"))) == 2]
    sent_s = timeline.messages["start_s"][np.isin(timeline.messages["link"], inter_site)]
    moments = tuple(np.sort(sent_s * step_s / timeline.makespan_s).tolist())
    load = len(moments) * SHARE * size / step_s * HOLDING_S
    return Bursts(load, HOLDING_S, 4, 20, moments_s=moments, step_s=step_s, size=size)


def policies() -> dict[str, Any]:
    """The paper's three rules of paths, each with and without CBA; the ten-line rule and ours."""
    rules = {name: TransferRule(policy=POLICIES[name], retry_s=RETRY_S) for name in ("ksp-ff", "sd-ff", "cd")}
    found: dict[str, Any] = {name: Fixed(rule=rule) for name, rule in rules.items()}
    found |= {name: Cba(rule=rules[plain]) for name, plain in PLAIN.items()}
    best = {name: TRANSFER_POLICIES[name] for name in ("earliest", "widen")}
    return found | {name: replace(one, rule=replace(one.rule, retry_s=RETRY_S)) for name, one in best.items()}


def runs(order: str, shared: bool, draw: int, size: int) -> tuple[float, float, dict[str, Run]]:
    """(bound, load in Erlang, run of every policy) of one placement."""
    network = find_network("nsfnet", shared=shared)
    nodes = random_nodes(network, LABELS, find_modulation("64qam"), draw)
    where = scenario(shared=shared)
    one = training(where.paths, order, nodes)
    step_s, settled = 1.5 * no_network_s(one), where
    for _ in range(ROUNDS):
        settled = replace(where, background=bursts(one, step_s, size))
        step_s = _played(settled, {"ksp-ff": policies()["ksp-ff"]}, one, draw)["ksp-ff"].step_s
    found = _played(settled, policies(), one, draw)
    assert settled.background is not None
    return bound_s(where, one, candidates(shared=shared, k=8)), settled.background.load_erlang, found


def _played(where: LightScenario, chosen: dict[str, Any], one: LightTraining, draw: int) -> dict[str, Run]:
    wide = candidates(shared=where.paths.network.shared, k=8)
    arms = {name: (one, policy, wide if name in ("earliest", "widen") else None) for name, policy in chosen.items()}
    return {
        name: found[0] for name, found in compare_policies(where, arms, [draw], num_steps=2, skipped=2).runs.items()
    }


def table(order: str, shared: bool, draws: int, size: int) -> Iterator[str]:
    """Rows of all policies as Markdown."""
    found = [runs(order, shared, draw, size) for draw in range(draws)]
    bound, load = (float(np.mean([one[index] for one in found])) for index in (0, 1))
    fibres = "shared" if shared else "directed"
    yield f"\n{order}, {fibres} fibres, {draws} placements; bound {bound:.2f} s, background {load:.0f} E on average:\n"
    yield "| policy | step s | on plain | against the ten-line rule | refused % | background refused % |"
    yield "|---" * 6 + "|"
    for name in policies():
        steps = {other: [one[2][other].step_s for one in found] for other in (name, PLAIN.get(name, name), "earliest")}
        mean = mean_interval(steps[name])
        changes = [_change(steps, name, other) for other in (PLAIN.get(name, name), "earliest")]
        shares = [
            100 * float(np.mean([one[2][name].figures()[key] for one in found]))
            for key in ("refused_ratio", "background_refused_ratio")
        ]
        cells = [f"{mean.mean:.2f} ± {mean.half_width:.2f}", *changes, *(f"{share:.1f}" for share in shares)]
        yield f"| {name} | {' | '.join(cells)} |"


def _change(steps: dict[str, list[float]], name: str, other: str) -> str:
    if name == other:
        return ""
    change = paired_change(steps[name], steps[other])
    return f"{100 * change.mean:+.1f} ± {100 * change.half_width:.1f} %"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--size", type=int, default=60)
    parser.add_argument("--orders", default="gpipe,1f1b")
    given = parser.parse_args()
    for order in given.orders.split(","):
        for shared in (False, True):
            print(*table(order, shared, given.draws, given.size), sep="\n", flush=True)


if __name__ == "__main__":
    main()
