"""Policies behind one protocol: the choice of jobs to run, of their places and numbers of devices."""

from typing import Final

from farpipe.errors import UsageError
from farpipe.fleet.policies import orders, places
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.protocol import Decision, Policy, View
from farpipe.fleet.policies.queueing import PreemptivePolicy, QueuePolicy
from farpipe.strict import nearest

POLICIES: Final[dict[str, Policy]] = {
    policy.name: policy
    for policy in (
        QueuePolicy("fcfs", orders.by_arrival, places.compact, when_blocked="wait"),
        QueuePolicy("easy", orders.by_arrival, places.compact, when_blocked="backfill"),
        QueuePolicy("sjf", orders.by_length, places.compact),
        PreemptivePolicy("srtf", orders.by_what_is_left, places.compact),
        PreemptivePolicy("las", orders.by_attained_service, places.compact),
        QueuePolicy("lcf", orders.by_arrival, places.cheapest_region, fastest=True, when_blocked="wait"),
        QueuePolicy("ldf", orders.by_arrival, places.largest_region, fastest=True, when_blocked="wait"),
        QueuePolicy("cr-lcf", orders.by_arrival, places.cost_first, fastest=True, when_blocked="wait"),
        QueuePolicy("cr-ldf", orders.by_arrival, places.delay_first, fastest=True, when_blocked="wait"),
        QueuePolicy("single-region", orders.by_arrival, places.single_region, when_blocked="wait"),
        QueuePolicy("random", orders.by_arrival, places.anywhere),
        QueuePolicy("atlas", orders.by_arrival, places.atlas),
        QueuePolicy("bace", orders.bace_priority, places.bace, fastest=True),
        FarpipePolicy(),
    )
}
"""Policies by their names."""
GONE: Final = {
    "oracle": "completion times and electricity were those of bace; take bace",
    "sailor": "it was cr-ldf whose queue does not wait for its first job, with the same figures; take cr-ldf",
    "cost-first": "it has the name that BACE-Pipe's paper gives it, cr-lcf",
    "delay-first": "it has the name that BACE-Pipe's paper gives it, cr-ldf",
}
"""Policies of earlier versions, each with the reason."""


def policy_of(name: str) -> Policy:
    """The policy called `name`; UsageError with the nearest one if there is none."""
    if name in GONE:
        raise UsageError(f"there is no policy {name!r} any more: {GONE[name]}")
    if name not in POLICIES:
        raise UsageError(f"there is no policy {name!r}; known: {', '.join(POLICIES)}{nearest(name, POLICIES)}")
    return POLICIES[name]


__all__ = ["POLICIES", "Decision", "Policy", "View", "policy_of"]
