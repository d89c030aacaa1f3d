"""Trainings over light paths against the best simple rules, over random placements, a row each as it comes.

    python -m benchmarks.optical.optical_grid [headline|settings|rules|setup|keep|orders] [--draws 10] [--rows A B]

A draw is a placement, six nodes at random for eight stages (the second and the third site have two), with a background
of its own; all policies see the same draws, and intervals are over draws. What is not named in a row is the default of
`farpipe optical`: reach by gnpy, set-up and release 10 ms, asked for ahead, fibres shared by both directions. The
ten-line rule is `earliest`; the best fixed number is the fastest, in hindsight, of 3 to 6 units, or at most 3, 4 or 6
and fewer when these are not free. All have 8 candidates by km but CD-CBA, which has 4 as published.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from typing import Any

from benchmarks.optical.optical_training import scenario, training
from farpipe.core.schedule import peak_memory_bytes
from farpipe.optical import find_modulation, find_network, k_shortest
from farpipe.optical.confidence import mean_interval
from farpipe.optical.demands import CANDIDATES, Fixed, TransferPolicy, find_transfer_policy
from farpipe.optical.policies import POLICIES
from farpipe.optical.study import (
    LightScenario,
    PolicyComparison,
    Run,
    bound_s,
    compare_policies,
    no_network_s,
    random_nodes,
)

LABELS = ("a", "b", "b", "c", "c", "d", "e", "f")
FIXED = {f"{units}": Fixed(units) for units in range(3, 7)} | {f"{n}, fewer": Fixed(n, fewer=True) for n in (3, 4, 6)}
HEADS = (
    *("setting", "order", "bound s", "cd-cba s", "best fixed s", "ten-line rule s", "ours s"),
    *("ours against ten-line rule", "least to most", "against best fixed", "against cd-cba"),
    *("refused, waited %: cd-cba", "best fixed", "rule", "ours"),
    *("background refused alone %", "harm, points: rule", "ours"),
)
ORDER_HEADS = (
    *("order", "in flight", "no network s", "cd-cba s", "ten-line rule s", "ours s"),
    *("ours against cd-cba on 1f1b", "against cd-cba on this order", "against ten-line rule on this order"),
)
ORDERS = ("1f1b", "zb-h1", "zb-1p", "eager+1", "zb-h2", "gpipe")


@dataclass(frozen=True)
class Setting:
    """One row."""

    order: str = "1f1b"
    load: float = 60.0
    holding: float = 0.2
    setup_s: float = 0.01
    release_s: float = 0.01
    keep_s: float | None = None
    ahead: bool = True
    shared: bool = True
    network: str = "nsfnet"
    modulation: str = "gnpy"

    def __str__(self) -> str:
        usual, words = Setting(), []
        for name, word in {
            "network": self.network.rpartition("/")[2],
            "load": f"{self.load:g} E",
            "holding": f"holding {self.holding:g} s",
            "setup_s": f"set-up {1000 * self.setup_s:g} ms",
            "release_s": f"release {1000 * self.release_s:g} ms",
            "ahead": "asked for when the producer ends",
            "shared": "directed fibres",
            "modulation": self.modulation,
        }.items():
            if getattr(self, name) != getattr(usual, name):
                words.append(word)
        return ", ".join(words) or "the default"

    def scenario(self) -> LightScenario:
        return scenario(self.load, self.holding, self.shared, self.network, self.modulation)

    def training(self, nodes: tuple[str, ...], order: str | None = None) -> Any:
        """8 stages of a Llama-3 8B."""
        return training(self.scenario().paths, order or self.order, nodes)

    def ruled(self, policy: TransferPolicy) -> Any:
        """The policy with this setting's times of set-up and release."""
        names = ("setup_s", "release_s", "keep_s", "ahead")
        return replace(policy, rule=replace(policy.rule, **{name: getattr(self, name) for name in names}))


HEADLINE = tuple(
    Setting(order, load, network=network)
    for network in ("nsfnet", "topohub:sndlib/nobel-eu", "topohub:sndlib/janos-us")
    for load in (30.0, 60.0, 90.0)
    for order in ("1f1b", "zb-h2")
)
SETTINGS = (
    Setting(modulation="deeprmsa"),
    *(Setting(order, modulation="64qam") for order in ("1f1b", "zb-h2")),
    Setting(modulation="64qam", setup_s=0.0, release_s=0.0),
    Setting(modulation="64qam", setup_s=0.0, release_s=0.0, shared=False),
    Setting(setup_s=0.0, release_s=0.0),
    Setting(release_s=0.0),
    Setting(setup_s=0.1),
    Setting(shared=False),
    Setting(holding=10.0),
    Setting(ahead=False),
)


def placement(setting: Setting, draw: int) -> tuple[str, ...]:
    """Eight ranks at six random nodes whose neighbours in the pipeline are within reach."""
    return random_nodes(find_network(setting.network), LABELS, find_modulation(setting.modulation), draw)


@cache
def candidates_of(setting: Setting, nodes: tuple[str, ...], k: int, by: str) -> Any:
    """Candidates between the nodes of a training."""
    net, pairs = find_network(setting.network, shared=setting.shared), list(pairwise(nodes))
    pairs = sorted({ends for a, b in pairs for ends in ((a, b), (b, a)) if a != b})
    return k_shortest(net, pairs, k=k, by=by, modulation=find_modulation(setting.modulation))


Arms = dict[str, tuple[TransferPolicy, Any]]
KEPT = ("ksp-ff", "earliest", "widen")


def policies(setting: Setting, nodes: tuple[str, ...]) -> Arms:
    """Policies by name, each with its candidates."""

    def own(name: str) -> tuple[TransferPolicy, Any]:
        return setting.ruled(find_transfer_policy(name)), candidates_of(setting, nodes, *CANDIDATES[name])

    near = candidates_of(setting, nodes, 8, "km")
    fixed = {f"fixed {name}": (setting.ruled(one), near) for name, one in FIXED.items()}
    return {"cd-cba": own("cd-cba"), **fixed, "rule": own("earliest"), "ours": own("widen")}


def without(setting: Setting, nodes: tuple[str, ...]) -> Arms:
    """Ours, and what each rule of it brings: without it, or with what was left out of it."""
    base = find_transfer_policy("widen")
    near = candidates_of(setting, nodes, 8, "km")

    def changed(**rule: Any) -> Any:
        return replace(base, rule=replace(base.rule, **rule))

    arms = {
        "ours": base,
        "without widening": changed(widen=False),
        "whole units": replace(changed(unit_gbit=75.0), parts=1),
        "neither: the ten-line rule": find_transfer_policy("earliest"),
        "last fit": changed(policy=POLICIES["last-fit"]),
        "best fit": changed(policy=POLICIES["best-fit"]),
    }
    found = {name: (setting.ruled(one), near) for name, one in arms.items()}
    more = {"8 candidates by hops": (8, "hops"), "64 by efficiency": (64, "efficiency")}
    return found | {name: (found["ours"][0], candidates_of(setting, nodes, *which)) for name, which in more.items()}


def over_draws(
    setting: Setting,
    arms_of: Callable[[Setting, tuple[str, ...]], Arms],
    draws: int,
    num_steps: int = 3,
    skipped: int = 2,
) -> PolicyComparison:
    """All draws in one comparison, policy by policy."""
    runs: dict[str, list[Run]] = {}
    for draw in range(draws):
        nodes = placement(setting, draw)
        arms = {name: (setting.training(nodes), *arm) for name, arm in arms_of(setting, nodes).items()}
        for name, found in compare_policies(
            setting.scenario(), arms, [draw], num_steps=num_steps, skipped=skipped
        ).runs.items():
            runs.setdefault(name, []).extend(found)
    return PolicyComparison(runs)


def percent(values: Iterable[float], form: str = "{:+.1f} ± {:.1f} %") -> str:
    interval = mean_interval([100 * value for value in values])
    return form.format(interval.mean, interval.half_width)


def changes(found: PolicyComparison, name: str, baseline: str) -> list[float]:
    return [a.step_s / b.step_s - 1 for a, b in zip(found.runs[name], found.runs[baseline], strict=True)]


def row(setting: Setting, draws: int) -> list[str]:
    found = over_draws(setting, policies, draws)
    mean = {name: found.mean(name, "step_s").mean for name in found.runs}
    best = min((name for name in mean if name.startswith("fixed")), key=lambda name: mean[name])
    bounds = mean_interval([_bound(setting, placement(setting, draw)) for draw in range(draws)])
    cells = [str(setting), setting.order, f"{bounds.mean:.3f}", f"{mean['cd-cba']:.3f}"]
    cells += [f"{mean[best]:.3f} ({best.removeprefix('fixed ')})", f"{mean['rule']:.3f}", f"{mean['ours']:.3f}"]
    each = changes(found, "ours", "rule")
    cells += [percent(each), f"{100 * min(each):+.0f} to {100 * max(each):+.0f}"]
    cells += [percent(changes(found, "ours", name)) for name in (best, "cd-cba")]
    for name in ("cd-cba", best, "rule", "ours"):
        both = [100 * found.mean(name, figure).mean for figure in ("refused_ratio", "waited_ratio")]
        cells.append("{:.1f}, {:.1f}".format(*both))
    alone = found.mean("rule", "background_refused_ratio").mean - found.mean("rule", "harm").mean
    harms = [percent([run.harm for run in found.runs[name]], "{:+.1f} ± {:.1f}") for name in ("rule", "ours")]
    return [*cells, f"{100 * alone:.1f}", *harms]


def _bound(setting: Setting, nodes: tuple[str, ...]) -> float:
    return bound_s(setting.scenario(), setting.training(nodes), candidates_of(setting, nodes, 8, "km"))


def rule_rows(draws: int) -> Iterator[list[str]]:
    """What each rule brings, in four settings."""
    where = [Setting(), Setting("zb-h2"), Setting(modulation="deeprmsa"), Setting(network="topohub:sndlib/nobel-eu")]
    found = [over_draws(setting, without, draws) for setting in where]
    for name in found[0].runs:
        yield [name, *(percent(changes(one, name, "ours")) for one in found)]


def setup_rows(draws: int) -> Iterator[list[str]]:
    """Light paths that are kept, by their width: time and harm."""
    for setup_s in (1.0, 10.0, 60.0):
        for units in (1, 2, 3, 4, 6) if setup_s == 10.0 else (6,):
            yield _setup_row(Setting(setup_s=setup_s, keep_s=1000.0), units, draws)


def _setup_row(setting: Setting, units: int, draws: int) -> list[str]:
    def arms(setting: Setting, nodes: tuple[str, ...]) -> Arms:
        near = candidates_of(setting, nodes, 8, "km")
        return {name: (setting.ruled(find_transfer_policy(name, units)), near) for name in KEPT}

    found, first = over_draws(setting, arms, draws), over_draws(setting, arms, draws, num_steps=1, skipped=0)
    nodes = [placement(setting, draw) for draw in range(draws)]
    tables = [candidates_of(setting, one, 8, "km") for one in nodes]
    bounds = [
        bound_s(setting.scenario(), setting.training(at), near, units) for at, near in zip(nodes, tables, strict=True)
    ]
    over = [run.step_s / bound - 1 for run, bound in zip(found.runs["widen"], bounds, strict=True)]
    cells = [f"{setting.setup_s:g}", f"{units}", f"{mean_interval(bounds).mean:.3f}"]
    cells += [f"{found.mean(name, 'step_s').mean:.3f}" for name in KEPT]
    cells += [*(percent(changes(found, "widen", name)) for name in KEPT[:2]), percent(over)]
    cells += [f"{first.mean(name, 'step_s').mean:.1f}" for name in KEPT]
    return cells + [percent([run.harm for run in found.runs[name]], "{:+.1f} ± {:.1f}") for name in KEPT]


def keep_rows(draws: int) -> Iterator[list[str]]:
    """Light paths by how long one that idles is kept: time, slots held and harm, of the ten-line rule and ours."""
    for setup_s, keep_s in product((1.0, 10.0), (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 1000.0)):
        setting = Setting(setup_s=setup_s, keep_s=keep_s)
        found = over_draws(setting, policies_of(("rule", "ours")), draws)
        figures = [[found.mean(name, key).mean for name in ("rule", "ours")] for key in ("step_s", "held_slots")]
        cells = [
            f"{setup_s:g}",
            f"{keep_s:g}",
            *(f"{one:.2f}" for one in figures[0]),
            *(f"{s:.0f}" for s in figures[1]),
        ]
        yield [*cells, *(percent([run.harm for run in found.runs[n]], "{:+.1f} ± {:.1f}") for n in ("rule", "ours"))]


def order_rows(draws: int) -> Iterator[list[str]]:
    """Orders by the microbatches in flight that they need, under CD-CBA, the ten-line rule and ours."""
    usual, names = Setting(), ("cd-cba", "rule", "ours")
    found = {order: over_draws(Setting(order), policies_of(names), draws) for order in ORDERS}
    runs = {f"{order}, {name}": found[order].runs[name] for order in ORDERS for name in names}
    both, nodes = PolicyComparison(runs), placement(usual, 0)
    for order in ORDERS:
        one, name = usual.training(nodes, order), f"{order}, ours"
        cells = [order, f"{max(peak_memory_bytes(one.problem, one.schedule)):.0f}", f"{no_network_s(one):.3f}"]
        cells += [f"{both.mean(f'{order}, {who}', 'step_s').mean:.3f}" for who in names]
        baselines = ("1f1b, cd-cba", f"{order}, cd-cba", f"{order}, rule")
        yield [*cells, *(percent(changes(both, name, baseline)) for baseline in baselines)]


def policies_of(names: tuple[str, ...]) -> Callable[[Setting, tuple[str, ...]], Arms]:
    def arms(setting: Setting, nodes: tuple[str, ...]) -> Arms:
        return {name: arm for name, arm in policies(setting, nodes).items() if name in names}

    return arms


RULE_HEADS = ("rule", "the default", "zb-h2", "deeprmsa", "nobel-eu")
SETUP_HEADS = (
    *("set-up s", "units", "bound s", "fixed number s", "ten-line rule s", "ours s"),
    *("ours against fixed", "against rule", "ours over bound"),
    *("first step s: fixed", "rule", "ours", "harm, points: fixed", "rule", "ours"),
)


KEEP_HEADS = ("set-up s", "kept s", "rule s", "ours s", "slots held: rule", "ours", "harm, points: rule", "ours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = ("headline", "settings", "rules", "setup", "keep", "orders")
    parser.add_argument("table", nargs="?", choices=tables, default="headline")
    parser.add_argument("--draws", type=int, default=10, help="random placements, each with its background")
    parser.add_argument("--rows", type=int, nargs=2, metavar=("FROM", "UNTIL"), help="of headline, settings; from 0")
    args = parser.parse_args()
    more = {"rules": (RULE_HEADS, rule_rows), "setup": (SETUP_HEADS, setup_rows)}
    more |= {"keep": (KEEP_HEADS, keep_rows), "orders": (ORDER_HEADS, order_rows)}
    if args.table in more:
        heads, rows = more[args.table]
        show(heads, rows(args.draws))
    else:
        chosen = (HEADLINE if args.table == "headline" else SETTINGS)[slice(*(args.rows or (None,)))]
        show(HEADS, (row(setting, args.draws) for setting in chosen))


def show(heads: tuple[str, ...], table: Iterable[list[str]]) -> None:
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)
    for one in table:
        print("| " + " | ".join(one) + " |", flush=True)


if __name__ == "__main__":
    main()
