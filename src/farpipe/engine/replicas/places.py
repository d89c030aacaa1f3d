"""Mapping of processes to the ranks of the pipeline's replicas. Needs no torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Place(NamedTuple):
    """Rank, replica and twin of a process."""

    rank: int
    """Position in the pipeline."""
    replica: int
    twin: int = 0
    """Number among the tensor-parallel processes of this rank and replica."""


@dataclass(frozen=True)
class Places:
    """All processes of a run: every one of `replicas` pipelines has a rank at each of its sites, in pipeline order.

    Launchers number processes site by site, so a site's processes must be neighbours: where all replicas are at the
    same sites, the replicas of one rank are, otherwise the ranks of one replica. The twins of a rank and replica always
    are.
    """

    replicas: tuple[tuple[str, ...], ...]
    """[num_replicas][num_ranks]: the site of every rank in every replica."""
    num_twins: int = 1
    """Tensor-parallel processes of every rank in every replica."""

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
        """Processes of the run."""
        return self.num_ranks * self.num_replicas * self.num_twins

    @cached_property
    def is_by_rank(self) -> bool:
        """True if the replicas of one rank have neighbouring numbers, and not the ranks of one replica."""
        return len(set(self.replicas)) == 1

    def process(self, rank: int, replica: int, twin: int = 0) -> int:
        """The process that is a twin of `rank` in `replica`."""
        place = rank * self.num_replicas + replica if self.is_by_rank else replica * self.num_ranks + rank
        return place * self.num_twins + twin

    def of(self, process: int) -> Place:
        """Return rank, replica and twin of `process`."""
        place, twin = divmod(process, self.num_twins)
        if self.is_by_rank:
            return Place(*divmod(place, self.num_replicas), twin)
        replica, rank = divmod(place, self.num_ranks)
        return Place(rank, replica, twin)

    def twins(self, process: int) -> tuple[int, ...]:
        """The tensor-parallel processes of `process`'s rank and replica."""
        first = process - self.of(process).twin
        return tuple(range(first, first + self.num_twins))

    def site(self, process: int) -> str:
        """Site that `process` runs at."""
        rank, replica, _ = self.of(process)
        return self.replicas[replica][rank]

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """All sites, each once, in the order of their first processes."""
        return tuple(dict.fromkeys(self.site(process) for process in range(self.num_processes)))

    def at(self, site: str) -> tuple[int, ...]:
        """The processes at `site`."""
        return tuple(process for process in range(self.num_processes) if self.site(process) == site)

    def missing_at(self, site: str) -> tuple[int, ...]:
        """Processes elsewhere with the ranks that `site` has not, of every rank those of one site."""
        here = {self.of(process).rank for process in self.at(site)}
        found = []
        for rank in (rank for rank in range(self.num_ranks) if rank not in here):
            first = self.site(self.process(rank, 0))
            found += [process for process in self.at(first) if self.of(process).rank == rank]
        return tuple(found)

    def is_first_at_site(self, process: int) -> bool:
        """True if no earlier replica of the same rank runs at the same site."""
        rank, replica, _ = self.of(process)
        return self.site(process) not in [self.replicas[earlier][rank] for earlier in range(replica)]

    def sharing(self, process: int) -> tuple[int, ...]:
        """Processes of `process`'s rank and twin at its site; () unless they are all the pipelines at these sites.

        Those may share a stage's weights: every one of them has its number among them at every stage, and other sites
        have as many.
        """
        rank, replica, twin = self.of(process)
        own = [other for other, sites in enumerate(self.replicas) if sites == self.replicas[replica]]
        at_site = [other for other, sites in enumerate(self.replicas) if sites[rank] == self.replicas[replica][rank]]
        return tuple(self.process(rank, other, twin) for other in own) if own == at_site else ()

    def world(self, process: int) -> tuple[int, ...]:
        """Processes that have a stage in common inside a site: those that share its weights, each with its twins."""
        return tuple(twin for other in self.sharing(process) for twin in self.twins(other))

    def ring_levels(self, process: int) -> tuple[tuple[int, ...], ...]:
        """Rings in which `process` sums gradients: first inside its site, then with one process of every other site.

        Each level is a tuple of processes that contains `process`; all have the same twin. Where the sites have
        different numbers of replicas of its rank, one level has all of them, site by site.
        """
        rank, _, twin = self.of(process)
        by_site: dict[str, list[int]] = {}
        for replica in range(self.num_replicas):
            other = self.process(rank, replica, twin)
            by_site.setdefault(self.site(other), []).append(other)
        if len({len(members) for members in by_site.values()}) > 1:
            return (tuple(other for members in by_site.values() for other in members),)
        inside = by_site[self.site(process)]
        across = tuple(members[inside.index(process)] for members in by_site.values())
        return tuple(inside), across
