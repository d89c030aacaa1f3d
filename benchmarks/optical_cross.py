"""Trainings over light paths with all figures of the setting crossed, policy by policy on paired backgrounds.

    python benchmarks/optical_cross.py run ROWS.jsonl [--table network|rest] [--policies ours] [--seeds 10] [--cells N]
    python benchmarks/optical_cross.py show ROWS.jsonl

`network`: all of load x holding x set-up x shared or directed fibres, for 1F1B, 64 microbatches, 8B and 512 MB.
`rest`: cells drawn at random, but always the same, from order x microbatches x model x size of messages x load x
holding x set-up x fibres. "auto-N" is the order that is fastest on the network of those in which a rank holds at most N
microbatches: 8 is 1F1B's memory, 16 about that of eager and ZB-H2. A line per cell, policy and seed is written as it is
known, and a run goes on where the file ends. `show` prints the cells and the means over them as Markdown.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from farpipe.optical.intervals import Interval, mean_interval, paired_change
from farpipe.optical.joint import joint_order
from farpipe.optical.strategies import Fixed, find_strategy
from farpipe.optical.study import bound_s, no_network_s, run_once
from farpipe.optical.training import Training
from farpipe.step import Problem
from optical_grid import Setting, model_of
from optical_training import NODES, candidates, scenario, training

LOADS, HOLDING_S, SETUP_S, FIBRES = (30.0, 60.0, 90.0), (0.2, 10.0), (0.0, 0.01, 0.1), (True, False)
ORDERS = ("1f1b", "gpipe", "eager+1", "auto-8", "auto-16")
OURS = "known-ends"
JUDGE = 1000
"""Seed of the background on which an order is chosen; no result is measured on it."""

Cell = tuple[Setting, str]


def network_cells() -> list[Cell]:
    grid = itertools.product(LOADS, HOLDING_S, SETUP_S, FIBRES)
    return [(Setting(load, holding, setup_s, shared), "1f1b") for load, holding, setup_s, shared in grid]


def rest_cells() -> list[Cell]:
    work = itertools.product(ORDERS, (16, 32, 64, 128), ("8B", "70B"), (512e6, 64e6))
    found = [
        (Setting(load, holding, setup_s, shared, model=model, num_bytes=size, microbatches=count), order)
        for order, count, model, size in work
        for load, holding, setup_s, shared in itertools.product(LOADS, HOLDING_S, SETUP_S, FIBRES)
    ]
    random.Random(12).shuffle(found)
    return found


TABLES: dict[str, Callable[[], list[Cell]]] = {"network": network_cells, "rest": rest_cells}


def policies(setting: Setting) -> dict[str, tuple[Any, Any]]:
    """Policies by name, each with its candidates; None: 4 by km."""
    rule = {"setup_s": setting.setup_s}
    ours = candidates("nsfnet", setting.shared, 64, "efficiency", setting.modulation)
    found: dict[str, tuple[Any, Any]] = {
        "ours": (find_strategy(OURS, ahead=setting.setup_s > 0, **rule), ours),
        "cd-cba": (find_strategy("cd-cba", **rule), None),
        "cd-cba, our candidates": (find_strategy("cd-cba", **rule), ours),
        "cba": (find_strategy("cba", **rule), None),
        "sd-ff": (find_strategy("sd-ff", **rule), None),
    }
    for units, fewer in ((3, False), (4, False), (6, False), (6, True)):
        fixed = Fixed(units, fewer)
        name = f"{units}, fewer" if fewer else f"{units} units"
        found[name] = (replace(fixed, rule=replace(fixed.rule, **rule)), None)
    if setting.setup_s:
        found["ours, kept"] = (find_strategy(OURS, keep_s=1.0, **rule), ours)
    return found


@cache
def _training(setting: Setting, order: str) -> Training:
    table, figures = candidates("nsfnet", setting.shared), model_of(setting)
    if not order.startswith("auto-"):
        return training(table, order, microbatches=setting.microbatches, **figures)
    plain = training(table, "1f1b", microbatches=setting.microbatches, **figures).problem.to_data()
    for rank, stage in zip(plain["ranks"], plain["stages"], strict=True):
        rank["memory_bytes"] = float(order.removeprefix("auto-"))
        stage["weight_stash_bytes"] = stage["activation_bytes"]  # all that a forward leaves stays until W
    problem = Problem.from_data(plain)
    strategy, paths = policies(setting)["ours"]
    where = scenario(setting.load, setting.holding, setting.shared)
    until_s = where.begin_s + 12 * bound_s(where, _training(setting, "1f1b"), paths)
    shared = where.shared(JUDGE, until_s, paths)
    chosen = joint_order(shared, problem, NODES, strategy, begin_s=where.begin_s)
    return Training(problem, chosen, NODES)


def measure(cell: Cell, name: str, seeds: int, there: set[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    setting, order = cell
    missing = [seed for seed in range(seeds) if (key(cell), name, seed) not in there]
    if not missing:
        return
    where = scenario(setting.load, setting.holding, setting.shared)
    strategy, paths = policies(setting)[name]
    one = _training(setting, order)
    facts = {"bound_s": bound_s(where, one, paths), "no_network_s": no_network_s(one), "method": one.schedule.method}
    for seed in missing:
        figures = run_once(where, one, strategy, seed, num_steps=3, skipped=2, paths=paths).figures()
        yield {"cell": asdict(setting), "order": order, "policy": name, "seed": seed, **facts, **figures}


def key(cell: Cell) -> str:
    return json.dumps([asdict(cell[0]), cell[1]], sort_keys=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(row: dict[str, Any]) -> str:
    return key((Setting(**row["cell"]), row["order"]))


def run(path: Path, table: str, wanted: list[str] | None, seeds: int, cells: int | None) -> None:
    there = {(key_of(row), row["policy"], row["seed"]) for row in read(path)}
    with path.open("a") as file:
        for cell in TABLES[table]()[:cells]:
            for name in wanted or policies(cell[0]):
                for row in measure(cell, name, seeds, there) if name in policies(cell[0]) else ():
                    print(json.dumps(row), file=file, flush=True)


Rows = dict[str, dict[int, dict[str, Any]]]
"""Of one cell: figures by policy and seed."""


def cells_of(path: Path) -> dict[str, Rows]:
    """The cells that ours and CD-CBA were both measured in, on two backgrounds or more."""
    found: dict[str, Rows] = {}
    for row in read(path):
        found.setdefault(key_of(row), {}).setdefault(row["policy"], {})[row["seed"]] = row
    return {name: rows for name, rows in found.items() if len(common(rows, "ours", "cd-cba")) > 1}


def common(rows: Rows, *names: str) -> list[int]:
    return sorted(set.intersection(*(set(rows.get(name, {})) for name in names)))


def against(rows: Rows, name: str, baseline: str) -> Interval:
    seeds = common(rows, name, baseline)
    return paired_change(*[[rows[who][seed]["step_s"] for seed in seeds] for who in (name, baseline)])


def mean(rows: Rows, name: str, figure: str) -> float:
    seeds = common(rows, "ours", name)
    return sum(rows[name][seed][figure] for seed in seeds) / len(seeds)


def best_fixed(rows: Rows) -> str:
    fixed = [name for name in rows if name[0].isdigit() and len(common(rows, "ours", name)) > 1]
    return min(fixed, key=lambda name: mean(rows, name, "step_s"), default="cd-cba")


def line(rows: Rows) -> list[str]:
    first = next(iter(rows["ours"].values()))
    fixed, harm = best_fixed(rows), mean_interval(more_harm(rows))
    changes = [against(rows, "ours", name) for name in ("cd-cba", fixed)]
    order = first["order"] if first["order"] == first["method"] else f"{first['order']}: {first['method']}"
    cells = [str(Setting(**first["cell"])), order, f"{len(common(rows, 'ours', 'cd-cba'))}"]
    cells += [f"{mean(rows, name, 'step_s'):.3f}" for name in ("ours", "cd-cba")]
    cells += [f"{100 * (mean(rows, 'ours', 'step_s') / first['bound_s'] - 1):+.1f} %"]
    cells += [f"{100 * one.mean:+.1f} ± {100 * one.half_width:.1f} %" for one in changes] + [fixed]
    cells += [f"{100 * mean(rows, name, 'refused_ratio'):.2f}" for name in ("ours", "cd-cba")]
    cells += [f"{1000 * mean(rows, name, 'mean_wait_s'):.2f}" for name in ("ours", "cd-cba")]
    cells += [f"{mean(rows, name, 'held_slots') * mean(rows, name, 'step_s'):.0f}" for name in ("ours", "cd-cba")]
    return [*cells, f"{100 * harm.mean:+.2f} ± {100 * harm.half_width:.2f}"]


def more_harm(rows: Rows) -> list[float]:
    """Harm of ours less that of CD-CBA by seed, as a share of the background during a step."""
    return [rows["ours"][s]["harm"] - rows["cd-cba"][s]["harm"] for s in common(rows, "ours", "cd-cba")]


HEADS = (
    *("setting", "order", "seeds", "ours s", "cd-cba s", "over bound", "against cd-cba", "against best fixed", "it is"),
    *(
        "refused % ours",
        "cd-cba",
        "wait ms ours",
        "cd-cba",
        "slot s per step ours",
        "cd-cba",
        "harm less cd-cba's, points",
    ),
)


def table(heads: tuple[str, ...], lines: list[list[str]]) -> None:
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for cells in lines:
        print("| " + " | ".join(cells) + " |")
    print()


def means(cells: dict[str, Rows]) -> list[list[str]]:
    """A line per level of every figure that was crossed: means over the cells with it."""
    levels: dict[str, list[Rows]] = {"all": list(cells.values())}
    for rows in cells.values():
        row = next(iter(rows["ours"].values()))
        for name, value in [("order", row["order"]), *row["cell"].items()]:
            levels.setdefault(f"{name} {value}", []).append(rows)
    return [level(name, found) for name, found in sorted(levels.items()) if name == "all" or len(found) < len(cells)]


def level(name: str, found: list[Rows]) -> list[str]:
    changes = [against(rows, "ours", "cd-cba") for rows in found]
    fixed = [against(rows, "ours", best_fixed(rows)) for rows in found]
    refused = [mean(rows, "ours", "refused_ratio") for rows in found]
    harm = [mean_interval(more_harm(rows)) for rows in found]
    shown = [f"{100 * sum(one.mean for one in several) / len(found):+.1f} %" for several in (changes, fixed)]
    shown += [f"{sum(one.high < 0 for one in changes)}, {sum(one.low > 0 for one in changes)}"]
    shown += [f"{sum(one.high < 0 for one in fixed)}, {sum(one.low > 0 for one in fixed)}"]
    shown += [f"{100 * sum(refused) / len(found):.2f}, {100 * max(refused):.2f}"]
    return [name, f"{len(found)}", *shown, f"{sum(one.high < 0 for one in harm)}, {sum(one.low > 0 for one in harm)}"]


LEVEL_HEADS = (
    *("figure", "cells", "against cd-cba", "against best fixed", "faster, slower than cd-cba"),
    *("faster, slower than best fixed", "refused %: mean, most", "less, more harm than cd-cba"),
)


def show(path: Path) -> None:
    cells = cells_of(path)
    table(LEVEL_HEADS, means(cells))
    table(HEADS, [line(rows) for rows in cells.values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("rows", type=Path)
    parser.add_argument("--table", choices=tuple(TABLES), default="network")
    parser.add_argument("--policies", nargs="+")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--cells", type=int, help="stop after so many cells")
    args = parser.parse_args()
    if args.what == "run":
        run(args.rows, args.table, args.policies, args.seeds, args.cells)
    else:
        show(args.rows)


if __name__ == "__main__":
    main()
