"""The quick search: the lattice's best points of every kind of use, each played in a few orders.

What many plans are asked for, one after the other (arms, changes, the points of a sweep), answers with it; `make_plan`
looks into more points, and refines the best.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from farpipe.cost import JobCosts
from farpipe.plan.candidates import Candidate
from farpipe.plan.evaluate import Evaluated, evaluate
from farpipe.plan.guided import placed
from farpipe.plan.lattice import Lattice, Promise
from farpipe.plan.orders import QUICK
from farpipe.spec import Job

MAX_FAILURES: Final = 3
"""Points of one use of sites that turn out not to fit, after which the use is given up."""


def quick_search(
    job: Job, costs: JobCosts, per_kind: int = 2, per_use: int = 1, also: Iterable[Candidate] = ()
) -> list[Evaluated]:
    """The best found of up to `per_kind` uses of sites of each kind (alone, pipelines, replicas), the fastest first.

    `job` is decided (no ``auto`` in what `planner.decided` chooses); `per_use` points of each use are played, and
    besides them the candidates in `also`. Long steps are told by their steady state (`Evaluated.extrapolated_s`).
    """
    found = [evaluate(job, candidate, costs, method=QUICK) for candidate in also]
    for lattice, promises in _told_of(job, costs, per_kind, per_use + MAX_FAILURES):
        found += _best_points(job, costs, lattice, promises, per_use)
    return sorted((e for e in found if isinstance(e, Evaluated)), key=lambda e: e.step_s)


def best_of_uses(found: Iterable[Evaluated]) -> list[Evaluated]:
    """The fastest at every use of sites; those in `found` come the fastest first, and so do these."""
    first: dict[str, Evaluated] = {}
    for one in found:
        first.setdefault(one.candidate.where, one)
    return list(first.values())


def _told_of(job: Job, costs: JobCosts, per_kind: int, most: int) -> list[tuple[Lattice, list[Promise]]]:
    pins = job.layout
    if (pins.context or 1) > 1 or (pins.expert or 1) > 1:
        return []  # the estimates know nothing of them
    lattice, count = Lattice(job, costs), Counter[str]()
    chosen = []
    for promises in sorted(lattice.promises(lattice.whole, most), key=lambda found: found[0].step_s):
        kind = promises[0].use.kind
        if count[kind] < per_kind:
            count[kind] += 1
            chosen.append((lattice, promises))
    return chosen


def _best_points(job: Job, costs: JobCosts, lattice: Lattice, promises: list[Promise], per_use: int) -> list[Evaluated]:
    """The first `per_use` of them that work."""
    found: list[Evaluated] = []
    for promise in promises:
        order = [lattice.sites[index] for index in promise.use.order]
        candidate = placed(job, order, promise.layout, promise.in_v)
        result = None if candidate is None else evaluate(job, candidate, costs, method=QUICK)
        found += [result] if isinstance(result, Evaluated) else []
        if len(found) == per_use:
            break
    return found
