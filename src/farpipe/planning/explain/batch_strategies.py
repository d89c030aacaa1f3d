"""Strategies of a batch of documents: the best layout of every kind that the planner of batches finds."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from farpipe.core.spec import Job
from farpipe.planning.cost.money import money_of_step
from farpipe.planning.planner.bandwidth import link_bytes
from farpipe.planning.planner.plan import Strategy, StrategyKind
from farpipe.planning.workload import BatchPlan, plan_batch
from farpipe.planning.workload.lengths import cut_lengths

_KINDS: Final[dict[str, StrategyKind]] = {
    "one site": "one site",
    "pipeline over sites": "pipeline",
    "replicas across sites": "replicas",
}
_JOINTS: Final = {"pipeline": " > ", "replicas": " + ", "one site": ""}


def strategies_of_batch(job: Job, lengths: Sequence[int]) -> list[Strategy]:
    """The best layout of every kind for a batch, the fastest first; documents are cut at `training.sequence_length`.

    InfeasibleError where no layout fits.
    """
    sizes = cut_lengths(np.asarray(lengths, np.int64), job.training.sequence_length)
    best = plan_batch(job, sizes)
    return [_strategy(job, one) for one in (best, *best.others)]


def _strategy(job: Job, plan: BatchPlan) -> Strategy:
    sent_bytes, kind = _inter_site_bytes(plan), _KINDS[plan.use]
    money = money_of_step(job.cluster, plan.layout.devices, plan.step_s, sent_bytes)
    cut = "whole" if plan.num_slices == 1 else f"in {plan.num_slices} slices"
    return Strategy(
        kind=kind,
        where=_JOINTS[kind].join(plan.layout.devices),
        what=f"{plan.degrees}, the longest sequence {cut}",
        step_s=plan.step_s,
        tokens_per_s=plan.num_tokens / plan.step_s,
        num_devices=plan.layout.num_devices,
        inter_site_bytes=sum(sent_bytes.values()),
        usd_per_million_tokens=money.per_million_tokens(plan.num_tokens).total_usd,
        unpriced=money.unpriced,
    )


def _inter_site_bytes(plan: BatchPlan) -> dict[str, float]:
    """Per link between sites: the messages of every replica, and once what all of them exchange."""
    between = plan.layout.costs.base.between_sites
    total = dict.fromkeys((name for name, crosses in between.items() if crosses), 0.0)
    for number, pipeline in ((i, one) for i, each in enumerate(plan.replicas) for one in each.pipelines):
        timeline = pipeline.timeline
        sizes = timeline.hop_bytes() if number else link_bytes(pipeline.problem, timeline)
        for name in total:
            total[name] += sizes.get(name, 0.0)
    return total
