"""A world of sites with local steps as one process sees it: who is there, and what goes to and comes from whom."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any, NamedTuple

from farpipe.core.spec import LocalSteps
from farpipe.engine.executor.peers import Peers
from farpipe.engine.outer.outer_optimizer import fragments_of
from farpipe.engine.outer.rounds import Rounds
from farpipe.engine.outer.routes import Held, Holdings, Route, expect_one_model, owned, routes


class SitePlace(NamedTuple):
    """A process among those of all sites that train together."""

    site: int
    process: int
    """Number inside the site."""


class FragmentRoutes(NamedTuple):
    """The routes of one fragment."""

    boxes: tuple[int, ...]
    out: list[Route]
    into: list[Route]
    """Between sites, with numbers of owned boxes; processes are numbered over all sites."""
    pass_on: list[Route]
    """To others of the own site, with numbers of owned boxes."""
    take_on: list[Route]
    """From others of the own site, with numbers of views."""


@dataclass
class JoinedSites:
    """A world as one process sees it."""

    outer: Peers
    site: int
    site_of: list[int]
    """Site of every process of the world."""
    tokens: list[float]
    """By which each site's difference counts."""
    quorum: int
    fragments: list[FragmentRoutes]
    under_way: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Fragments that were sent and not merged: number of the exchange, steps that were done."""
    sent_after: dict[int, int] = field(default_factory=dict)
    """Steps after which each fragment was sent last."""
    num_sent: int = 0
    begin: int = 0
    """Steps that this site had done when it joined."""
    num_merged: int = 0
    rounds: Rounds | None = None
    """Where a quorum decides, of the first process of a site."""

    @property
    def has_quorum(self) -> bool:
        """False if there are too few sites to exchange."""
        return len(self.tokens) >= self.quorum


def joined_sites(
    settings: LocalSteps, place: SitePlace, outer: Peers, said: Sequence[Mapping[str, Any]]
) -> JoinedSites:
    """The world in which processes have `said` this of themselves; InputError where they don't train one model."""
    site_of = [one["site"] for one in said]
    sites = [[one for one in said if one["site"] == site] for site in sorted({*site_of})]
    holdings = [[holdings_of(process["held"]) for process in site] for site in sites]
    expect_one_model({f"site {number}": site for number, site in enumerate(holdings)})
    sizes = {name: prod(shape) for process in sites[0] for name, shape in process["shapes"].items()}
    owners = [owned(site) for site in holdings]
    fragments = [{*names} for names in fragments_of(sizes, settings.fragments)]
    return JoinedSites(
        outer,
        place.site,
        site_of,
        [float(site[0]["tokens"]) for site in sites],
        settings.quorum or 0,
        [_fragment_routes(names, place, holdings, owners) for names in fragments],
    )


def _fragment_routes(
    names: Collection[str],
    place: SitePlace,
    sites: Sequence[Sequence[Holdings]],
    owners: Sequence[Sequence[Holdings]],
) -> FragmentRoutes:
    """Routes of the parameters in `names` for the process at `place`: what each process of each site has, and owns."""
    mine, numbers = owners[place.site][place.process], count()
    far = {next(numbers): (site, held) for site, every in enumerate(owners) for held in every}
    far_owners = {number: held for number, (site, held) in far.items() if site != place.site}
    beside = [process for process in range(len(sites[place.site])) if process != place.process]
    near = {process: sites[place.site][process] for process in beside}
    near_owners = {process: owners[place.site][process] for process in beside}
    return FragmentRoutes(
        boxes=tuple(index for index, held in enumerate(mine) if held.name in names),
        out=routes(mine, far_owners, names, out=True),
        into=routes(mine, far_owners, names, out=False),
        pass_on=routes(mine, near, names, out=True),
        take_on=routes(sites[place.site][place.process], near_owners, names, out=False),
    )


def holdings_of(said: Sequence[Any]) -> Holdings:
    return [Held(name, tuple((start, end) for start, end in box)) for name, box in said]
