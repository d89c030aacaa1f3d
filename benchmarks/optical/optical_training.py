"""Trainings over light paths in CBA's setting: CBA, CD-CBA, fixed numbers, the ten-line rule, ours.

    python -m benchmarks.optical.optical_training [main|published] [--seeds 10]

CBA's setting as far as it is public: NSFNET, 80 slots of 12.5 GHz, 75 Gbit/s per slot, 1 to 6 slots and a guard
per message, 8 stages on 6 sites, background requests of 4 to 20 slots. All settings of a table share the background
streams, the background's candidates (4 by km), the placement, the order, the limit of 6 units per message and the
rule for refused messages (they wait and try again); setting up a light path takes no time and 64QAM reaches anywhere.
Prints Markdown. Random placements, other settings and the defaults of `farpipe optical` are in optical_grid.py.
"""

import argparse
import itertools
from dataclasses import replace
from functools import cache

from farpipe.core.schedule import peak_memory_bytes
from farpipe.core.schedule.library import order
from farpipe.core.schedule.library.eager import eager
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.optical import Grid, PoissonTraffic, find_modulation, find_network, k_shortest
from farpipe.optical.demands import TRANSFER_POLICIES, Cba, Fixed
from farpipe.optical.policies import POLICIES
from farpipe.optical.study import LightScenario, bound_s, compare_policies, no_network_s
from farpipe.optical.transfers import BYTES_PER_GBIT, LightTraining, TransferRule, nominal_problem

NODES = ("1", "4", "4", "10", "10", "14", "8", "12")


@cache
def candidates(network="nsfnet", shared=True, k=4, by="km", modulation="64qam"):
    return k_shortest(find_network(network, shared=shared), k=k, by=by, modulation=find_modulation(modulation))


def scenario(load=60.0, holding=0.2, shared=True, network="nsfnet", modulation="64qam"):
    km4, table = candidates(network, shared), find_modulation(modulation)
    return LightScenario(km4, km4, Grid(80), PoissonTraffic(load, holding, 4, 20) if load else None, table)


def pipeline_problem(forward_s, backward_s, num_microbatches, nodes, num_bytes):
    """A Problem of one stage per rank with messages of `num_bytes` between all stages, over links to be lit."""
    stages = tuple(
        Stage(rank=rank, forward_s=f, input_grad_s=b / 2, weight_grad_s=b / 2, activation_bytes=1.0)
        for rank, (f, b) in enumerate(zip(forward_s, backward_s, strict=True))
    )
    pairs = [(f"{a}>{b}", f"{b}>{a}") for a, b in itertools.pairwise(nodes)]
    hops = [[Transfer(link=name, bytes=num_bytes) for name in pair] for pair in pairs]
    return Problem(
        num_microbatches=num_microbatches,
        ranks=(Rank(),) * len(stages),
        stages=stages,
        links=dict.fromkeys(itertools.chain(*pairs), Link(latency_s=0.0, bandwidth_bytes_per_s=BYTES_PER_GBIT)),
        hops=tuple(Hop(forward=forward, backward=backward) for forward, backward in hops),
    )


def training(paths, name, nodes=NODES, microbatches=64, num_bytes=512e6, forward=0.026, backward=0.052):
    problem = pipeline_problem([forward] * 8, [backward] * 8, microbatches, nodes, num_bytes)
    nominal = nominal_problem(problem, nodes, paths, 450.0)
    if name.startswith("eager+"):
        between = [int(a != b) for a, b in itertools.pairwise(nodes)]
        schedule = eager(nominal, [int(name[6:]) * sum(between[stage:]) for stage in range(8)])
    else:
        schedule = order(name, nominal)
    return LightTraining(nominal, schedule, nodes)


def show(title, where, settings, seeds, baselines=(), num_steps=3):
    found = compare_policies(where, settings, range(seeds), num_steps=num_steps, skipped=2)
    first = next(iter(settings.values()))[0]
    print(
        f"\n### {title}\n\nBound of the order (6 units) {bound_s(where, first):.3f} s, "
        f"no network {no_network_s(first):.3f} s,"
    )
    print(f"{max(peak_memory_bytes(first.problem, first.schedule)):.0f} microbatches in flight, {seeds} backgrounds.\n")
    heads = "".join(f" against {name} |" for name in baselines)
    print(
        "| policy | step s | refused % | waited % | wait ms | units | slots held | harm, points | by slots | bubble % |"
        + heads
    )
    print("|---|" + "---|" * (9 + len(baselines)))
    for name in settings:
        figures = {key: found.mean(name, key) for key in found.runs[name][0].figures()}
        harm = figures["harm"]
        row = [
            f"{figures['step_s'].mean:.3f} ± {figures['step_s'].half_width:.3f}",
            f"{100 * figures['refused_ratio'].mean:.2f}",
            f"{100 * figures['waited_ratio'].mean:.2f}",
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
    of_policy = {name: TransferRule(policy=POLICIES[name]) for name in ("sd-ff", "cd")}
    theirs = {name: Fixed(rule=rule) for name, rule in of_policy.items()}
    theirs |= {"cba": Cba(), "cba-sd-ff": Cba(rule=of_policy["sd-ff"]), "cd-cba": TRANSFER_POLICIES["cd-cba"]}
    same = {"cd-cba, 8 by hops": TRANSFER_POLICIES["cd-cba"], "ksp-ff 6, fewer, 8 by hops": Fixed(6, True)}
    found = {name: (one, policy, None) for name, policy in (fixed | fewer | theirs).items()}
    found |= {name: (one, policy, hops8) for name, policy in same.items()}
    return found | {name: (one, TRANSFER_POLICIES[name], candidates(k=8)) for name in ("earliest", "widen")}


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
            ("earliest", "cd-cba"),
        )


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
    kinds = {"published guess": TRANSFER_POLICIES["cd-cba"]}
    base = TRANSFER_POLICIES["cd-cba"]
    for figure, values in {
        "start": (1, 6),
        "more": (0, 2),
        "fewer": (0, 2),
        "most": (4,),
        "accumulate": (False,),
    }.items():
        for value in values:
            kinds[f"{figure} {value}"] = replace(base, **{figure: value})
    for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        rule = replace(base.rule, policy=replace(POLICIES["cd"], weights=tuple(map(float, weights))))
        kinds[f"weights {weights}"] = replace(base, rule=rule)
    show("CD-CBA's parameters, 1f1b", where, {n: (one, s, None) for n, s in kinds.items()}, seeds, ("published guess",))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", choices=("main", "published"), default="main")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--orders", default="1f1b,gpipe,eager+1", help="of the main tables")
    args = parser.parse_args()
    if args.table == "main":
        main_tables(args.seeds, args.orders.split(","))
    else:
        published_tables(args.seeds)


if __name__ == "__main__":
    main()
