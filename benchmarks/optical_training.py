"""Trainings over light paths, compared fairly: CBA, CD-CBA, fixed baselines, ours, on paired backgrounds.

    python benchmarks/optical_training.py [main|setup|published] [--seeds 10]

CBA's setting as far as it is public: NSFNET, 80 slots of 12.5 GHz, 75 Gbit/s per slot, 1 to 6 slots and a guard
per message, 8 stages on 6 sites, background requests of 4 to 20 slots. All settings of a table share the background
streams, the background's candidates (4 by km), the placement, the order, the limit of 6 units per message and the
rule for refused messages (they wait and try again). Prints Markdown. Other loads, models, orders and networks are in
optical_grid.py.
"""

import argparse
import itertools
from dataclasses import replace
from functools import cache

from farpipe.optical import Grid, PoissonTraffic, find_modulation, find_network, k_shortest
from farpipe.optical.joint import in_flight, nominal_problem
from farpipe.optical.policies import POLICIES
from farpipe.optical.strategies import STRATEGIES, Cba, Fixed, Widest, find_strategy
from farpipe.optical.study import Scenario, bound_s, compare, no_network_s
from farpipe.optical.training import Training, TransferRule, pipeline_problem
from farpipe.schedule.library import order
from farpipe.schedule.library.eager import eager

NODES = ("1", "4", "4", "10", "10", "14", "8", "12")


@cache
def candidates(network="nsfnet", shared=True, k=4, by="km", modulation="64qam"):
    return k_shortest(find_network(network, shared=shared), k=k, by=by, modulation=find_modulation(modulation))


def scenario(load=60.0, holding=0.2, shared=True, network="nsfnet", modulation="64qam"):
    km4, table = candidates(network, shared), find_modulation(modulation)
    return Scenario(km4, km4, Grid(80), PoissonTraffic(load, holding, 4, 20) if load else None, table)


def training(paths, name, nodes=NODES, microbatches=64, num_bytes=512e6, forward=0.026, backward=0.052):
    problem = pipeline_problem([forward] * 8, [backward] * 8, microbatches, nodes, num_bytes)
    nominal = nominal_problem(problem, nodes, paths, 450.0)
    if name.startswith("eager+"):
        between = [int(a != b) for a, b in itertools.pairwise(nodes)]
        schedule = eager(nominal, [int(name[6:]) * sum(between[stage:]) for stage in range(8)])
    else:
        schedule = order(name, nominal)
    return Training(nominal, schedule, nodes)


def show(title, where, settings, seeds, baselines=(), num_steps=3):
    found = compare(where, settings, range(seeds), num_steps=num_steps, skipped=2)
    first = next(iter(settings.values()))[0]
    print(
        f"\n### {title}\n\nBound of the order (6 units) {bound_s(where, first):.3f} s, "
        f"no network {no_network_s(first):.3f} s,"
    )
    print(f"{in_flight(first.problem, first.schedule):.0f} microbatches in flight, {seeds} backgrounds.\n")
    heads = "".join(f" against {name} |" for name in baselines)
    print(f"| policy | step s | refused % | wait ms | units | slots held | harm, points | by slots | bubble % |{heads}")
    print("|---|" + "---|" * (8 + len(baselines)))
    for name in settings:
        figures = {key: found.mean(name, key) for key in found.runs[name][0].figures()}
        harm = figures["harm"]
        row = [
            f"{figures['step_s'].mean:.3f} ± {figures['step_s'].half_width:.3f}",
            f"{100 * figures['refused_ratio'].mean:.2f}",
            f"{1000 * figures['mean_wait_s'].mean:.2f}",
            f"{figures['mean_units'].mean:.2f}",
            f"{figures['held_slots'].mean:.1f}",
            f"{100 * harm.mean:+.2f} ± {100 * harm.half_width:.2f}",
            f"{100 * figures['harm_by_slots'].mean:+.2f}",
            f"{100 * figures['bubble_ratio'].mean:.1f}",
        ]
        for baseline in baselines:
            change = found.change(name, baseline)
            row.append(f"{100 * change.mean:+.1f} ± {100 * change.half_width:.1f} %")
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)
    return found


def settings_of(one, hops8):
    fixed = {f"ksp-ff {n}": Fixed(n) for n in (1, 2, 3, 4, 6)}
    fewer = {f"ksp-ff {n}, fewer": Fixed(n, True) for n in (3, 6)}
    theirs = {name: STRATEGIES[name] for name in ("sd-ff", "cd", "cba", "cba-sd-ff", "cd-cba", "cd-cba-fewer")}
    same = {"cd-cba, 8 by hops": STRATEGIES["cd-cba"], "ksp-ff 6, fewer, 8 by hops": Fixed(6, True)}
    ours = {name: STRATEGIES[name] for name in ("widest", "slack", "earliest")}
    ours["earliest, first fit"] = Widest(rule=TransferRule(max_blocks=2, earliest=True))
    ours["earliest, one block"] = Widest(rule=TransferRule(policy=POLICIES["last-fit"], earliest=True))
    ours["earliest, 4 by km"] = STRATEGIES["earliest"]
    base, most = STRATEGIES["known-ends"], candidates(k=64, by="efficiency")
    later = {"spread": STRATEGIES["spread"], "known-ends": base}
    later |= {f"without {name}": _changed(base, **{name: False}) for name in ("widen", "book")}
    later |= {"without patient": _changed(base, patient=False, book=False)}
    later |= {f"price {ms} ms": _changed(base, price_s=ms / 1000) for ms in (0, 20)}
    later |= {"one block": _changed(base, max_blocks=1), "three blocks": _changed(base, max_blocks=3)}
    later |= {"with move": _changed(base, move=True), "spread with move": _changed(STRATEGIES["spread"], move=True)}
    later |= {"whole units": replace(_changed(base, unit_gbit=75.0), parts=1)}
    later |= {"8 candidates": base, "16 candidates": base, "by km": base}
    found = {name: (one, strategy, None) for name, strategy in (fixed | fewer | theirs).items()}
    found |= {name: (one, strategy, hops8) for name, strategy in same.items()}
    found |= {name: (one, s, None if name.endswith("by km") else hops8) for name, s in ours.items()}
    of_name = {f"{k} candidates": candidates(k=k, by="efficiency") for k in (8, 16)} | {"by km": candidates(k=64)}
    return found | {name: (one, s, of_name.get(name, most)) for name, s in later.items()}


def _changed(strategy, **rule):
    return replace(strategy, rule=replace(strategy.rule, **rule))


def main_tables(seeds, orders):
    where = scenario()
    hops8 = k_shortest(where.paths.network, k=8, by="hops")
    for name in orders:
        one = training(where.paths, name)
        show(
            f"{name}, 60 E on shared fibres",
            where,
            settings_of(one, hops8),
            seeds,
            ("ksp-ff 6, fewer", "cd-cba"),
        )


def setup_tables(seeds):
    where = scenario()
    hops8 = k_shortest(where.paths.network, k=8, by="hops")
    most = candidates(k=64, by="efficiency")
    for setup_s in (0.01, 0.1):
        one = training(where.paths, "1f1b")
        kinds = {
            "cd-cba": find_strategy("cd-cba", setup_s=setup_s),
            "earliest, ahead": find_strategy("earliest", setup_s=setup_s, ahead=True),
            "spread": find_strategy("spread", setup_s=setup_s),
            "spread, ahead": find_strategy("spread", setup_s=setup_s, ahead=True),
            "known-ends, ahead": find_strategy("known-ends", setup_s=setup_s, ahead=True),
            "known-ends, kept 1 s": find_strategy("known-ends", setup_s=setup_s, keep_s=1.0),
        }
        of_name = {"cd-cba": None, "earliest, ahead": hops8}
        settings = {name: (one, s, of_name.get(name, most)) for name, s in kinds.items()}
        show(f"1f1b, set-up {1000 * setup_s:g} ms", where, settings, seeds, ("cd-cba", "spread"))


def published_tables(seeds):
    where = scenario()
    one = training(where.paths, "gpipe")
    serial = TransferRule(one_at_a_time=True)
    settings = {
        "1 unit, one light path per hop": (one, Fixed(1, rule=serial), None),
        "1 unit": (one, Fixed(1), None),
        "cba from 1, one light path per hop": (one, Cba(start=1, rule=serial), None),
        "cd-cba from 1": (one, Cba(start=1, rule=TransferRule(policy=POLICIES["cd"])), None),
        "3 units, one light path per hop": (one, Fixed(3, rule=serial), None),
        "3 units": (one, Fixed(3), None),
    }
    show("Where 28 to 31 % come from: gpipe", where, settings, seeds, ("1 unit, one light path per hop", "3 units"))
    one = training(where.paths, "1f1b")
    kinds = {"published guess": STRATEGIES["cd-cba"]}
    base = STRATEGIES["cd-cba"]
    for figure, values in {
        "start": (1, 6),
        "more": (0, 2),
        "fewer": (0, 2),
        "most": (4,),
        "accumulate": (False,),
        "label": ("same",),
    }.items():
        for value in values:
            kinds[f"{figure} {value}"] = replace(base, **{figure: value})
    for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        rule = replace(base.rule, policy=replace(POLICIES["cd"], weights=tuple(map(float, weights))))
        kinds[f"weights {weights}"] = replace(base, rule=rule)
    show("CD-CBA's parameters, 1f1b", where, {n: (one, s, None) for n, s in kinds.items()}, seeds, ("published guess",))


TABLES = {
    "setup": setup_tables,
    "published": published_tables,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", choices=("main", *TABLES), default="main")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--orders", default="1f1b,gpipe,eager+1", help="of the main tables")
    args = parser.parse_args()
    if args.table == "main":
        main_tables(args.seeds, args.orders.split(","))
    else:
        TABLES[args.table](args.seeds)


if __name__ == "__main__":
    main()
