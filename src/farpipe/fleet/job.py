"""Jobs of a fleet: what is asked for, where a job runs, and how far it has come."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final, Literal, NamedTuple

from farpipe.planning.cost import Layout

Phase = Literal["queued", "starting", "running", "stopping"]
"""``starting``: it holds its devices and loads its state; no step is done yet. ``stopping``: it was told to stop, and
holds its devices until nothing runs on them."""

MAX_STEPS: Final = 10**9
"""Steps of one job."""
UNSAID: Final = 1e-3
"""The last part of a job's steps, in steps, that only its own word completes: a silent run never does."""


class Kind(NamedTuple):
    """All that decides a job's speed: jobs of one kind share their quotes."""

    model: str
    """A preset of the catalogue, or what the model in `request` is called."""
    sequence_length: int
    global_batch: int
    """Sequences in one optimizer step."""
    num_devices: int = 0
    """Devices on which a step takes one second, of a job known by its duration alone; 0: the planner quotes it."""
    request: str = ""
    """Model, precision, microbatch and what else its job.toml asks of the planner, as JSON (`farpipe.fleet.requests`);
    empty: the preset, with the planner's choices."""


def timed_kind(num_devices: int) -> Kind:
    """Kind of the jobs that are known by their duration on `num_devices`: one step is a second there."""
    return Kind("", 0, 0, num_devices)


@dataclass(frozen=True)
class FleetJob:
    """A training as its owner submits it."""

    name: str
    kind: Kind
    submit_s: float
    num_steps: int
    min_devices: int
    max_devices: int
    tenant: str = ""
    deadline_s: float | None = None
    """Deadline on the clock of `submit_s`; None: none."""

    @property
    def fault(self) -> str:
        """Reason for which no fleet could take it; empty if there is none."""
        if not 1 <= self.num_steps <= MAX_STEPS:
            return f"num_steps: expected {MAX_STEPS:,} at most, and 1 at least, found {self.num_steps:,}"
        if not 1 <= self.min_devices <= self.max_devices:
            return f"min_devices {self.min_devices} is more than max_devices {self.max_devices}, or less than 1"
        deadline_s = math.inf if self.deadline_s is None else self.deadline_s
        if not -math.inf < self.submit_s <= deadline_s or self.submit_s == math.inf:
            return f"deadline_s {deadline_s:g} is before submit_s {self.submit_s:g}; both are on one clock"
        return ""


def sizes(job: FleetJob) -> Sequence[int]:
    """Numbers of devices that a job may have: the maximum, halves of it, and the minimum."""
    return _sizes(job.min_devices, job.max_devices)


@lru_cache(maxsize=1024)
def _sizes(min_devices: int, max_devices: int) -> tuple[int, ...]:
    found = [max_devices]
    while found[-1] // 2 > min_devices:
        found.append(found[-1] // 2)
    return (*found,) if found[-1] == min_devices else (*found, min_devices)


def devices_in_words(devices: Sequence[tuple[str, int]]) -> str:
    """Numbers of devices by site: ``8 at a > 8 at b``."""
    return " > ".join(f"{number} at {site}" for site, number in devices)


@dataclass(frozen=True)
class JobPlacement:
    """Devices on which a job runs, the planner's quote for them, and the time that its start takes."""

    devices: tuple[tuple[str, int], ...]
    """(site, number of devices), in pipeline order."""
    step_s: float
    link_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Reserved on every directed link ``a>b``: what the steps send on average."""
    power_w: Mapping[str, float] = field(default_factory=dict)
    """Drawn by its devices at every site, without the site's PUE."""
    startup_s: float = 0.0
    """Seconds from the reservation to the first step: restart, reading the checkpoint, moving it."""
    startup_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Reserved while it starts: what the steps will send, and the checkpoint that moves to another site."""
    moved_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes of the checkpoint that moves to another site, by link: all that is sent while it starts."""
    copied_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Sent while it runs, over the link to the site that gets copies of its checkpoints; empty: none does."""
    layout: Layout | None = None
    """The layout that was quoted, for the plan that runs it; None: the quotes know of none."""

    @cached_property
    def num_devices(self) -> int:
        """Devices at all sites."""
        return sum(number for _, number in self.devices)

    @cached_property
    def all_power_w(self) -> float:
        """Power of its devices at all sites."""
        return sum(self.power_w.values())

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """The sites in pipeline order."""
        return tuple(site for site, _ in self.devices)

    @property
    def where(self) -> str:
        """Its devices in words."""
        return devices_in_words(self.devices)

    @property
    def copy_site(self) -> str | None:
        """The site that gets copies of its checkpoints."""
        return next((link.split(">")[1] for link in self.copied_bytes_per_s), None)

    def links(self, phase: Phase) -> Mapping[str, float]:
        """Bytes per second that it has reserved on every link in this phase."""
        if phase == "stopping":
            return {}
        if phase == "starting":
            return self.startup_bytes_per_s
        copied = self.copied_bytes_per_s
        return _sum(self.link_bytes_per_s, copied) if copied else self.link_bytes_per_s

    def sent(self, phase: Phase) -> Mapping[str, float]:
        """Bytes per second that it sends over every link, on average over this phase."""
        if phase != "starting":
            return self.links(phase)
        return {link: size / self.startup_s for link, size in self.moved_bytes.items()}


@dataclass(frozen=True)
class Spent:
    """Resources that a job has used so far, by site or link; money follows from prices over time."""

    device_s: Mapping[str, float] = field(default_factory=dict)
    energy_kwh: Mapping[str, float] = field(default_factory=dict)
    electricity_usd: Mapping[str, float] = field(default_factory=dict)
    carbon_g: Mapping[str, float] = field(default_factory=dict)
    rent_usd: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    egress_usd: Mapping[str, float] = field(default_factory=dict)

    def plus(self, other: "Spent") -> "Spent":
        """The sum of two."""
        return Spent(*(_sum(mine, its) for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def total_usd(self) -> float:
        """Rent, electricity and egress together."""
        return sum(sum(part.values()) for part in (self.rent_usd, self.electricity_usd, self.egress_usd))


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> Mapping[str, float]:
    if not other:
        return one
    found = dict(one)
    for name, value in other.items():
        found[name] = found.get(name, 0.0) + value
    return found


@dataclass(frozen=True)
class JobState:
    """A job that has not ended."""

    job: FleetJob
    phase: Phase = "queued"
    since_s: float = 0.0
    """Time at which it came into this phase or onto this placement; `num_done` is as of then."""
    num_done: float = 0.0
    """Steps done, in fractions of one: as reported, and since then as its speed lets expect."""
    num_reported: float = 0.0
    """Most steps that its attempt has reported or stored: what reports fewer is late."""
    placement: JobPlacement | None = None
    reserved: JobPlacement | None = None
    """Devices on which it starts once nothing runs there any more, and it has stopped itself."""
    stopped_by_s: float = 0.0
    """Time at which a stopping job is expected to have stopped."""
    leaves: bool = False
    """True if it is cancelled, and only has to stop."""
    stored_at: str | None = None
    """The site that has its newest checkpoint; None before the first start."""
    copies: Mapping[str, float] = field(default_factory=dict)
    """Steps in its checkpoint at every other site that has one."""
    first_start_s: float | None = None
    queued_s: float = 0.0
    """Time in the queue before `since_s`, over all its stays there."""
    num_stored: float = 0.0
    """Steps in its last checkpoint that was reported, or in that with which its attempt began."""
    attempt: int = 0
    """Number of the newest start, resize or move; 0: none yet."""
    num_failures: int = 0
    """Failures in a row, between which it came no further than a hundredth of its steps."""
    failed_at: float = 0.0
    """Steps done when the first of these failures took it back."""
    last_failure: str = ""
    """Reason of the last failure; empty: none was given."""
    not_before_s: float = 0.0
    """Time before which it is not started again: the pause after a failure."""
    num_starts: int = 0
    num_preemptions: int = 0
    num_moves: int = 0
    spent: Spent = field(default_factory=Spent)
    """Consumption up to `since_s`."""

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    def done_at(self, now_s: float) -> float:
        """Steps done at `now_s`."""
        if self.phase != "running" or self.placement is None:
            return self.num_done
        done = self.num_done + max(0.0, now_s - self.since_s) / self.placement.step_s
        return min(done, max(self.num_done, self.job.num_steps - UNSAID))

    def left_at(self, now_s: float) -> float:
        """Steps still to do at `now_s`."""
        return self.job.num_steps - self.done_at(now_s)

    @property
    def stop_site(self) -> str | None:
        """The site that has its newest checkpoint once it has stopped; None where it has none."""
        return self.placement.sites[0] if self.placement and self.phase == "running" else self.stored_at

    def total_queued_s(self, now_s: float) -> float:
        """Time in the queue up to `now_s`."""
        return self.queued_s + (max(0.0, now_s - self.since_s) if self.phase == "queued" else 0.0)

    def end_s(self) -> float | None:
        """Time at which it will have done its last step if nothing changes; None while it waits or stops."""
        if self.placement is None or self.phase in ("queued", "stopping"):
            return None
        begin = self.since_s + (self.placement.startup_s if self.phase == "starting" else 0.0)
        return begin + (self.job.num_steps - self.num_done) * self.placement.step_s
