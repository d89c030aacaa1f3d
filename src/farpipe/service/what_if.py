"""What if: the core goes on, on a copy, with one thing changed; ends of jobs with and without the change."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from farpipe.core.errors import InputError
from farpipe.fleet.events import DevicesChanged, Event, LinkChanged, SiteLost, Tick
from farpipe.fleet.replacing import replace
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.snapshot import Cache
from farpipe.fleet.state import FleetState
from farpipe.service.problems import NotFoundError, TooManyError
from farpipe.service.reading import masked

MOST_JOBS: Final = 500
"""Jobs of a fleet that is played on while somebody waits for the answer."""
_ONE: Final = Lock()


@dataclass(frozen=True)
class End:
    """End of a job if nothing else happens."""

    end_s: float | None
    why: str = ""
    """Reason for which it has none."""

    def masked(self, names: Sequence[str]) -> "End":
        """The same without the names of others' jobs."""
        return replace(self, why=masked(self.why, names))


def changes(state: FleetState, names: Iterable[str]) -> dict[str, str]:
    """What can be asked, as (key, words); `names`: jobs that may be the first."""
    found = {f"lost {site}": f"the site {site} lost" for site, one in state.sites.items() if one.usable}
    found |= {f"drained {site}": f"the site {site} drained" for site, one in state.sites.items() if one.usable}
    found |= {f"more {site}": f"twice the devices at {site}" for site, one in state.sites.items() if one.usable}
    links = [link for link, rate in state.rates.items() if rate > 0]
    found |= {f"half {link}": f"the link {link} at half its rate" for link in links}
    waiting = [name for name in names if (job := state.jobs.get(name)) is not None and job.phase == "queued"]
    return found | {f"first {name}": f"{name} first in the queue" for name in waiting}


def ends(state: FleetState, change: str, names: Sequence[str]) -> Mapping[str, tuple[End, End]]:
    """(end without, end with the change) of the jobs `names`, who see no other; `change` is one of `changes`.

    NotFoundError if it is not; InputError, TooManyError: it can't be played now.
    """
    if change not in changes(state, names):
        raise NotFoundError("that is not among what can be asked")
    if len(state.jobs) > MOST_JOBS:
        raise InputError(f"the fleet has more than {MOST_JOBS} jobs; farpipe fleet simulate plays such")
    if not _ONE.acquire(blocking=False):
        raise TooManyError("somebody else asks just now; try again in a moment")
    try:
        before, after = _played(state, ""), _played(state, change)
    finally:
        _ONE.release()
    others = [name for name in state.jobs if name not in names]
    return {name: (before[name].masked(others), after[name].masked(others)) for name in names}


def _played(state: FleetState, change: str) -> Mapping[str, End]:
    kind, _, name = change.partition(" ")
    state = replace(state, cache=Cache())
    if kind == "first":
        job = state.jobs[name]
        first = replace(job, job=replace(job.job, submit_s=min(one.job.submit_s for one in state.jobs.values()) - 1.0))
        state = replace(state, jobs={name: first, **{one: job for one, job in state.jobs.items() if one != name}})
    outcome = Simulator(state).run([], [_event(state, kind, name)])
    return {one.job.name: End(one.finished_s, one.unfinished) for one in outcome.records}


def _event(state: FleetState, kind: str, name: str) -> Event:
    now_s = state.now_s
    if kind == "lost":
        return SiteLost(now_s, name)
    if kind in ("more", "drained"):
        return DevicesChanged(now_s, name, 2 * state.sites[name].num_devices if kind == "more" else 0)
    return LinkChanged(now_s, name, state.rates[name] / 2) if kind == "half" else Tick(now_s)
