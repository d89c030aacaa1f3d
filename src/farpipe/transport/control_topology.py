"""Topology of the control connections: a tree within each site, and every site's leader with every other.

The leader of a site is its lowest rank. With one connection between each two sites an exchange still takes one one-way
latency between them; inside, each process has a parent and at most FAN_OUT children. So 64 processes need 63
connections where each with each would be 2,016.
"""

from collections.abc import Iterator, Sequence
from typing import Final

FAN_OUT: Final = 8


class ControlTopology:
    """The connections of `rank`, one of as many ranks as there are `sites`: that of every rank."""

    def __init__(self, rank: int, sites: Sequence[str]) -> None:
        self.rank: Final = rank
        self._sites = sites
        members = [other for other, site in enumerate(sites) if site == sites[rank]]
        chains = {member: [members[place] for place in _up(index)] for index, member in enumerate(members)}
        """Processes from each member of the site up to its leader, both included."""
        self._above = chains[rank][1:]
        self.parent = self._above[0] if self._above else None
        """The process through which this one talks to the rest of its site; None for the leader."""
        below = {member: chain for member, chain in chains.items() if rank in chain[1:]}
        through = {member: chain[chain.index(rank) - 1] for member, chain in below.items()}
        self.children = tuple(dict.fromkeys(through.values()))
        """Processes of this site that talk through this one."""
        self.height = max((chain.index(rank) for chain in below.values()), default=0)
        """Processes between this one and the farthest below it, that one included; 0 for one without children."""
        leaders = [sites.index(site) for site in dict.fromkeys(sites)]
        self.other_leaders = tuple(leader for leader in leaders if leader != rank) if self.parent is None else ()
        up = {other: sites.index(site) if self.parent is None else self.parent for other, site in enumerate(sites)}
        self._next = {other: hop for other, hop in (up | through).items() if other != rank}

    @property
    def neighbours(self) -> tuple[int, ...]:
        """All processes with which this one has a control connection."""
        up = self.other_leaders if self.parent is None else (self.parent,)
        return (*up, *self.children)

    @property
    def is_relay(self) -> bool:
        """True if others talk to each other through this process."""
        return len(self.neighbours) > 1 and bool(self.children)

    def next_hop(self, target: int) -> int:
        """The neighbour to which a message for `target` goes."""
        return self._next[target]

    def farthest_first(self) -> list[int]:
        """All other ranks, each before those through which this process reaches it.

        Below a leader the lower ranks pass on to the higher ones; from here up to the own leader it is the reverse.
        """
        others = [rank for rank in sorted(self._next, reverse=True) if rank not in self._above]
        return others + sorted(self._above)

    def flood(self, origin: int, came_from: int | None) -> list[int]:
        """The neighbours to which a message of `origin` for all goes on, `came_from` being where it is from.

        Between sites only the leader of the origin's own site sends it, so every process gets it once.
        """
        to_leaders = self.other_leaders if self._sites[origin] == self._sites[self.rank] else ()
        up = to_leaders if self.parent is None else (self.parent,)
        return [other for other in (*up, *self.children) if other != came_from]


def _up(place: int) -> Iterator[int]:
    """Places among a site's processes from `place` up to its leader's, which is 0; a heap with FAN_OUT children."""
    yield place
    while place:
        place = (place - 1) // FAN_OUT
        yield place
