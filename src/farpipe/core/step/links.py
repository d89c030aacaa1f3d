"""Links, and what the boundaries between stages and the collectives put on them: the parts of a Problem's document."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from farpipe.core.step.figures import LinkNames, PerMicrobatch, Positive, ProblemPart, Seconds, SecondsPerMicrobatch

Figure = TypeVar("Figure", float, NDArray[np.float64])


def _is_none(value: Any) -> bool:
    return value is None


class HasBandwidth(Protocol):
    """Anything that carries bytes at a rate: a link of a Problem, of a cluster, or one inside a site."""

    @property
    def bandwidth_bytes_per_s(self) -> float: ...


def occupied_s(link: HasBandwidth, num_bytes: Figure) -> Figure:
    """Seconds for which that many bytes occupy a link; latency, loss and staggered replicas are not in it."""
    return num_bytes / link.bandwidth_bytes_per_s


def free_again_s(ready_s: NDArray[np.float64], occupies_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Times at which each of the messages of one link, in the order in which they became ready, has left it.

    The queue of `inlined.put` for all of them at once.
    """
    through_s = np.cumsum(occupies_s)
    return np.asarray(np.maximum.accumulate(ready_s - (through_s - occupies_s)) + through_s)


class Link(ProblemPart):
    """One direction of a connection; it carries one message at a time."""

    latency_s: Seconds
    bandwidth_bytes_per_s: Positive
    num_staggered: Annotated[int, Field(ge=1)] = 1
    """The number of replicas of the pipeline, this one included, that send one after the other over it, each
    `StepTraffic.stagger_s` behind the one before."""
    source: str | None = Field(default=None, exclude_if=_is_none)
    """Site at which the link begins, or ``site:rank`` inside one; None: the one in its name."""
    target: str | None = Field(default=None, exclude_if=_is_none)
    kind: Literal["inter-site", "intra-site"] | None = Field(default=None, exclude_if=_is_none)
    """None: whether its ends are at two sites."""

    def ends(self, name: str) -> tuple[str, str]:
        """(source, target) of the link with this name, "" where neither a field nor the name says so."""
        source, arrow, target = name.partition(">")
        return (source if arrow else "") if self.source is None else self.source, self.target or target

    def is_between_sites(self, name: str) -> bool:
        """True if the link with this name joins two sites; one without ends does."""
        if self.kind is not None:
            return self.kind == "inter-site"
        source, target = map(site_of, self.ends(name))
        return source != target or not source

    def occupied_s(self, num_bytes: Figure) -> Figure:
        """Time for which a message occupies it, unless its Transfer says otherwise."""
        return occupied_s(self, num_bytes)

    def travel_s(self, num_bytes: Figure) -> Figure:
        """Seconds from its start on the link until a message is there, unless its Transfer says otherwise."""
        return self.occupied_s(num_bytes) + self.latency_s


class Transfer(ProblemPart):
    """One message on one link: its bytes, or the times that it takes there."""

    link: LinkNames
    bytes: PerMicrobatch
    occupies_s: SecondsPerMicrobatch | None = Field(default=None, exclude_if=_is_none)
    """Seconds from its start on the link until that takes the next message; None: bytes/bandwidth."""
    arrives_after_s: SecondsPerMicrobatch | None = Field(default=None, exclude_if=_is_none)
    """Seconds from its start on the link until it is there; None: the link's latency after it has left."""

    @property
    def links(self) -> set[str]:
        """Names of the links that its messages take."""
        return {self.link} if isinstance(self.link, str) else set(self.link)

    @property
    def has_times(self) -> bool:
        """True if it says itself how long its messages take."""
        return self.occupies_s is not None or self.arrives_after_s is not None


class Hop(ProblemPart):
    """The boundary between stage s and s + 1; None: that direction is free."""

    forward: Transfer | None = None
    backward: Transfer | None = None


class Sync(ProblemPart):
    """The data-parallel collectives of one stage: gather before its first F, reduce after its last W or B."""

    gather: Transfer | None = None
    reduce: Transfer | None = None


class Exchange(Transfer):
    """Gradient of a matrix that two stages have, sent after the last W or B of one; the other's optimizer waits."""

    source_stage: Annotated[int, Field(ge=0)]
    target_stage: Annotated[int, Field(ge=0)]


def site_of(end: str) -> str:
    """The site in one end of a link's name: ``zurich`` in ``zurich`` and in ``zurich:3``."""
    return end.partition(":")[0]


def is_inter_site(link: str) -> bool:
    """True if a link of which only the name is known joins two sites.

    Links are named ``from>to`` after their sites; inside a site, where each pair of ranks has a link of its own,
    ``site:rank>site:rank``. A name of another form is taken for a link between sites.
    """
    source, arrow, target = link.partition(">")
    return not arrow or site_of(source) != site_of(target)


CollectiveKind = Literal["gather", "reduce", "exchange"]
COLLECTIVE_KINDS: Final[tuple[CollectiveKind, ...]] = ("gather", "reduce", "exchange")


class Collective(NamedTuple):
    """A transfer that belongs to no microbatch. Either `before` is None or `after` is.

    One that waited for a backward, and for which a forward waited, would wait for itself: every backward of a step
    comes after that microbatch's forward on all stages.
    """

    kind: CollectiveKind
    place: str
    """Its key path in the document."""
    stage: int
    """The stage that sends it."""
    target: int
    """The stage that gets it: the other end of an exchange, else `stage`."""
    transfer: Transfer

    @property
    def after(self) -> int | None:
        """The stage whose last W or B it waits for; None: it is ready when the step begins."""
        return None if self.kind == "gather" else self.stage

    @property
    def before(self) -> int | None:
        """The stage whose first F waits for it; None: only the end of the step does."""
        return self.stage if self.kind == "gather" else None


def collectives(sync: Sequence[Sync | None], exchanges: Sequence[Exchange] = ()) -> tuple[Collective, ...]:
    """All of a step: those that wait for nothing first, then by the stage that they wait for."""
    found = [*_of_stages(sync), *_of_exchanges(exchanges)]
    return tuple(sorted(found, key=lambda one: (-1 if one.after is None else one.after, one.stage)))


def _of_stages(sync: Sequence[Sync | None]) -> Iterator[Collective]:
    for stage, spec in enumerate(sync):
        if spec is not None and spec.gather is not None:
            yield Collective("gather", f"sync[{stage}].gather", stage, stage, spec.gather)
        if spec is not None and spec.reduce is not None:
            yield Collective("reduce", f"sync[{stage}].reduce", stage, stage, spec.reduce)


def _of_exchanges(exchanges: Sequence[Exchange]) -> Iterator[Collective]:
    for index, exchange in enumerate(exchanges):
        yield Collective("exchange", f"exchanges[{index}]", exchange.source_stage, exchange.target_stage, exchange)
