"""Which worlds a site is in: one rank's part. All ranks of the site decide by the same facts, and so alike.

They exchange facts once in every step. A world that breaks is left at once. One that the agent offers is made beside
the training; when all its members are ready, its giver, the site furthest on, brings those that return up to date and
names the step with which all enter.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor

from farpipe.core.errors import RunError
from farpipe.engine.executor.peers import Peers
from farpipe.engine.figures.step_report import Came
from farpipe.engine.outer.environment import Agents
from farpipe.engine.outer.giving import AT, Giving
from farpipe.engine.outer.joining import World
from farpipe.engine.outer.meeting import BEHIND, Offer
from farpipe.engine.outer.replica_sum import shares_of
from farpipe.engine.outer.world import SiteAgent, join, links_of, outer_config
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.transport import Transport

REPORT_S: Final = 0.1
"""Shortest time between two reports to the agent."""
AHEAD: Final = 2
"""Steps from the giver's choice of the step of entry to that step."""
ENTRY: Final = "entry"
"""Name of the post with the step of entry."""
_POLL_S: Final = 0.03
Facts = dict[str, Any]


class Membership:
    """One rank's part in the worlds of its site."""

    def __init__(self, run: RunSpec, agents: Agents, peers: Peers) -> None:
        """`run`: that of all sites. `peers`: the ranks of this site."""
        self._run, self._agents, self._peers = run, agents, peers
        self._agent = SiteAgent(agents) if peers.rank == 0 else None
        self.own, self.num_sites = agents.own, len(agents.sites)
        self.world: World | None = None
        """The world that this site is in; None: it is alone."""
        self.coming: World | None = None
        """The one that is being made."""
        self.events: list[Facts] = []
        """What has happened since somebody last took them, for the metrics."""
        self._came: list[Came] = []
        self._giving: Giving | None = None
        self._found: list[Facts] = []
        self._answer: Facts = {}
        self._heard: dict[int, int] = {}
        self._entry, self._number, self._round, self._failed = -1, 0, 0, ""
        self._reported_s, self._settled_s, self.step_s = -math.inf, math.nan, 0.0

    @property
    def members(self) -> tuple[int, ...]:
        """Sites in this site's world, itself included."""
        return (self.own,) if self.world is None else self.world.offer.members

    @property
    def names(self) -> list[str]:
        """The same by name."""
        return [self._agents.sites[site] for site in self.members]

    @property
    def shares(self) -> tuple[int, ...]:
        """Sites whose shares of the batch this one computes."""
        return shares_of(self.own, self.members, self.num_sites)

    def note(self, kind: str, **facts: Any) -> None:
        """Put an event into the metrics."""
        self.events.append({"kind": kind, **facts})

    def came(self, what: str, sites: Sequence[str], num_bytes: int, arrival_ns: int, needed_ns: int) -> None:
        """Put a message from the other ones of `sites` into the metrics; stamps of this process's clock."""
        others = tuple(site for site in sites if site != self._agents.sites[self.own])
        self._came.append(Came(what, others, num_bytes, arrival_ns, needed_ns))

    def facts(self) -> tuple[Facts, list[Came]]:
        """For the line of a step: sites in this site's world, and what has happened and come since the last call; and
        the latter by itself."""
        events, self.events = self.events, []
        came, self._came = self._came, []
        found = {"site_events": events, "outer_messages": [one.facts() for one in came]}
        return {"sites": self.names, **{name: list_ for name, list_ in found.items() if list_}}, came

    # Before the first step

    def meet(self, step: int) -> World | None:
        """Wait for the others with `step` steps done. The world from which this site has to take their state first;
        None where it may begin, alone or in the world that it is in then."""
        while True:
            found = self._exchange(f"meet {self._round}", step, waiting=True)
            self._round += 1
            self._prepare(found, waiting=True)
            coming = self.coming
            if coming is not None and self._are_ready(found):
                if coming.offer.is_together:
                    self.enter(step)
                return None if coming.offer.is_together or coming.is_giver else coming
            if found[0]["begin"] and coming is None:
                return None
            time.sleep(_POLL_S)

    # In a step

    def settle(self, step: int, *, has_sum: bool) -> bool:
        """All ranks of the site learn in `step` whether each has the sum of all sites. Where not, its world is left."""
        self._found = self._exchange(f"sites {step}", step, waiting=False, has_sum=has_sum)
        self._take_time()
        if not (all_have := all(one["sum"] for one in self._found)) and self.world is not None:
            self.note("lost", step=step, members=self.names)
            self.world.leave()
            self.world = None
        return all_have

    def _take_time(self) -> None:
        """Take note of how long a step has taken, once in each."""
        now_s = time.monotonic()
        self.step_s = now_s - self._settled_s if self._settled_s < now_s else self.step_s
        self._settled_s = now_s

    # After a step

    def after_step(self, num_steps: int, total: Tensor, state: Callable[[], Sequence[Tensor]]) -> None:
        """Between two steps, with `num_steps` done: prepare, give and enter worlds.

        `total`: the sum of the last step, not to be written to; ``state()``: a copy of what this process holds.
        RunError where this site is so far behind others that it has to start again.
        """
        if self._found[0]["behind"]:
            raise RunError(BEHIND)
        self._prepare(self._found, waiting=False)
        if self.coming is None or not self._are_ready(self._found):
            return
        if self.coming.is_giver:
            self._give(self.coming, num_steps, total, state)
        else:
            self._say(num_steps)
        self._entry = max(self._entry, *(one["entry"] for one in self._found))
        if self._entry == num_steps:
            self.enter(num_steps)
        elif -1 < self._entry < num_steps:
            self._drop("its step of entry has passed")

    def _give(self, world: World, num_steps: int, total: Tensor, state: Callable[[], Sequence[Tensor]]) -> None:
        """The giver's part: what those need that return, and the step of entry when all are near."""
        takers, runners = world.others(waiting=True), world.others(waiting=False)
        if takers and self._giving is None:
            self._giving = Giving(world, takers, num_steps, state())
            self.note("helps", step=num_steps, sites=[self._agents.sites[world.offer.members[one]] for one in takers])
        elif self._giving is not None:
            self._giving.put(num_steps - 1, total, is_last=self._entry == num_steps)
        heard = [one["heard"] for one in self._found]
        if self._entry >= 0 or not all(len(one) == len(takers) + len(runners) for one in heard):
            return
        if all(one[str(taker)] >= num_steps - 1 for one in heard for taker in takers):
            furthest = max((one[str(runner)] for one in heard for runner in runners), default=0)
            self._entry = max(num_steps, furthest) + AHEAD + self._late_steps(world)
            for runner in runners:
                if world.transport is not None:
                    world.transport.post(runner, ENTRY, str(self._entry).encode())

    def _late_steps(self, world: World) -> int:
        """Steps that others may do while they hear of the step of entry."""
        runs_apart = [place for place in world.others(waiting=False) if world.offer.members[place] not in self.members]
        latency_s = max((link.latency_s for link in links_of(self._run).values()), default=0.0)
        return math.ceil(2 * latency_s / max(self.step_s, 1e-3)) if runs_apart else 0

    def _say(self, num_steps: int) -> None:
        """A member that runs says how far it is."""
        assert self.coming is not None
        if self.coming.transport is not None:
            self.coming.transport.post(self.coming.rank_of_giver, AT, str(num_steps).encode())

    def enter(self, step: int) -> None:
        """From `step` on this site is in the world that was prepared."""
        assert self.coming is not None
        old, self.world, self.coming = self.world, self.coming, None
        gave = 0 if self._giving is None else self._giving.num_bytes
        self._giving, self._entry, self._heard = None, -1, {}
        self._number = self.world.offer.number
        self.note(
            "entered", step=step, members=self.names, epoch=self._number, **({"sent_bytes": gave} if gave else {})
        )
        if old is not None:
            old.leave()

    # Facts, and what follows from them

    def _exchange(self, name: str, step: int, *, waiting: bool, has_sum: bool = True) -> list[Facts]:
        """The facts of all ranks of the site."""
        self._listen()
        coming = "" if self.coming is None else f"{self.coming.offer.world} {self.coming.state}"
        facts = {"sum": has_sum, "coming": coming, "entry": self._entry, "heard": self._heard}
        facts |= self._report(step, waiting=waiting)
        found = self._peers.exchange(name, json.dumps(facts).encode(), waiting_for="the ranks of this site")
        return [json.loads(one) for one in found]

    def _report(self, step: int, *, waiting: bool) -> Facts:
        """Rank 0 tells the agent how far the site is, and hears of offers."""
        if self._agent is None:
            return {}
        if time.monotonic() > self._reported_s + REPORT_S:
            world = "" if self.world is None else self.world.offer.world
            facts = {"step": step, "waiting": waiting, "world": world, "number": self._number}
            reply = self._agent.report(failed=self._failed, members=self.members, **facts)
            self._reported_s, self._failed = time.monotonic(), ""
            offer = None if reply.offer is None else reply.offer.to_data()
            self._answer = {"offer": offer, "behind": reply.is_behind, "begin": reply.may_begin}
        return self._answer

    def _listen(self) -> None:
        """Take what the members of the coming world have posted."""
        coming = self.coming
        if coming is None or coming.state != "ready" or (transport := coming.transport) is None:
            return
        for rank, payload in transport.poll(AT):
            self._heard[rank] = max(self._heard.get(rank, -1), int(payload))
        for _, payload in transport.poll(ENTRY):
            self._entry = int(payload)

    def _are_ready(self, found: Sequence[Facts]) -> bool:
        assert self.coming is not None
        return all(one["coming"] == f"{self.coming.offer.world} ready" for one in found)

    def _prepare(self, found: Sequence[Facts], *, waiting: bool) -> None:
        """Drop what has failed, and begin to make the world that is offered."""
        if self.coming is not None:
            name = f"{self.coming.offer.world} failed"
            if any(one["coming"] == name for one in found):
                self._drop(self.coming.problem or "another rank of this site could not join")
        offer = None if found[0]["offer"] is None else Offer.from_data(found[0]["offer"])
        if offer is None or offer.number <= self._number or self.own not in offer.members:
            return
        if self.coming is not None and offer.number > self.coming.offer.number:
            self._drop("another world was offered")
        if self.coming is None and offer.waiting[offer.members.index(self.own)] == waiting:
            self._number = offer.number
            self.coming = World(offer, self.own, self._connection(offer))
        elif self.coming is None:
            self._number, self._failed = offer.number, offer.world

    def _connection(self, offer: Offer) -> Callable[[], Transport]:
        """What makes this rank's transport in the world of `offer`."""
        config = outer_config(self._run, offer.members, self._agents, self.step_s or 1.0)
        return partial(join, offer, self._peers.rank, self._agents, config)

    def _drop(self, reason: str) -> None:
        assert self.coming is not None
        self._failed = self.coming.offer.world
        self.note("no world", reason=reason[:200])
        self.coming.leave()
        self.coming, self._giving, self._entry, self._heard = None, None, -1, {}

    def close(self) -> None:
        """Leave all worlds when the training has ended, after what was sent has arrived."""
        for world in (self.coming, self.world):
            if world is not None:
                world.close()
        if self._agent is not None:
            self._agent.close()
