"""Links, and what the boundaries between stages and the collectives put on them: the parts of a Problem's document."""

from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from farpipe.step.figures import LinkNames, Part, PerMicrobatch, Positive, Seconds, SecondsPerMicrobatch

Figure = TypeVar("Figure", float, NDArray[np.float64])


def _is_none(value: Any) -> bool:
    return value is None


class Link(Part):
    """One direction of a connection; it carries one message at a time."""

    latency_s: Seconds
    bandwidth_bytes_per_s: Positive
    num_turns: Annotated[int, Field(ge=1)] = 1
    """How many replicas of the pipeline, this one included, take turns on it; see `farpipe.step.messages`."""

    def occupied_s(self, num_bytes: Figure) -> Figure:
        """How long a message occupies it, unless its Transfer says otherwise."""
        return num_bytes / self.bandwidth_bytes_per_s

    def travel_s(self, num_bytes: Figure) -> Figure:
        """From its start on the link until a message is there, unless its Transfer says otherwise."""
        return self.occupied_s(num_bytes) + self.latency_s


class Transfer(Part):
    """What one message puts on which link."""

    link: LinkNames
    bytes: PerMicrobatch
    occupies_s: SecondsPerMicrobatch | None = Field(default=None, exclude_if=_is_none)
    """From its start on the link until that takes the next message; None: bytes/bandwidth."""
    arrives_after_s: SecondsPerMicrobatch | None = Field(default=None, exclude_if=_is_none)
    """From its start on the link until it is there; None: the link's latency after it has left."""

    @property
    def has_times(self) -> bool:
        """Whether it says itself how long its messages take."""
        return self.occupies_s is not None or self.arrives_after_s is not None


class Hop(Part):
    """The boundary between stage s and s + 1; None: that direction is free."""

    forward: Transfer | None = None
    backward: Transfer | None = None


class Sync(Part):
    """The data-parallel collectives of one stage: gather before its first F, reduce after its last W or B."""

    gather: Transfer | None = None
    reduce: Transfer | None = None


def site_of(end: str) -> str:
    """The site in one end of a link's name: ``zurich`` in ``zurich`` and in ``zurich:3``."""
    return end.partition(":")[0]


def is_inter_site(link: str) -> bool:
    """Whether a link joins two sites.

    Links are named ``from>to`` after their sites; inside a site, where each pair of ranks has a link of its own,
    ``site:rank>site:rank``. A name of another form is taken for a link between sites.
    """
    source, arrow, target = link.partition(">")
    return not arrow or site_of(source) != site_of(target)
