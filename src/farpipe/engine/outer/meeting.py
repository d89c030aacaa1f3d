"""Who is there, and which worlds are formed: the same rules at every site, without a coordinator. Pure; no torch.

Every site's agent has a Meeting. The agents tell each other their `Status` a few times a second, so each knows who
can be reached from it. Where those it can reach are not in one world, the site that is furthest on (of several the
first) offers one to all of them. An offer that not all can follow comes to nothing, and another one is made.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self

from farpipe.core.errors import RunError

ALIVE_S: Final = 2.0
"""A site that was heard of within this time can be reached."""
OFFER_S: Final = 1.5
"""Shortest time between two offers, and between the entry into a world and the next offer."""
START_S: Final = 30.0
"""Time for which sites that start wait for all others, before they begin with those that are there."""
BEHIND: Final = "this site is behind the others and starts again where they are"
"""What ranks end with that have found their site behind; its agent starts them at once."""
NEAR_STEPS: Final = 2
"""Sites that are no more steps apart than this meet where the first one is; one further behind starts again."""


@dataclass(frozen=True)
class Status:
    """What a site says of itself."""

    run: str
    """Digest of the run that it trains."""
    step: int = -1
    """Steps that are done; -1: its ranks are not ready."""
    waiting: bool = True
    """True if its ranks have not begun and wait for the others."""
    world: str = ""
    """Name of the world that it is in; empty: it is alone."""
    number: int = 0
    """Epoch: that of the newest world it has been in."""
    members: tuple[int, ...] = ()
    """Sites in its world."""

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Return the inverse of `to_data`; RunError for anything else."""
        try:
            return cls(**{**data, "members": tuple(int(site) for site in data["members"])})
        except (TypeError, KeyError, ValueError):
            raise RunError("a site's status can't be read; do all sites run the same farpipe?") from None


@dataclass(frozen=True)
class Offer:
    """A world to come."""

    world: str
    number: int
    """Epoch; later ones are larger."""
    members: tuple[int, ...]
    giver: int
    """The member that is furthest on, whose agent the members meet at."""
    steps: tuple[int, ...]
    """Steps that each member has done."""
    waiting: tuple[bool, ...]
    """Which members have not begun, and stay where they are until they have joined."""

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Return the inverse of `to_data`; RunError for anything else."""
        try:
            lists = {name: tuple(data[name]) for name in ("members", "steps", "waiting")}
            return cls(**{**data, **lists})
        except (TypeError, KeyError, ValueError):
            raise RunError("an offer that can't be read; do all sites run the same farpipe?") from None

    @property
    def is_together(self) -> bool:
        """True if all begin together: none has begun, and all have done the same steps."""
        return all(self.waiting) and len(set(self.steps)) == 1


class Meeting:
    """One site's view of all sites. Times are monotonic seconds; the caller sees to threads."""

    def __init__(
        self, own: int, num_sites: int, run: str, start_s: float = START_S, near_steps: float = NEAR_STEPS
    ) -> None:
        """`run`: digest of the run; a site with another one is refused. Sites that are no more than `near_steps` apart
        meet while they run."""
        self._near_steps = near_steps
        self._own, self._num_sites = own, num_sites
        self._patience_s, self._start_s = start_s, math.inf
        self._statuses: dict[int, tuple[Status, float]] = {}
        self.own = Status(run)
        self.offer: Offer | None = None
        """The newest offer that concerns this site."""
        self._offered_s, self._world = -OFFER_S, ""
        self._newest = 0
        """The largest epoch of all offers that this site has seen."""

    def ready(self, now_s: float) -> None:
        """This site's ranks are there, for the first time: from now on it waits for the other sites."""
        self._start_s = min(self._start_s, now_s + self._patience_s)

    def report(self, **facts: Any) -> None:
        """Take in what this site's ranks say: fields of `Status`."""
        self.own = replace(self.own, **facts)
        if self.offer is not None and self.offer.world == self.own.world:
            self.offer = None  # it has come to something

    def fail(self, world: str) -> None:
        """This site's ranks could not join that world."""
        if self.offer is not None and self.offer.world == world:
            self.offer = None

    def hear(self, site: int, status: Status, now_s: float) -> None:
        """Take in another site's status. RunError where it trains another run."""
        if status.run != self.own.run:
            raise RunError("it trains another run; copy the run directory of one site to the others")
        self._statuses[site] = status, now_s

    def take(self, offer: Offer) -> None:
        """Take in an offer of another site. RunError for one that is older than what this site knows."""
        if self._own not in offer.members:
            raise RunError(f"an offer without site number {self._own}")
        newest = max(self.own.number, self._newest)
        if offer.number < newest or offer.number == self.own.number:
            raise RunError(f"an offer of epoch {offer.number}, and this site knows epoch {newest}")
        self.offer, self._newest = offer, offer.number

    def reached(self, now_s: float) -> dict[int, Status]:
        """Sites whose ranks are ready, this one included, by number."""
        heard = {site: status for site, (status, at_s) in self._statuses.items() if now_s < at_s + ALIVE_S}
        return {site: one for site, one in sorted((heard | {self._own: self.own}).items()) if one.step >= 0}

    def is_behind(self, now_s: float) -> bool:
        """True if another world is so far ahead of this site, which runs, that it has to start again there."""
        own, reached = self.own, self.reached(now_s)
        ahead = [one.step for one in reached.values() if one.world != own.world or not own.world]
        return not own.waiting and max(ahead, default=0) > own.step + self._near_steps

    def may_begin(self, now_s: float) -> bool:
        """True if this site, which waits, should begin by itself: none that it can reach is with it or ahead of it."""
        others = [one for site, one in self.reached(now_s).items() if site != self._own]
        return now_s > self._start_s and not any(one.step > self.own.step or one.waiting for one in others)

    def propose(self, now_s: float) -> Offer | None:
        """The offer that this site should make now, if any."""
        reached = self.reached(now_s)
        if self.own.world != self._world:
            self._world, self._offered_s = self.own.world, now_s  # the others may not have said yet that they are in it
        if not self._should_offer(reached, now_s):
            return None
        number = 1 + max([one.number for one, _ in self._statuses.values()] + [self.own.number, self._newest])
        self._newest = number
        facts = zip(*((one.step, one.waiting) for one in reached.values()), strict=True)
        steps, waiting = (tuple(column) for column in facts)
        self.offer = Offer(secrets.token_hex(8), number, tuple(reached), self._own, steps, waiting)
        self._offered_s = now_s
        return self.offer

    def _should_offer(self, reached: Mapping[int, Status], now_s: float) -> bool:
        if len(reached) < 2 or self._own not in reached or self._is_one_world(reached):
            return False
        if max(reached, key=lambda site: (reached[site].step, not reached[site].waiting, -site)) != self._own:
            return False
        everybody_waits = all(one.waiting for one in reached.values())
        if everybody_waits and len(reached) < self._num_sites and now_s < self._start_s:
            return False
        others = [one for site, one in reached.items() if site != self._own]
        if any(not one.waiting and one.step < self.own.step - self._near_steps for one in others):
            return False  # it notices by itself, and starts again
        return self.offer is None and now_s > self._offered_s + OFFER_S

    def _is_one_world(self, reached: Mapping[int, Status]) -> bool:
        worlds = {one.world for one in reached.values()}
        return len(worlds) == 1 and worlds != {""} and set(self.own.members) == set(reached)
