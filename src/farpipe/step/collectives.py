"""The collectives of a step as one list: what each waits for, and what waits for it."""

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from farpipe.step.links import Exchange, Sync, Transfer

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
