"""A process's way into the worlds that join its site with others: one Transport for each, made anew in every epoch.

A world has the processes of one number, the same at all its sites: those have the same stages, and the same part of
them. It breaks as every Transport does, with a RunError in whoever uses it; the site goes on.
"""

import hmac
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any, Final, NamedTuple

from farpipe.core.step import Link
from farpipe.engine.links import LinkShape
from farpipe.engine.outer.calls import Caller
from farpipe.engine.outer.environment import Agents
from farpipe.engine.outer.meeting import Offer
from farpipe.engine.outer.sites import sites_of
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.transport import Rendezvous, Transport, TransportConfig, connect
from farpipe.engine.transport.inbox import Allocate, allocate_bytes

CONNECT_S: Final = 15.0
"""Longest wait for the members of a world to come."""
PATIENCE_STEPS: Final = 3
"""Steps for which a site may be silent before the others go on without it."""
PATIENCE_S: Final = 3.0
"""Shortest such time."""


class Reply(NamedTuple):
    """What the agent answers to a report."""

    offer: Offer | None
    is_behind: bool
    """True if this site has to start again where the others are."""
    may_begin: bool
    """True if a site that waits should begin by itself."""
    reached: tuple[int, ...]
    """Numbers of the sites that can be reached and are ready."""


class SiteAgent:
    """The own site's agent, as one of its ranks sees it."""

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        self._caller = agents.caller(agents.own)

    def report(self, *, failed: str = "", **facts: Any) -> Reply:
        """Say how far this site is (fields of `Status`), and which world could not be joined; of one rank only.

        RunError where the agent is gone: then the site ends.
        """
        answer = self._caller.call({"ask": "report", "facts": facts, "failed": failed})
        offer = None if answer["offer"] is None else Offer.from_data(answer["offer"])
        return Reply(offer, bool(answer["behind"]), bool(answer["begin"]), tuple(answer["reached"]))

    def close(self) -> None:
        """End the connection with the agent."""
        self._caller.close()


class _WorldStore:
    """What the processes of a world to come leave for each other at its giver's agent: a Store of the transport."""

    def __init__(self, caller: Caller, world: str, prefix: str) -> None:
        self._caller, self._world, self._prefix = caller, world, prefix

    def set(self, key: str, value: str, /) -> None:
        self._ask({"ask": "set", "key": self._prefix + key, "value": value})

    def get(self, key: str, /) -> bytes:
        value = self._ask({"ask": "get", "key": self._prefix + key})["value"]
        return b"" if value is None else str(value).encode()

    def check(self, keys: list[str], /) -> bool:
        return all(self._ask({"ask": "get", "key": self._prefix + key})["value"] is not None for key in keys)

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        return self._caller.call({**question, "world": self._world})


def join(
    offer: Offer,
    process: int,
    agents: Agents,
    config: TransportConfig,
    allocate: Allocate = allocate_bytes,
    *,
    rank: int | None = None,
    size: int | None = None,
) -> Transport:
    """The Transport of process number `process` of every member of `offer`, by their place in `offer.members`; with
    `rank` and `size` that of any processes.

    `config`: that of `outer_config`. RunError when not all come within CONNECT_S, or one is of another epoch: the token
    of a world is its own.
    """
    rank = offer.members.index(agents.own) if rank is None else rank
    size = size or len(offer.members)
    caller = agents.caller(offer.giver)
    try:
        store = _WorldStore(caller, offer.world, f"{process}/")
        token = hmac.new(agents.token, f"{offer.world} {offer.number} {process}".encode(), "sha256").hexdigest()
        rendezvous = Rendezvous(store, rank, size, token.encode())
        return connect(rank, size, config, rendezvous, allocate=allocate)
    finally:
        caller.close()


def outer_config(run: RunSpec, members: Sequence[int], agents: Agents, step_s: float) -> TransportConfig:
    """Settings of a world of `members`, the sites of its processes, of the whole `run`; steps take about `step_s`.

    Their links are the whole run's, emulated where the run emulates them. A member that is silent for PATIENCE_STEPS
    steps is given up.
    """
    sites = tuple(agents.sites[site] for site in members)
    links = links_of(run)
    pairs = permutations(range(len(sites)), 2)
    names = {(a, b): f"{sites[a]}>{sites[b]}" for a, b in pairs if f"{sites[a]}>{sites[b]}" in links}
    shapes = link_shapes(run)
    patience_s = patience(step_s)
    return TransportConfig(
        streams=run.transport.streams,
        timeout_s=max(patience_s, 10 * step_s),
        outage_s=patience_s * 2 / 3,  # a third of it passes before a connection counts as silent
        connect_timeout_s=CONNECT_S,
        host=agents.host,
        tls=agents.tls,
        sites=sites,
        allow_plaintext=agents.allow_plaintext,
        bandwidths={pair: links[name].bandwidth_bytes_per_s for pair, name in names.items()},
        latency_s=max((links[name].latency_s for name in names.values()), default=0.0),
        links={pair: (name, shapes[name]) for pair, name in names.items()} if agents.links_path else {},
        open_links=partial(LinkShape.open, agents.links_path, shapes) if agents.links_path else None,
    )


def link_shapes(run: RunSpec) -> dict[str, LinkShape]:
    """The emulated links between the sites of `run`, by name."""
    return {name: LinkShape(link.latency_s, link.bandwidth_bytes_per_s) for name, link in links_of(run).items()}


def links_of(run: RunSpec) -> dict[str, Link]:
    """The links between the sites of `run` that are known, by name."""
    found = {f"{a}>{b}": run.link_between(a, b) for a, b in permutations(sites_of(run), 2)}
    return {name: link for name, link in found.items() if link is not None}


def patience(step_s: float) -> float:
    """Seconds of silence after which a site is given up, where steps take `step_s`."""
    return max(PATIENCE_S, PATIENCE_STEPS * step_s)
