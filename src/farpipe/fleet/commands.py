"""Commands: what the fleet orders to be done."""

from dataclasses import dataclass

from farpipe.fleet.job import Placement


@dataclass(frozen=True)
class Command:
    """An order about one job."""

    name: str


@dataclass(frozen=True)
class Start(Command):
    """Start the job, from its newest checkpoint if it has one."""

    placement: Placement


@dataclass(frozen=True)
class Resize(Command):
    """Checkpoint the job and go on at the same sites with other numbers of devices."""

    placement: Placement


@dataclass(frozen=True)
class Migrate(Command):
    """Checkpoint the job and go on at other sites."""

    placement: Placement


@dataclass(frozen=True)
class Preempt(Command):
    """Checkpoint the job and put it back into the queue."""

    why: str = ""


@dataclass(frozen=True)
class Replan(Command):
    """Go on with the same devices at another speed: links have changed."""

    placement: Placement


@dataclass(frozen=True)
class Cancel(Command):
    """End the job, or don't take it at all."""

    why: str = ""
