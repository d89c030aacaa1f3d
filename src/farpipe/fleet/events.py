"""Events, each with the time at which it happened, and commands about jobs that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from farpipe.fleet.job import FleetJob, JobPlacement, Phase


@dataclass(frozen=True)
class Event:
    """Something that happened at `time_s`."""

    time_s: float


@dataclass(frozen=True)
class JobSubmitted(Event):
    """A job joins the queue. Its name is the key by which a second submission is recognised."""

    job: FleetJob


@dataclass(frozen=True)
class JobEvent(Event):
    """Something happened to the job of this name."""

    name: str


@dataclass(frozen=True)
class AttemptEvent(JobEvent):
    """Something happened to one attempt of a job; nothing follows from it once the attempt is over."""

    attempt: int
    """Number of the attempt in the command that began it."""


@dataclass(frozen=True)
class JobStarted(AttemptEvent):
    """The job has loaded its state and begins with its steps."""


@dataclass(frozen=True)
class StepReported(AttemptEvent):
    """The job has done so many steps, and its steps take so long, as measured."""

    num_steps: float
    """Steps done, counted from the job's begin."""
    step_s: float


@dataclass(frozen=True)
class JobEnded(AttemptEvent):
    """The job has done its last step."""


@dataclass(frozen=True)
class JobFailed(AttemptEvent):
    """The job broke; it goes back to the queue with the steps of its last checkpoint, or leaves the fleet."""

    why: str = ""
    """What the log of the rank that failed first says."""
    num_steps: float | None = None
    """Steps in its last checkpoint, counted from the job's begin; None: in the last that was reported."""
    is_final: bool = False
    """True if it will not be tried again."""


@dataclass(frozen=True)
class JobStopped(AttemptEvent):
    """Nothing of a job that was told to stop runs any more: its devices are free."""

    num_steps: float | None = None
    """Steps in the checkpoint with which it stopped; None: in the last that was reported."""


@dataclass(frozen=True)
class CheckpointStored(AttemptEvent):
    """A site has one of the job's checkpoints, whole and readable: the first of its sites, or another has a copy."""

    site: str
    num_steps: float
    """Steps that the checkpoint has, counted from the job's begin."""


@dataclass(frozen=True)
class JobCancelled(JobEvent):
    """The owner does not want the job any more."""


@dataclass(frozen=True)
class LinkChanged(Event):
    """A directed link carries another rate from now on; 0: it is down."""

    link: str
    bytes_per_s: float


class Price(NamedTuple):
    """Electricity of one site."""

    usd_per_mwh: float
    """May be negative."""
    carbon_g_per_kwh: float


@dataclass(frozen=True)
class PriceChanged(Event):
    """Electricity costs so much from now on, by site."""

    prices: Mapping[str, Price]


@dataclass(frozen=True)
class SiteLost(Event):
    """A site is gone, with all that runs on it: jobs there go back to their last checkpoints that were reported."""

    site: str


@dataclass(frozen=True)
class SiteBack(Event):
    """A lost site is there again."""

    site: str


@dataclass(frozen=True)
class DevicesChanged(Event):
    """A site has another number of devices; who no longer fits is stopped."""

    site: str
    num_devices: int


@dataclass(frozen=True)
class Tick(Event):
    """Nothing but time has passed: overdue starts and stops end, and the policy may think again."""


@dataclass(frozen=True)
class Command:
    """An order about one job."""

    name: str
    attempt: int
    """The attempt that it begins, changes or ends; 0 for a job that never had devices."""


@dataclass(frozen=True)
class Start(Command):
    """Start the job, from its newest checkpoint if it has one."""

    placement: JobPlacement


@dataclass(frozen=True)
class Resize(Command):
    """Checkpoint the job and go on at the same sites with other numbers of devices."""

    placement: JobPlacement


@dataclass(frozen=True)
class Migrate(Command):
    """Checkpoint the job and go on at other sites."""

    placement: JobPlacement


@dataclass(frozen=True)
class Preempt(Command):
    """Checkpoint the job and put it back into the queue."""

    why: str = ""


@dataclass(frozen=True)
class Replan(Command):
    """Go on, or go on starting, with the same devices at another speed: links have changed."""

    placement: JobPlacement


@dataclass(frozen=True)
class Cancel(Command):
    """End the job, or don't take it at all."""

    why: str = ""


@dataclass(frozen=True)
class Happened:
    """What a call of `FleetState.handle` did to one job."""

    name: str
    """The job; empty: a request of the policy was not possible."""
    what: str
    """One word, as in OUT.jsonl."""
    phase: Phase | None = None
    """Phase that the job came into; None: it has ended, or was not taken."""
    placement: JobPlacement | None = None
    """Devices that it has from then on."""
    why: str = ""
