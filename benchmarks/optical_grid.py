"""Trainings over light paths over a grid of settings, a row per setting and order, printed as it comes.

    python benchmarks/optical_grid.py [loads|orders|networks|harm] [--seeds 10] [--first 0] [--rows FROM UNTIL]

The setting of optical_training.py with one figure changed at a time (`loads`: load, holding, set-up, fibres, size of
messages, microbatches, 70B), orders at equal memory (`orders`), other networks (`networks`), and harm to the background
(`harm`, for many seeds); all figures crossed are in optical_cross.py. Per row: CD-CBA with 4
candidates by km as published and with ours, the best fixed number of units, and ours, on the same backgrounds. Ours
is `known-ends` with 64 candidates by efficiency; "spread" knows no ends. With a set-up time both ask ahead, and "kept"
keeps one light path per hop for 1 s. Backgrounds are seeds from `--first` on.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from farpipe.optical import find_modulation, find_network, k_shortest
from farpipe.optical.intervals import mean_interval
from farpipe.optical.joint import in_flight
from farpipe.optical.strategies import STRATEGIES, Fixed, find_strategy
from farpipe.optical.study import bound_s, compare, no_network_s
from optical_training import NODES, candidates, scenario, training

FIXED = {"3 units": Fixed(3), "4 units": Fixed(4), "6 units": Fixed(6), "6, fewer": Fixed(6, True)}
HEADS = (
    "setting",
    "order",
    "bound s",
    "cd-cba s",
    "refused",
    "best fixed",
    "ours s",
    "refused",
    "over bound",
    "against cd-cba",
    "against cd-cba, our candidates",
    "against best fixed",
    "harm cd-cba",
    "harm ours",
)
HARM_HEADS = (
    *("modulation", "order", "policy", "step s", "against cd-cba", "harm, points", "against cd-cba"),
    *("refused for a step", "against cd-cba"),
)
ORDER_HEADS = (
    *("order", "in flight", "until W", "no network s", "bound s", "cd-cba s", "ours s", "refused", "over bound"),
    *("against cd-cba on 1f1b", "against cd-cba on this order"),
)


@dataclass(frozen=True)
class Setting:
    """One row but for its order."""

    load: float = 60.0
    holding: float = 0.2
    setup_s: float = 0.0
    shared: bool = True
    network: str = "nsfnet"
    modulation: str = "64qam"
    model: str = "8B"
    num_bytes: float = 512e6
    microbatches: int = 64

    def __str__(self) -> str:
        usual, words = Setting(), []
        for name, word in {
            "load": f"{self.load:g} E",
            "holding": f"holding {self.holding:g} s",
            "setup_s": f"set-up {1000 * self.setup_s:g} ms",
            "shared": "directed fibres",
            "network": self.network,
            "modulation": self.modulation,
            "model": self.model,
            "num_bytes": f"{8e-6 * self.num_bytes:g} Mbit",
            "microbatches": f"m = {self.microbatches}",
        }.items():
            if getattr(self, name) != getattr(usual, name):
                words.append(word)
        return ", ".join(words) or "as in the main table"


def model_of(setting: Setting) -> dict[str, Any]:
    """8 stages of a Llama-3 8B, or of the 70B: 8.8 times the work per token and messages of twice the size."""
    if setting.model == "8B":
        return {"num_bytes": setting.num_bytes}
    return {"num_bytes": 2 * setting.num_bytes, "forward": 0.026 * 8.8, "backward": 0.052 * 8.8}


def policies(setting: Setting, paths: Any, ours: Any) -> dict[str, tuple[Any, Any]]:
    rule = {"setup_s": setting.setup_s}
    fixed = {name: replace(one, rule=replace(one.rule, **rule)) for name, one in FIXED.items()}
    found = {
        "cd-cba": (find_strategy("cd-cba", **rule), None),
        "cd-cba, our candidates": (find_strategy("cd-cba", **rule), ours),
        "spread": (find_strategy("spread", ahead=setting.setup_s > 0, **rule), ours),
        "ours": (find_strategy("known-ends", ahead=setting.setup_s > 0, **rule), ours),
    }
    if setting.setup_s:
        found["ours, kept"] = (find_strategy("known-ends", keep_s=1.0, **rule), ours)
    return found | {name: (one, None) for name, one in fixed.items()}


def nodes_of(where: Any, network: str) -> tuple[str, ...]:
    names = where.paths.network.nodes
    return NODES if network == "nsfnet" else tuple(names[i * len(names) // 8] for i in (0, 1, 1, 3, 3, 5, 6, 7))


@cache
def of_pairs(setting: Setting, nodes: tuple[str, ...]) -> Any:
    """64 candidates by efficiency between the training's nodes."""
    net, table = find_network(setting.network, shared=setting.shared), find_modulation(setting.modulation)
    pairs = [(a, b) for a in sorted(set(nodes)) for b in sorted(set(nodes)) if a != b]
    return k_shortest(net, pairs, k=64, by="efficiency", modulation=table)


def rows(setting: Setting, order: str, seeds: range) -> list[list[str]]:
    where = scenario(setting.load, setting.holding, setting.shared, setting.network, setting.modulation)
    ours = of_pairs(setting, nodes_of(where, setting.network))
    one = training(
        where.paths, order, nodes_of(where, setting.network), microbatches=setting.microbatches, **model_of(setting)
    )
    settings = {name: (one, *rest) for name, rest in policies(setting, where.paths, ours).items()}
    found = compare(where, settings, seeds, num_steps=3, skipped=2)
    fixed = min(FIXED, key=lambda name: found.mean(name, "step_s").mean)
    bound = bound_s(where, one, ours)
    return [
        row(found, name, setting, order, bound, fixed) for name in ("spread", "ours", "ours, kept") if name in settings
    ]


def row(found: Any, name: str, setting: Setting, order: str, bound: float, fixed: str) -> list[str]:
    def of(which: str, figure: str, scale: float = 1.0, form: str = "{:.3f} ± {:.3f}") -> str:
        interval = found.mean(which, figure)
        return form.format(scale * interval.mean, scale * interval.half_width)

    def against(which: str) -> str:
        change = found.change(name, which)
        return f"{100 * change.mean:+.1f} ± {100 * change.half_width:.1f} %"

    kept = {"ours": "", "spread": ", spread", "ours, kept": ", kept"}[name]
    return [
        f"{setting}{kept}",
        order,
        f"{bound:.3f}",
        of("cd-cba", "step_s"),
        of("cd-cba", "refused_ratio", 100, "{:.2f} %"),
        fixed,
        of(name, "step_s"),
        of(name, "refused_ratio", 100, "{:.2f} %"),
        f"{100 * (found.mean(name, 'step_s').mean / bound - 1):+.1f} %",
        against("cd-cba"),
        against("cd-cba, our candidates"),
        against(fixed),
        of("cd-cba", "harm", 100, "{:+.2f} ± {:.2f}"),
        of(name, "harm", 100, "{:+.2f} ± {:.2f}"),
    ]


def one_at_a_time() -> list[tuple[Setting, str]]:
    usual = Setting()
    changed = [
        replace(usual, **change)
        for change in (
            {"load": 30.0},
            {"load": 90.0},
            {"holding": 10.0},
            {"setup_s": 0.01},
            {"setup_s": 0.1},
            {"shared": False},
            {"num_bytes": 64e6},
            {"microbatches": 16},
            {"microbatches": 128},
            {"model": "70B"},
        )
    ]
    return [(one, name) for one in (usual, *changed) for name in ("1f1b", "zb-h2", "gpipe")]


def networks() -> list[tuple[Setting, str]]:
    usual = Setting()
    changed = [
        replace(usual, modulation="deeprmsa"),
        replace(usual, network="topohub:sndlib/nobel-us"),
        replace(usual, network="topohub:sndlib/nobel-eu"),
        replace(usual, network="topohub:topozoo/Uninett2010", load=120.0),
        replace(usual, modulation="gnpy"),
    ]
    return [(one, name) for one in changed for name in ("1f1b", "zb-h2")]


TABLES = {"loads": one_at_a_time, "networks": networks}
HARM = (("64qam", "1f1b"), ("64qam", "zb-h2"), ("64qam", "gpipe"), ("deeprmsa", "1f1b"))


def held_until_w(one: Any) -> float:
    """Microbatches in flight if all that a forward leaves stays until its weight gradient is done."""
    data = one.problem.to_data()
    for stage in data["stages"]:
        stage["weight_stash_bytes"] = stage["activation_bytes"]
    return in_flight(type(one.problem).from_data(data), one.schedule)


def harm_rows(modulation: str, order: str, seeds: range) -> Iterator[list[str]]:
    """Background requests that the training had refused: in points of all requests, and for one step of training."""
    setting = Setting(modulation=modulation)
    where = scenario(modulation=modulation)
    one = training(where.paths, order)
    used = policies(setting, where.paths, of_pairs(setting, NODES))
    settings = {name: (one, *used[name]) for name in ("cd-cba", "6, fewer", "spread", "ours")}
    found = compare(where, settings, seeds, num_steps=3, skipped=2)
    requests_per_s = setting.load / setting.holding
    points = {name: [100 * run.figures()["harm"] for run in runs] for name, runs in found.runs.items()}
    for_a_step = {
        name: [requests_per_s * run.figures()["harm"] * run.figures()["step_s"] for run in runs]
        for name, runs in found.runs.items()
    }
    for name in settings:
        step, change = found.mean(name, "step_s"), found.change(name, "cd-cba")
        row = [modulation, order, name, f"{step.mean:.3f} ± {step.half_width:.3f}"]
        row.append(f"{100 * change.mean:+.1f} ± {100 * change.half_width:.1f} %")
        for figure in (points, for_a_step):
            less = [a - b for a, b in zip(figure[name], figure["cd-cba"], strict=True)]
            row += [_with_interval(figure[name]), "" if name == "cd-cba" else _with_interval(less)]
        yield row


def _with_interval(values: list[float]) -> str:
    interval = mean_interval(values)
    return f"{interval.mean:+.2f} ± {interval.half_width:.2f}"


def order_rows(seeds: range) -> Iterator[list[str]]:
    """Orders by the microbatches in flight that they need, under ours; and what CD-CBA makes of the same order."""
    where = scenario()
    ours = candidates(k=64, by="efficiency")
    settings: dict[str, Any] = {}
    for name in ("1f1b", "zb-h1", "zb-1p", "eager+1", "zb-h2", "zb-2p", "eager+2", "gpipe"):
        one = training(where.paths, name)
        settings[f"{name}, cd-cba"] = (one, STRATEGIES["cd-cba"], None)
        settings[f"{name}, ours"] = (one, STRATEGIES["known-ends"], ours)
    found = compare(where, settings, seeds, num_steps=3, skipped=2)
    for name in settings:
        order, _, who = name.partition(", ")
        if who == "cd-cba":
            continue
        one = settings[name][0]
        bound, time_s = bound_s(where, one, ours), found.mean(name, "step_s")
        first, same = found.change(name, "1f1b, cd-cba"), found.change(name, f"{order}, cd-cba")
        yield [
            order,
            f"{in_flight(one.problem, one.schedule):.0f}",
            f"{held_until_w(one):.0f}",
            f"{no_network_s(one):.3f}",
            f"{bound:.3f}",
            f"{found.mean(f'{order}, cd-cba', 'step_s').mean:.3f}",
            f"{time_s.mean:.3f} ± {time_s.half_width:.3f}",
            f"{100 * found.mean(name, 'refused_ratio').mean:.2f} %",
            f"{100 * (time_s.mean / bound - 1):+.2f} %",
            f"{100 * first.mean:+.1f} ± {100 * first.half_width:.1f} %",
            f"{100 * same.mean:+.1f} ± {100 * same.half_width:.1f} %",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", choices=(*TABLES, "orders", "harm"), default="loads")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rows", type=int, nargs=2, metavar=("FROM", "UNTIL"), help="of the table, from 0")
    args = parser.parse_args()
    seeds, part = range(args.first, args.first + args.seeds), slice(*(args.rows or (None,)))
    if args.table == "orders":
        show(ORDER_HEADS, order_rows(seeds))
    elif args.table == "harm":
        show(HARM_HEADS, (row for one in HARM[part] for row in harm_rows(*one, seeds)))
    else:
        show(HEADS, (row for setting, order in TABLES[args.table]()[part] for row in rows(setting, order, seeds)))


def show(heads: Sequence[str], table: Iterable[list[str]]) -> None:
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)
    for one in table:
        print("| " + " | ".join(one) + " |", flush=True)


if __name__ == "__main__":
    main()
