"""Which world a site with local steps exchanges in: one rank's part. Sites need not be at the same step.

A world that breaks is left, and the site trains on by itself; one that the agent offers is made beside the training
and entered after a multiple of `every` steps, where those that are there first wait for the others.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from farpipe.core.errors import RunError
from farpipe.core.spec import LocalSteps
from farpipe.engine.executor.peers import Peers, TensorPeers
from farpipe.engine.outer.environment import Agents
from farpipe.engine.outer.local_exchange import LocalExchange
from farpipe.engine.outer.meeting import Offer
from farpipe.engine.outer.membership import Membership
from farpipe.engine.outer.sites import run_at, sites_of
from farpipe.engine.outer.world import join, outer_config
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.transport import Transport

POLL_S: Final = 0.03


class LocalMembership(Membership):
    """One rank's part in the worlds in which its site exchanges differences."""

    def __init__(self, run: RunSpec, agents: Agents, peers: Peers) -> None:
        super().__init__(run, agents, peers)
        assert run.local_steps is not None
        self._local: LocalSteps = run.local_steps
        self._num_processes = [run_at(run, site).num_processes for site in sites_of(run)]
        self._num_entered = self._num_met = 0
        self._limit_s = 0.0

    @property
    def site(self) -> str:
        """Name of this site."""
        return self._agents.sites[self.own]

    def begin(self, step: int, exchange: LocalExchange) -> int:
        """Wait for the others with `step` steps done; the step to begin with, that of the furthest."""
        while True:
            found = self._exchange(f"meet {self._num_met}", step, waiting=True)
            self._num_met += 1
            self._prepare(found, waiting=True)
            if self.coming is not None and self._are_ready(found):
                if (begin := self._enter_at(step, exchange, waiting=True)) is not None:
                    return begin
            elif found[0]["begin"] and self.coming is None:
                return step
            time.sleep(POLL_S)

    def exchange_after(self, num_steps: int, exchange: LocalExchange, *, is_last: bool) -> None:
        """After every step: send, merge, and leave and enter worlds."""
        found = self._exchange(f"sites {num_steps}", num_steps, waiting=False)
        self._take_time()
        if is_last:
            exchange.finish(num_steps)
        else:
            exchange.after(num_steps)
        for message in exchange.take_messages():
            what, sites = f"fragment {message.fragment}", [self.names[message.site]]
            self.came(what, sites, message.row[-1], message.arrival_ns, message.needed_ns)
        if self.world is not None and not exchange.is_joined:
            self._leave(num_steps, exchange.problem)
        self._prepare(found, waiting=False)
        may_enter = not is_last and num_steps % self._local.every == 0
        if may_enter and self.coming is not None and self._are_ready(found):
            self._enter_at(num_steps, exchange, waiting=False)

    def _leave(self, num_steps: int, problem: str) -> None:
        assert self.world is not None
        self.note("lost", step=num_steps, members=self.names, reason=problem[:200])
        self.world.leave()
        self.world = None

    def _enter_at(self, step: int, exchange: LocalExchange, *, waiting: bool) -> int | None:
        """Enter the world that was prepared, all ranks of this site or none; the step to go on with, None for none."""
        assert self.coming is not None
        problem, begin = "", step
        try:
            if self.world is not None:
                exchange.leave("another world was entered")
            if (transport := self.coming.transport) is None:
                raise RunError("it was left")
            place = self.coming.offer.members.index(self.own)
            exchange.limit_s = self._limit_s
            begin = exchange.join(TensorPeers(transport), place, step, waiting=waiting)
        except RunError as error:
            problem = str(error) or "it broke"
        self._num_entered += 1
        name = f"entered {self._num_entered}"
        problems = self._peers.exchange(name, problem.encode(), waiting_for="the ranks of this site")
        if any(problems):
            exchange.leave(max(problems).decode())
            self._drop(max(problems).decode())
            if self.world is not None:
                self._leave(step, "another world was to be entered")
            return None
        self.enter(begin)
        return begin

    def _connection(self, offer: Offer) -> Callable[[], Transport]:
        """The world of all processes of all its sites, since each may need a part of what any other has."""
        counts = [self._num_processes[site] for site in offer.members]
        before = sum(counts[: offer.members.index(self.own)])
        of_process = [site for site, count in zip(offer.members, counts, strict=True) for _ in range(count)]
        period_s = self._local.every * max(self.step_s, 1.0)
        config = outer_config(self._run, of_process, self._agents, self.step_s or 1.0)
        self._limit_s = self._run.transport.timeout_s + 2 * period_s
        config = replace(config, timeout_s=self._limit_s)
        return partial(join, offer, 0, self._agents, config, rank=before + self._peers.rank, size=sum(counts))
