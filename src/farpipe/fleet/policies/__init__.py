"""Policies behind one protocol: the choice of jobs to run, of their places and numbers of devices."""

from typing import Final

from farpipe.core.errors import UsageError
from farpipe.core.plugins import Plugins
from farpipe.core.strict import nearest
from farpipe.fleet.policies import orders, places
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.protocol import Decision, Policy, View
from farpipe.fleet.policies.queueing import PreemptivePolicy, QueuePolicy

POLICIES: Final[dict[str, Policy]] = {
    policy.name: policy
    for policy in (
        QueuePolicy("fcfs", orders.by_arrival, places.compact, when_blocked="wait"),
        QueuePolicy("easy", orders.by_arrival, places.compact, when_blocked="backfill"),
        QueuePolicy("sjf", orders.by_length, places.compact),
        PreemptivePolicy("srtf", orders.by_what_is_left, places.compact),
        PreemptivePolicy("las", orders.by_attained_service, places.compact),
        QueuePolicy("bace", orders.bace_priority, places.bace, fastest=True),
        FarpipePolicy(),
    )
}
"""Farpipe's own policies by their names."""
ADDED: Final = Plugins("policy", "farpipe.policies", POLICIES, lambda found: callable(getattr(found, "decide", None)))
"""Policies of other distributions."""
ABOUT: Final[dict[str, str]] = {
    "fcfs": "first come, first served; one site, else the fewest sites that don't stall; all wait for the first",
    "easy": "fcfs, and later jobs go ahead where that does not delay the first (EASY backfilling)",
    "sjf": "the shortest job first; what does not fit is skipped",
    "srtf": "the shortest remaining time first; running jobs are stopped for shorter ones",
    "las": "the job with the least service so far first; running jobs are stopped for it (Tiresias)",
    "bace": "work left and bandwidth needed set the order; paths that don't stall, the cheapest electricity first",
    "farpipe": "least time left first; size and place by money and time; stops, moves, grows and shrinks running jobs",
}
"""Descriptions of the policies, a line each."""


def known_policies() -> dict[str, str]:
    """What every policy does, by name, those of other distributions last."""
    return ABOUT | {name: _about(ADDED.load(name)) for name in ADDED.names}


def _about(policy: Policy) -> str:
    return (policy.__doc__ or "no description").strip().splitlines()[0]


def policy_of(name: str) -> Policy:
    """The policy called `name`, farpipe's own or a distribution's; UsageError with the nearest one if there is none."""
    found: Policy | None = ADDED.find(name)
    if found is None:
        names = ADDED.known
        raise UsageError(f"there is no policy {name!r}; known: {', '.join(names)}{nearest(name, names)}")
    return found


__all__ = ["ABOUT", "ADDED", "POLICIES", "Decision", "Policy", "View", "known_policies", "policy_of"]
