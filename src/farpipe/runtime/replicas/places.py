"""Mapping of processes to the ranks of the pipeline's replicas. Needs no torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Place(NamedTuple):
    """Rank and replica of a process."""

    rank: int
    """Its position in the pipeline."""
    replica: int


@dataclass(frozen=True)
class Places:
    """All processes of a run: every one of `replicas` pipelines has a rank at each of its sites, in pipeline order.

    Launchers number processes site by site, so a site's processes must be neighbours: where all replicas are at the
    same sites, the replicas of one rank are, otherwise the ranks of one replica.
    """

    replicas: tuple[tuple[str, ...], ...]
    """[num_replicas][num_ranks]: the site of every rank in every replica."""

    @property
    def num_replicas(self) -> int:
        """Copies of the pipeline."""
        return len(self.replicas)

    @property
    def num_ranks(self) -> int:
        """Positions in the pipeline."""
        return len(self.replicas[0])

    @property
    def num_processes(self) -> int:
        """Of the run."""
        return self.num_ranks * self.num_replicas

    @cached_property
    def is_by_rank(self) -> bool:
        """True if the replicas of one rank have neighbouring numbers, and not the ranks of one replica."""
        return len(set(self.replicas)) == 1

    def process(self, rank: int, replica: int) -> int:
        """The process that is `rank` of `replica`."""
        return rank * self.num_replicas + replica if self.is_by_rank else replica * self.num_ranks + rank

    def of(self, process: int) -> Place:
        """Return rank and replica of `process`."""
        if self.is_by_rank:
            return Place(*divmod(process, self.num_replicas))
        replica, rank = divmod(process, self.num_ranks)
        return Place(rank, replica)

    def site(self, process: int) -> str:
        """Site that `process` runs at."""
        rank, replica = self.of(process)
        return self.replicas[replica][rank]

    def is_first_at_site(self, process: int) -> bool:
        """True if no earlier replica of the same rank runs at the same site."""
        rank, replica = self.of(process)
        return self.site(process) not in [self.replicas[earlier][rank] for earlier in range(replica)]

    def ring_levels(self, process: int) -> tuple[tuple[int, ...], ...]:
        """With whom `process` sums gradients: first inside its site, then with one process of every other site.

        Each level is a tuple of processes that contains `process`. Where the sites have different numbers of replicas
        of its rank, one level has all of them, site by site.
        """
        rank = self.of(process).rank
        by_site: dict[str, list[int]] = {}
        for replica in range(self.num_replicas):
            other = self.process(rank, replica)
            by_site.setdefault(self.site(other), []).append(other)
        if len({len(members) for members in by_site.values()}) > 1:
            return (tuple(other for members in by_site.values() for other in members),)
        inside = by_site[self.site(process)]
        across = tuple(members[inside.index(process)] for members in by_site.values())
        return tuple(inside), across
