"""Between which processes control connections stand: a tree within each site, and every site's leader with every other.

The leader of a site is its lowest rank. With one connection between each two sites an exchange still takes one one-way
latency between them; inside, each process has a parent and at most FAN_OUT children. So 64 processes need 63
connections where each with each would be 2,016.
"""

from collections.abc import Sequence
from typing import Final

FAN_OUT: Final = 8


class ControlTopology:
    """The connections of `rank`, one of as many ranks as there are `sites`: that of every rank."""

    def __init__(self, rank: int, sites: Sequence[str]) -> None:
        self.rank: Final = rank
        self._sites = sites
        members = [other for other, site in enumerate(sites) if site == sites[rank]]
        place = members.index(rank)
        self.parent = members[(place - 1) // FAN_OUT] if place else None
        """The process through which this one talks to the rest of its site; None for the leader."""
        self._below = {child: _below(members, members.index(child)) for child in _children(members, place)}
        leaders = [sites.index(site) for site in dict.fromkeys(sites)]
        self.other_leaders = tuple(leader for leader in leaders if leader != rank) if self.parent is None else ()
        self._next = {other: self._next_to(other) for other in range(len(sites)) if other != rank}

    @property
    def children(self) -> tuple[int, ...]:
        """Processes of this site that talk through this one."""
        return tuple(self._below)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """All processes with which this one has a control connection."""
        up = self.other_leaders if self.parent is None else (self.parent,)
        return (*up, *self.children)

    @property
    def is_relay(self) -> bool:
        """True if others talk to each other through this process."""
        return len(self.neighbours) > 1 and bool(self.children)

    @property
    def height(self) -> int:
        """Processes between this one and the farthest below it, that one included; 0 for one without children."""
        size, height = 1 + sum(map(len, self._below.values())), 0
        while size > 1:
            size, height = -(-(size - 1) // FAN_OUT), height + 1
        return height

    def below(self, child: int) -> frozenset[int]:
        """`child` and all that talk through it."""
        return self._below[child]

    def next_hop(self, target: int) -> int:
        """The neighbour to which a message for `target` goes."""
        return self._next[target]

    def farthest_first(self) -> list[int]:
        """All other ranks, each before those through which this process reaches it.

        Below a leader the lower ranks pass on to the higher ones; from here up to the own leader it is the reverse.
        """
        above = self._above()
        return [*(rank for rank in sorted(self._next, reverse=True) if rank not in above), *sorted(above)]

    def _above(self) -> set[int]:
        """The processes from the parent up to the leader of this site."""
        members = [other for other, site in enumerate(self._sites) if site == self._sites[self.rank]]
        place, found = members.index(self.rank), set()
        while place:
            place = (place - 1) // FAN_OUT
            found.add(members[place])
        return found

    def _next_to(self, target: int) -> int:
        child = next((child for child, ranks in self._below.items() if target in ranks), None)
        if child is not None:
            return child
        return self._sites.index(self._sites[target]) if self.parent is None else self.parent

    def flood(self, origin: int, came_from: int | None) -> list[int]:
        """The neighbours to which a message of `origin` for all goes on, `came_from` being where it is from.

        Between sites only the leader of the origin's own site sends it, so every process gets it once.
        """
        to_leaders = self.other_leaders if self._sites[origin] == self._sites[self.rank] else ()
        up = to_leaders if self.parent is None else (self.parent,)
        return [other for other in (*up, *self.children) if other != came_from]


def _children(members: Sequence[int], place: int) -> Sequence[int]:
    return members[FAN_OUT * place + 1 : FAN_OUT * place + FAN_OUT + 1]


def _below(members: Sequence[int], place: int) -> frozenset[int]:
    found, level = {members[place]}, [place]
    while level:
        level = [members.index(child) for above in level for child in _children(members, above)]
        found.update(members[below] for below in level)
    return frozenset(found)
