"""Strategies: every site set and its links at their best, on one cost model, and what limits each."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from farpipe.core.spec import Job, LocalSteps
from farpipe.planning.cost import JobCosts
from farpipe.planning.cost.money import money_of_step
from farpipe.planning.explain.changes import LIMIT_S
from farpipe.planning.explain.goodput import with_goodput
from farpipe.planning.explain.limits import WORTH_NAMING, limit_of
from farpipe.planning.explain.separate_sites import (
    SeparateSites,
    fastest_exchange,
    pins_one_layout,
    planned_in_full,
    separate_sites,
)
from farpipe.planning.planner.bandwidth import link_bytes
from farpipe.planning.planner.evaluate import Evaluated, whole
from farpipe.planning.planner.plan import Strategy, StrategyKind
from farpipe.planning.planner.refinement import expected, refined
from farpipe.planning.planner.search import search, small
from farpipe.planning.planner.site_sets import alike_at_identical_sites

if TYPE_CHECKING:
    from farpipe.planning.workload import BatchPlan

PER_KIND: Final = 3
"""Largest number of site sets of each kind that are compared."""
NARROW: Final = "int8 or fp8 messages"
LOCAL_STEPS: Final = LocalSteps(every=100)
"""Local steps of a job that asks for none; DiLoCo's authors exchange every 50 to 500 steps (arXiv 2311.08105)."""
_KINDS: Final[dict[str, StrategyKind]] = {
    "alone": "one site",
    "pipelines": "pipeline",
    "replicas": "replicas",
    "one site": "one site",
    "pipeline over sites": "pipeline",
    "replicas across sites": "replicas",
}
"""Uses of sites, as candidates and as batches of documents name them."""
_JOINTS: Final = {"pipeline": " > ", "replicas": " + ", "one site": ""}


def strategies_of(
    job: Job, costs: JobCosts, found: Sequence[Evaluated] = (), limit_s: float = LIMIT_S
) -> tuple[list[Strategy], list[str]]:
    """The strategies of a job, the fastest first, and names of those that `limit_s` left no time to search for.

    They are those that a search `found`, or else a quick search finds, pipelines with narrower messages, and sites that
    each have a layout of their own. `job` is decided, `costs` are its. Strategies whose training differs from the job's
    name the difference.
    """
    until_s, untried = time.monotonic() + limit_s, list[str]()
    found = alike_at_identical_sites(job, found or search(job, costs, small(PER_KIND)).evaluated)
    strategies = [_strategy(job, costs, _kind(one), expected(job, whole(one))) for one in _chosen(found)]
    searched = {
        NARROW: _narrow(job, costs, [one for one in found if _kind(one) == "pipeline"]),
        "sites with layouts of their own": _separate(job, costs, until_s),
    }
    for name, more in searched.items():
        strategies += more if time.monotonic() <= until_s else ()
        untried += [name] if time.monotonic() > until_s else []
    strategies = [_beside_one_site(one, strategies) for one in _by_exchange(job, strategies)]
    ranked = sorted(strategies, key=lambda strategy: strategy.step_s)
    return with_goodput(job, ranked, (job.training.local_steps or LOCAL_STEPS).every), untried


def _by_exchange(job: Job, strategies: Sequence[Strategy]) -> Iterator[Strategy]:
    """Of a job with local steps: replicas across sites are those, and what exchanges in every step trains otherwise."""
    for one in strategies:
        if job.training.local_steps is None or one.kind == "local steps":
            yield one
        elif one.kind == "replicas":
            yield one.model_copy(update={"kind": "local steps"})
        else:
            yield one.model_copy(update={"training": "; ".join(filter(None, ["no local steps", one.training]))})


def _beside_one_site(one: Strategy, strategies: Sequence[Strategy]) -> Strategy:
    """Local steps with what the fastest site alone does in their time, which is the training that was asked for."""
    alone = min((s for s in strategies if s.kind == "one site"), key=lambda s: s.step_s, default=None)
    if one.kind != "local steps" or alone is None:
        return one
    return one.model_copy(update={"alone_at": alone.where, "alone_steps": one.step_s / alone.step_s})


def _kind(one: Evaluated) -> StrategyKind:
    return _KINDS[one.candidate.kind]


def _chosen(found: Sequence[Evaluated]) -> list[Evaluated]:
    """The fastest at the PER_KIND best site sets of each kind; `found` come the fastest first."""
    chosen: dict[str, dict[str, Evaluated]] = {}
    for one in found:
        chosen.setdefault(one.candidate.kind, {}).setdefault(one.candidate.where, one)
    return [one for every in chosen.values() for one in [*every.values()][:PER_KIND]]


def _narrow(job: Job, costs: JobCosts, pipelines: Sequence[Evaluated]) -> Iterator[Strategy]:
    """The best pipeline over several sites with messages of 8 bits where that is faster; int8 and fp8 are as long."""
    if not pipelines or job.training.wire_type != "none":
        return
    narrow = job.model_copy(update={"training": job.training.model_copy(update={"wire_type": "int8"})})
    others = costs.trained(narrow.training)
    also = [one.candidate for one in pipelines[:1]]
    found = [one for one in search(narrow, others, small(1), also=also).evaluated if one.candidate.kind == "pipelines"]
    for one in [expected(narrow, refined(narrow, one, others)[1]) for one in found[:1]]:
        if one.step_s < pipelines[0].step_s:  # searched less, it may come out slower than with whole messages
            yield _strategy(narrow, others, "pipeline", one, NARROW)


def _separate(job: Job, costs: JobCosts, until_s: float) -> Iterator[Strategy]:
    """Sites with layouts of their own: exchanging gradients, exchanging after local steps, and that in 8 bits too.

    Where the sites are identical, exchanging gradients every step is replicas, which are a strategy already. The
    exchange in 8 bits is left out where it takes less than WORTH_NAMING of the step.
    """
    every = [] if pins_one_layout(job) else list(separate_sites(job, costs, until_s))
    if not every:
        return
    best = min(every, key=lambda one: one.step_s)
    if not best.identical and job.training.local_steps is None:
        yield _strategy(job, costs, "replicas", best)
    local = job.training.local_steps or LOCAL_STEPS
    fastest = fastest_exchange(every, local, job.cluster)
    if fastest is None:
        return
    rarely = planned_in_full(job, costs, fastest, until_s)
    if not (best.identical and job.training.local_steps):  # else they are replicas across sites, found already
        yield _strategy(job, costs, "local steps", rarely, "" if job.training.local_steps else _between(local))
    narrow = local.model_copy(update={"wire_type": "int8"})
    if rarely.exchange_s > WORTH_NAMING * rarely.step_s and narrow.bytes_per_param < local.bytes_per_param:
        narrower = fastest_exchange(every, narrow, job.cluster)
        assert narrower is not None, "the same sites have links"
        same = (narrower.sites, narrower.shares) == (rarely.sites, rarely.shares)
        narrower = replace(narrower, found=rarely.found) if same else planned_in_full(job, costs, narrower, until_s)
        yield _strategy(job, costs, "local steps", narrower, _between(narrow))


def _between(local: LocalSteps) -> str:
    """The exchanges in words, ``100 local steps between 8-bit exchanges``."""
    bits = {"none": "", "bf16": "16-bit ", "int8": "8-bit ", "int4": "4-bit "}[local.wire_type]
    return f"{local.every} local steps between {bits}exchanges"


def _strategy(
    job: Job, costs: JobCosts, kind: StrategyKind, one: Evaluated | SeparateSites, training: str = ""
) -> Strategy:
    limited_by = limit_of(one, costs, job.cluster) if isinstance(one, Evaluated) else one.limited_by
    words = {"kind": kind, "where": one.where, "what": str(one), "limited_by": limited_by, "training": training}
    return _priced(job, one.step_s, job.training.tokens_per_step, (one.devices, one.inter_site_bytes), words)


def _priced(
    job: Job, step_s: float, num_tokens: int, used: tuple[Mapping[str, int], Mapping[str, float]], words: dict[str, Any]
) -> Strategy:
    """The strategy in these `words`; `used`: devices by site, and bytes of a step by link between sites."""
    devices, sent_bytes = used
    money = money_of_step(job.cluster, devices, step_s, sent_bytes)
    return Strategy(
        **words,
        step_s=step_s,
        tokens_per_s=num_tokens / step_s,
        num_devices=sum(devices.values()),
        inter_site_bytes=sum(sent_bytes.values()),
        usd_per_million_tokens=money.per_million_tokens(num_tokens).total_usd,
        unpriced=money.unpriced,
    )


def strategies_of_batch(job: Job, lengths: Sequence[int]) -> list[Strategy]:
    """The best layout of every kind for a batch, the fastest first; documents are cut at `training.sequence_length`.

    InfeasibleError where no layout fits.
    """
    from farpipe.planning.planner.batches import plan_batch  # here, as strategies of a job need none of it
    from farpipe.planning.workload.lengths import cut_lengths

    sizes = cut_lengths(np.asarray(lengths, np.int64), job.training.sequence_length)
    best = plan_batch(job, sizes)
    return [_strategy_of_batch(job, one) for one in (best, *best.others)]


def _strategy_of_batch(job: Job, plan: "BatchPlan") -> Strategy:
    kind = _KINDS[plan.use]
    cut = "whole" if plan.num_slices == 1 else f"in {plan.num_slices} slices"
    words = {
        "kind": kind,
        "where": _JOINTS[kind].join(plan.layout.devices),
        "what": f"{plan.degrees}, the longest sequence {cut}",
    }
    return _priced(job, plan.step_s, plan.num_tokens, (plan.layout.devices, _inter_site_bytes(plan)), words)


def _inter_site_bytes(plan: "BatchPlan") -> dict[str, float]:
    """Per link between sites: the messages of every replica, and once what all of them exchange."""
    between = plan.layout.costs.base.between_sites
    total = dict.fromkeys((name for name, crosses in between.items() if crosses), 0.0)
    for number, pipeline in ((i, one) for i, each in enumerate(plan.replicas) for one in each.pipelines):
        timeline = pipeline.timeline
        sizes = timeline.hop_bytes() if number else link_bytes(pipeline.problem, timeline)
        for name in total:
            total[name] += sizes.get(name, 0.0)
    return total
