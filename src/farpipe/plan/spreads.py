"""Spreads of a job over unlike sites: groups of replicas with a site, tensor and data degree for every rank.

Three families. *Side by side*: sites with whole pipelines of their own, whose number of ranks and tensor degree are the
same at sites of one kind and otherwise free. *Over sites*: one pipeline over two or three of the four strongest sites,
with a number of ranks and a tensor degree for each. *Pairs*: two pipelines over two of them each. Every rank has as
many replicas as its site has devices for, or a power of two of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, permutations, product
from typing import Final

from farpipe.plan.candidates import MICROBATCH_SIZES, tensor_degrees
from farpipe.plan.placement import slowest_rate
from farpipe.plan.separate_sites import strongest
from farpipe.spec import Job, Site

RANKS: Final = (1, 2, 3, 4, 6, 8)
"""Numbers of pipeline ranks at a site that has whole pipelines."""
RANKS_OF_SEVERAL: Final = (1, 2, 4)
"""The same at one site of a pipeline over several."""
MAX_ORDER: Final = 3
"""Sites in one pipeline."""
MAX_SETS: Final = 5
"""Sites of which every set is looked at; of more, the strongest one, two, three and so on."""

Degrees = tuple[int, int]
"""Ranks and tensor degree of a pipeline at one site."""
Kind = tuple[str, int]
"""Devices, and their number in a machine."""


@dataclass(frozen=True)
class GroupDegrees:
    """One group: the site, tensor and data degree of every rank."""

    sites: tuple[str, ...]
    tensor: tuple[int, ...]
    data: tuple[int, ...]


@dataclass(frozen=True)
class Spread:
    """Groups that train side by side, with the sequences of a microbatch on a rank with most replicas."""

    groups: tuple[GroupDegrees, ...]
    microbatch_size: int

    def __str__(self) -> str:
        return f"{' + '.join(map(_describe, self.groups))}, microbatches of {self.microbatch_size}"


def _describe(group: GroupDegrees) -> str:
    """``a > b: p2 t1,4 d4,2``; one number where it is the same on all ranks."""
    degrees = (",".join(map(str, dict.fromkeys(each))) for each in (group.tensor, group.data))
    return "{}: p{} t{} d{}".format(" > ".join(dict.fromkeys(group.sites)), len(group.sites), *degrees)


def spreads(job: Job, *, every_order: bool = False, keep: "Shortlist | None" = None) -> Iterator[Spread]:
    """Every spread of the three families that the batch and the sites' devices allow.

    `every_order`: sites side by side in every order, not only in that of the fastest ring. `keep` leaves some out.
    """
    sizes = [job.training.microbatch_size] if job.training.microbatch_size else MICROBATCH_SIZES
    every = _Spreads(job, keep or Shortlist(), every_order)
    for size in sizes:
        for groups in every.side_by_side(size):
            yield Spread(groups, size)
    for size in sizes:
        for groups in (*every.over_sites(size), *every.pairs(size)):
            yield Spread(groups, size)


class Shortlist:
    """Degrees that are looked at; this one has all."""

    def of_site(self, site: Site, degrees: Sequence[Degrees], size: int) -> Sequence[Degrees]:
        """Of one site that is combined with sites of other kinds."""
        del site, size
        return degrees

    def useful(self, sites: Sequence[Site], degrees: Sequence[Degrees], replicas: int, size: int) -> bool:
        """False where no spread can win over these sites with `replicas` of the pipeline in all.

        `degrees`: of every kind of site where they are side by side, of every site of a pipeline over several.
        """
        del sites, degrees, replicas, size
        return True


@dataclass(frozen=True)
class _Spreads:
    job: Job
    shortlist: Shortlist
    every_order: bool

    @cached_property
    def _rings(self) -> list[tuple[tuple[Site, ...], list[Sequence[Site]]]]:
        """Sets of sites, each with the orders of a ring over it."""
        sets = ((homes, list(_orders(self.job, homes, self.every_order))) for homes in self._sets())
        return [(homes, orders) for homes, orders in sets if orders]

    def side_by_side(self, size: int) -> Iterator[tuple[GroupDegrees, ...]]:
        for homes, orders in self._rings:
            kinds = kinds_of(homes)
            each = [self._of_kind(sites[0], size, len(kinds) > 1) for sites in kinds.values()]
            for chosen in product(*each):
                of_kind = dict(zip(kinds, chosen, strict=True))
                variants = [[_at_one(s, of_kind[kind_of(s)], rounded) for s in homes] for rounded in (False, True)]
                for groups in variants[: 1 if variants[0] == variants[1] else 2]:
                    yield from self._ordered(homes, groups, orders, chosen, size)

    def _ordered(
        self,
        homes: Sequence[Site],
        groups: Sequence[GroupDegrees],
        orders: Sequence[Sequence[Site]],
        chosen: Sequence[Degrees],
        size: int,
    ) -> Iterator[tuple[GroupDegrees, ...]]:
        replicas = sum(group.data[0] for group in groups)
        fits = all(group.data[0] for group in groups) and replicas * size <= self._batch
        if fits and self.shortlist.useful(homes, chosen, replicas, size):
            at = {site.name: group for site, group in zip(homes, groups, strict=True)}
            yield from (tuple(at[site.name] for site in order) for order in orders)

    def _of_kind(self, site: Site, size: int, several: bool) -> Sequence[Degrees]:
        every = self.degrees(site, RANKS)
        return self.shortlist.of_site(site, every, size) if several else every

    def _sets(self) -> Iterator[tuple[Site, ...]]:
        sites = sorted(self.job.cluster.sites, key=lambda s: -s.num_devices * max(s.device.peak_flops.values()))
        for count in range(len(sites), 0, -1):
            yield from combinations(sites, count) if len(sites) <= MAX_SETS else [tuple(sites[:count])]

    @property
    def _batch(self) -> int:
        return self.job.training.global_batch

    def degrees(self, site: Site, numbers: Sequence[int]) -> list[Degrees]:
        """Ranks and tensor degrees that the model's layers and the site's devices allow."""
        ranks = [r for r in numbers if r <= self.job.model.num_layers]
        return [(r, t) for r in ranks for t in tensor_degrees(self.job, [site]) if r * t <= site.num_devices]

    def over_sites(self, size: int) -> Iterator[tuple[GroupDegrees, ...]]:
        """One pipeline in every order of sites that has links both ways."""
        sites = strongest(self.job.cluster.sites)
        for length in range(2, min(MAX_ORDER, len(sites)) + 1):
            for order in permutations(sites, length):
                if self._joined(order):
                    yield from ((group,) for group in self._pipelines(order, size, 1))

    def pairs(self, size: int) -> Iterator[tuple[GroupDegrees, ...]]:
        """Two pipelines over two sites each, of equal degrees."""
        sites = strongest(self.job.cluster.sites)
        for order in permutations(sites, 4):
            here, there = order[:2], order[2:]
            across = list(zip(here, there, strict=True))
            alike = all(kind_of(a) == kind_of(b) and a.num_devices == b.num_devices for a, b in across)
            if alike and all(map(self._joined, (here, there, *across))):
                for group in self._pipelines(here, size, 2):
                    names = dict(zip((site.name for site in here), (site.name for site in there), strict=True))
                    yield group, GroupDegrees(tuple(names[n] for n in group.sites), group.tensor, group.data)

    def _joined(self, order: Sequence[Site]) -> bool:
        link = self.job.cluster.link
        return all(link(a.name, b.name) is not None and link(b.name, a.name) is not None for a, b in pairwise(order))

    def _pipelines(self, order: Sequence[Site], size: int, copies: int) -> Iterator[GroupDegrees]:
        for degrees in self._combined(order):
            most = [site.num_devices // (ranks * tensor) for site, (ranks, tensor) in zip(order, degrees, strict=True)]
            powers = tuple(1 << (n.bit_length() - 1) for n in most)
            for data in {powers, (min(most),) * len(most)}:
                whole = copies * max(data)
                if self._batch % (whole * size) == 0 and self.shortlist.useful(order, degrees, whole, size):
                    yield _over(order, degrees, data)

    @cached_property
    def _known(self) -> dict[object, list[tuple[Degrees, ...]]]:
        return {}

    def _combined(self, order: Sequence[Site]) -> list[tuple[Degrees, ...]]:
        """Degrees of the sites of `order`, those of one kind with one tensor degree."""
        key = tuple((kind_of(site), site.num_devices) for site in order)
        if key not in self._known:
            self._known[key] = self._combine(order)
        return self._known[key]

    def _combine(self, order: Sequence[Site]) -> list[tuple[Degrees, ...]]:
        kinds = len(kinds_of(order))
        return [
            chosen
            for chosen in product(*(self.degrees(site, RANKS_OF_SEVERAL) for site in order))
            if len({(kind_of(site), one[1]) for site, one in zip(order, chosen, strict=True)}) == kinds
            and sum(one[0] for one in chosen) <= self.job.model.num_layers
        ]


def kind_of(site: Site) -> Kind:
    """Sites of one kind have the same degrees."""
    return site.device.name, site.devices_per_machine


def kinds_of(sites: Sequence[Site]) -> dict[Kind, list[Site]]:
    """The sites of every kind."""
    found: dict[Kind, list[Site]] = {}
    for site in sites:
        found.setdefault(kind_of(site), []).append(site)
    return found


def _orders(job: Job, homes: Sequence[Site], every: bool) -> Iterator[Sequence[Site]]:
    """Orders of a ring over `homes` that has its links: every one, or the fastest; of many sites the given one."""
    if len(homes) == 1:
        yield homes
        return
    rings = [(homes[0], *rest) for rest in permutations(homes[1:])] if len(homes) <= MAX_SETS else [tuple(homes)]
    rings = list(permutations(homes)) if every and len(homes) <= MAX_SETS else rings
    linked = [ring for ring in rings if slowest_rate(job.cluster, ring)]
    yield from linked if every else sorted(linked, key=lambda ring: -slowest_rate(job.cluster, ring))[:1]


def _at_one(site: Site, degrees: Degrees, rounded: bool) -> GroupDegrees:
    ranks, tensor = degrees
    data = site.num_devices // (ranks * tensor)
    data = 1 << (data.bit_length() - 1) if rounded and data else data
    return GroupDegrees((site.name,) * ranks, (tensor,) * ranks, (data,) * ranks)


def _over(order: Sequence[Site], degrees: Sequence[Degrees], data: Sequence[int]) -> GroupDegrees:
    each = list(zip(order, degrees, data, strict=True))
    return GroupDegrees(
        sites=tuple(site.name for site, (ranks, _), _ in each for _ in range(ranks)),
        tensor=tuple(tensor for _, (ranks, tensor), _ in each for _ in range(ranks)),
        data=tuple(number for _, (ranks, _), number in each for _ in range(ranks)),
    )
