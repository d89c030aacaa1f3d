"""The one form of a message: its link, how long it occupies that, and after how long it is there.

For a plain link these are bytes/bandwidth, and that plus the latency. A `Transfer` may give other figures per
microbatch (light paths, windows of RDMA, links that lose packets); staggered replicas
(`Link.num_staggered`) occupy a link together. Whatever reads a step (simulator, searches, bounds) reads only this form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from farpipe.core.step.codes import BACKWARD, FORWARD
from farpipe.core.step.links import Collective, Hop, Link, Transfer

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Figures = float | Floats

NOTHING: Final = -2
"""Instead of a link: nothing is sent (behind the last stage, before the first)."""
FREE: Final = -1
"""Instead of a link: the tensor is there at once (same rank, or a hop that costs nothing)."""


@dataclass(frozen=True, eq=False)  # arrays: Problems are compared by their fields
class Messages:
    """Arrays of one shape: [2, S, M] for what stage s sends forward and backward, [C] for collectives."""

    link: Ints
    """Place in the Problem's links, or FREE, or NOTHING."""
    bytes: Floats
    leaves_after_s: Floats
    """Seconds from its start on the link until its own last byte is on it: for what is shown, not for what follows."""
    occupies_s: Floats
    """Seconds from its start on the link until that takes the next message."""
    arrives_after_s: Floats
    """Seconds from its start on the link until it is there."""

    @property
    def figures(self) -> tuple[Ints, Floats, Floats]:
        """(link, occupies_s, arrives_after_s): what compiled loops read."""
        return self.link, self.occupies_s, self.arrives_after_s


class Opening(NamedTuple):
    """Times from which stages and links are free when a step begins, as its first collectives leave them."""

    stage_s: Floats
    """[S]: when the first forward of every stage may begin."""
    link_s: Floats
    """[L]: when every link takes its first message."""
    gather_s: Floats
    """[number of gathers]: when each has its start on its link."""


@dataclass(frozen=True, eq=False)
class Collectives(Messages):
    """The arrays of `Problem.collectives`, in its order: what waits for nothing, then by what it waits for."""

    stage: Ints
    """[C]: see `Collective`; of the first `begin[0]` the stage whose first forward waits for it."""
    target: Ints
    """[C]: the stage that gets it."""
    begin: NDArray[np.int64]
    """[S + 1]: those that wait for the last backward of stage s are at `begin[s]` to `begin[s + 1]`."""

    def opening(self, opens_s: Floats, num_links: int) -> Opening:
        """Times from which stages and links are free; `opens_s`: see `StepTraffic`.

        Collectives that wait for nothing are ready when the step begins and go first, one after the other. This is the
        one place that knows it.
        """
        stage_s, link_s, gather_s = opens_s.copy(), np.zeros(num_links), np.zeros(int(self.begin[0]))
        for at, (link, stage) in enumerate(zip(self.link[: gather_s.size], self.stage, strict=False)):
            gather_s[at] = link_s[link]
            stage_s[stage] = max(stage_s[stage], opens_s[stage] + gather_s[at] + self.arrives_after_s[at])
            link_s[link] += self.occupies_s[at]
        return Opening(stage_s, link_s, gather_s)


@dataclass(frozen=True, eq=False)
class StepTraffic:
    """Messages and collectives that a step puts on its links."""

    messages: Messages
    collectives: Collectives
    opens_s: Floats
    """[S]: from the start of the step, or from the arrival of a stage's gather, until its first forward may begin."""
    stagger_s: float
    """Seconds by which a replica is behind the one before it where they are staggered."""
    copies: tuple[int, ...]
    """[L]: how many replicas, this one included, each send messages like these over the link, one after the other."""

    @property
    def num_staggered(self) -> int:
        """The number of staggered replicas; 1: there is one, or they send together."""
        return max(self.copies, default=1)

    @property
    def opening(self) -> Opening:
        """Times from which stages and links are free: `Collectives.opening`."""
        return self.collectives.opening(self.opens_s, len(self.copies))


def traffic(
    links: Mapping[str, Link],
    hops: Sequence[Hop | None],
    collectives: Sequence[Collective],
    rank_of_stage: Sequence[int],
    num_microbatches: int,
) -> StepTraffic:
    """The messages and collectives of a Problem with these parts."""
    table = _Table(links)
    messages = _between_stages(table, hops, rank_of_stage, num_microbatches)
    others = _collectives(table, collectives, len(rank_of_stage))
    copies = tuple(link.num_staggered for link in links.values())
    num_staggered = np.array([*copies, 1, 1])  # the last two: NOTHING and FREE
    opens_s = np.zeros(len(rank_of_stage))
    if (num_staggered == 1).all():
        return StepTraffic(messages, others, opens_s, 0.0, copies)
    stagger_s = float(messages.occupies_s[num_staggered[messages.link] > 1].max(initial=0.0))
    messages, others = _followed(messages, num_staggered, stagger_s), _followed(others, num_staggered, stagger_s)
    return StepTraffic(messages, others, opens_s + (num_staggered.max() - 1) * stagger_s, stagger_s, copies)


AnyMessages = TypeVar("AnyMessages", bound=Messages)


def _followed(messages: AnyMessages, num_staggered: NDArray[np.int64], stagger_s: float) -> AnyMessages:
    """The messages of staggered replicas: on their links each is followed by the other replicas'.

    When each replica is d = `stagger_s` (the longest message there) behind the one before it, k replicas can all do
    what this one does: when it puts a message on the link at t, the others' follow at t + d, t + 2 d, ..., so the link
    is free again (k - 1) d after the message has left. Collectives are all replicas' together: a reduce is ready when
    the last of them is, a gather when the first begins, and each is followed by the same pause. The step is the last
    replica's, which begins (k - 1) d after the first (`StepTraffic.opens_s`).
    """
    return replace(messages, occupies_s=messages.occupies_s + (num_staggered[messages.link] - 1) * stagger_s)


Row = tuple[int | list[int], Figures, Figures, Figures, Figures]
"""What a message is in `Messages`, field by field; one figure where all microbatches have the same."""
_NOTHING: Final[Row] = (NOTHING, 0.0, 0.0, 0.0, 0.0)
_FREE: Final[Row] = (FREE, 0.0, 0.0, 0.0, 0.0)


class _Table:
    """Makes rows of Messages from the Transfers of a document."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self.links, self.place = links, {name: index for index, name in enumerate(links)}

    def row(self, transfer: Transfer | None) -> Row:
        """The row of a transfer; None: the tensor is there at once."""
        if transfer is None:
            return _FREE
        names = transfer.link
        size: Any = np.array(transfer.bytes) if isinstance(transfer.bytes, tuple) else float(transfer.bytes)
        place: int | list[int]
        if isinstance(names, str):
            place, (occupied_s, travel_s) = self.place[names], _plain(self.links[names], size)
        else:
            place = [self.place[name] for name in names]
            sizes = np.broadcast_to(size, len(names))
            plain = [_plain(self.links[name], one) for name, one in zip(names, sizes, strict=True)]
            occupied_s, travel_s = np.array(plain).T
        occupies_s = _given(transfer.occupies_s, occupied_s)
        arrives_after_s = _given(transfer.arrives_after_s, travel_s)
        if isinstance(occupies_s, float) and isinstance(arrives_after_s, float):
            return place, size, min(occupies_s, arrives_after_s), occupies_s, arrives_after_s
        return place, size, np.minimum(occupies_s, arrives_after_s), occupies_s, arrives_after_s


def _given(figure: float | tuple[float, ...] | None, plain: Figures) -> Figures:
    """`figure` of a Transfer, or where it has none the `plain` one."""
    return plain if figure is None else np.array(figure) if isinstance(figure, tuple) else figure


def _plain(link: Link, size: Any) -> tuple[Any, Any]:
    """(occupies_s, arrives_after_s) where a Transfer does not say otherwise."""
    return link.occupied_s(size), link.travel_s(size)


def _between_stages(
    table: _Table, hops: Sequence[Hop | None], rank_of_stage: Sequence[int], num_microbatches: int
) -> Messages:
    num_stages = len(rank_of_stage)
    found = [[_NOTHING] * num_stages, [_NOTHING] * num_stages]
    for index, hop in enumerate(hops):
        is_free = hop is None or rank_of_stage[index] == rank_of_stage[index + 1]
        found[FORWARD][index] = table.row(None if is_free or hop is None else hop.forward)
        found[BACKWARD][index + 1] = table.row(None if is_free or hop is None else hop.backward)
    link, *figures = zip(*found[FORWARD], *found[BACKWARD], strict=True)
    shape = (2, num_stages, num_microbatches)
    return Messages(_filled(link, shape, np.int32), *(_filled(each, shape, np.float64) for each in figures))


def _filled(rows: Sequence[Any], shape: tuple[int, int, int], kind: type) -> NDArray[Any]:
    """[2, S, M] of 2 x S rows, each one figure or one of each microbatch."""
    if not any(isinstance(row, np.ndarray | list) for row in rows):
        return np.repeat(np.array(rows, kind), shape[2]).reshape(shape)
    filled: NDArray[Any] = np.empty((len(rows), shape[2]), kind)
    for index, row in enumerate(rows):
        filled[index] = row
    return filled.reshape(shape)


def _collectives(table: _Table, collectives: Sequence[Collective], num_stages: int) -> Collectives:
    rows: list[Row] = [table.row(one.transfer) for one in collectives]
    link, *figures = zip(*rows, strict=True) if rows else [()] * len(_FREE)
    after = [-1 if one.after is None else one.after for one in collectives]
    begin = np.searchsorted(after, np.arange(num_stages + 1)).astype(np.int64)
    stage, target = (np.array([getattr(one, end) for one in collectives], np.int32) for end in ("stage", "target"))
    size, leaves_after_s, occupies_s, arrives_after_s = (np.array(each, np.float64) for each in figures)
    messages = (np.array(link, np.int32), size, leaves_after_s, occupies_s, arrives_after_s)
    return Collectives(*messages, stage=stage, target=target, begin=begin)
