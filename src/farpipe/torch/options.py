"""Settings of a process group of the backend "farpipe", from `pg_options` or the environment."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import permutations
from pathlib import Path
from typing import Any, Final, Self, get_type_hints

from farpipe.core.errors import InputError
from farpipe.core.spec import SiteLink
from farpipe.core.spec.load import load_cluster
from farpipe.core.strict import nearest
from farpipe.engine.links import LinkShape
from farpipe.engine.transport import TransportConfig
from farpipe.engine.transport.security.tls import TlsFiles
from farpipe.planning import Plan

PREFIX: Final = "FARPIPE_"
_WORDS: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_OWN: Final = ("host", "port", "advertise_host", "certs", "links")
"""Settings that may differ between the ranks of a group; `links` is compared by what is in the file."""


@dataclass(frozen=True)
class Options:
    """Settings of one process group; every field is also read from the environment, as FARPIPE_SITE and so on.

    Without any, ranks listen on the loopback interface and nothing is encrypted.
    """

    site: str = ""
    """Site of this process; TLS certificates are checked against it, links lie between sites."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """First port: a process listens on this one plus its LOCAL_RANK, further groups on those behind; 0: any free."""
    advertise_host: str | None = None
    """Address that the others should connect to, if not `host`."""
    certs: str | None = None
    """This site's folder of `farpipe certs issue`, or the authority's with all of them."""
    allow_plaintext: bool = False
    """Listen without certificates on an address that other machines can reach."""
    links: str | None = None
    """Job or cluster file (TOML), or a plan's (JSON), whose links say what may be sent at which rate between sites."""
    emulate: bool = False
    """Give messages the latency and rate of `links`, for rehearsals on one machine."""
    streams: int | None = None
    """TCP connections per pair of ranks; None: as many as round trip and rate ask for."""
    outage_s: float = 60.0
    """A broken connection is made again; one that is gone longer ends the group."""
    max_message_bytes: int = 64 << 30
    """A longer message is refused, by the sender and by the receiver before it takes memory."""
    buffer_bytes: int = 256 << 20
    """Bound of what waits between two ranks, on either side."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ, **chosen: Any) -> Self:
        """The settings in `env`, but for those in `chosen`; InputError for one that makes no sense."""
        types = get_type_hints(cls)
        found = {
            field.name: _parse(PREFIX + field.name.upper(), text, types[field.name])
            for field in fields(cls)
            if (text := env.get(PREFIX + field.name.upper()))
        }
        return cls(**(found | chosen))

    def introduction(self) -> str:
        """Settings that the other ranks of the group have to know or to agree with, as JSON."""
        known: dict[str, Any] = {name: value for name, value in asdict(self).items() if name not in _OWN}
        known["encrypted"] = self.certs is not None
        known["links"] = [_facts(link) for link in self._site_links()]
        return json.dumps(known)

    def _site_links(self) -> tuple[SiteLink, ...]:
        if self.links is None:
            return ()
        path = Path(self.links)
        return (Plan.load(path).job.cluster if path.suffix == ".json" else load_cluster(path)).links

    def config(self, rank: int, introductions: Sequence[str], timeout_s: float, port_shift: int) -> TransportConfig:
        """The transport's settings of `rank`, given the `introduction` of every rank.

        InputError where ranks contradict each other, or the links don't connect their sites.
        """
        known = [json.loads(text) for text in introductions]
        _check_agreement(rank, known)
        sites = tuple(str(other["site"]) for other in known)
        pairs = self._links_between(sites)
        shapes = {
            pair: (link.name, LinkShape(link.latency_s, link.bandwidth_bytes_per_s) if self.emulate else None)
            for pair, link in pairs.items()
        }
        self._check_consistent(timeout_s)
        return TransportConfig(
            streams=self.streams,
            timeout_s=timeout_s,
            outage_s=self.outage_s,
            connect_timeout_s=timeout_s,
            max_message_bytes=self.max_message_bytes,
            buffer_bytes=self.buffer_bytes,
            host=self.host,
            port=self.port + port_shift if self.port else 0,
            advertise_host=self.advertise_host,
            tls=TlsFiles.find(self.certs, self.site) if self.certs else None,
            sites=sites,
            allow_plaintext=self.allow_plaintext,
            bandwidths={pair: link.bandwidth_bytes_per_s for pair, link in pairs.items()},
            latency_s=max((link.latency_s for link in pairs.values()), default=0.0),
            links=shapes,
        )

    def _links_between(self, sites: Sequence[str]) -> dict[tuple[int, int], SiteLink]:
        """The link of every pair of ranks at two sites; none where no links are given."""
        links = {(link.source, link.target): link for link in self._site_links()}
        pairs = permutations(range(len(sites)), 2) if links else ()
        return {ends: _link(links, sites, *ends, self.links) for ends in pairs if sites[ends[0]] != sites[ends[1]]}

    def _check_consistent(self, timeout_s: float) -> None:
        if self.emulate and self.links is None:
            raise InputError(f"{PREFIX}EMULATE: there are no links to emulate; name a file in {PREFIX}LINKS")
        if self.certs and not self.site:
            raise InputError(f"{PREFIX}CERTS: whose are they? Name this process's site in {PREFIX}SITE")
        if self.certs and self.allow_plaintext:
            raise InputError(f"{PREFIX}CERTS and {PREFIX}ALLOW_PLAINTEXT contradict each other; choose one")
        if not timeout_s > 0:
            raise InputError(f"a group's timeout must be more than 0, found {timeout_s:g} s")


def _parse(name: str, text: str, kind: Any) -> Any:
    """The value of the variable `name`, of a field of type `kind`."""
    try:
        if kind is bool:
            return _WORDS[text.lower()]
        if kind in (int, int | None):
            return int(text)
        return float(text) if kind is float else text
    except (KeyError, ValueError):
        expected = "0 or 1" if kind is bool else "a number" if kind is float else "a whole number"
        raise InputError(f"{name}: expected {expected}, found {text!r}") from None


def _facts(link: SiteLink) -> list[Any]:
    return [link.source, link.target, link.latency_s, link.bandwidth_bytes_per_s]


def _check_agreement(rank: int, known: Sequence[Mapping[str, Any]]) -> None:
    """InputError naming the first setting that differs between two ranks of the group, and both values."""
    mine = known[rank]
    for other, theirs in enumerate(known):
        for name in sorted({*mine, *theirs} - {"site"}):
            if (here := mine.get(name)) != (there := theirs.get(name)):
                raise InputError(f"options of the group: {name} is {here} on rank {rank} and {there} on rank {other}")
    unnamed = [other for other, theirs in enumerate(known) if not theirs["site"]]
    if unnamed and len(unnamed) < len(known):
        named = next(other for other in range(len(known)) if other not in unnamed)
        raise InputError(
            f"options of the group: rank {unnamed[0]} names no site, and rank {named} is at "
            f"{known[named]['site']!r}; set {PREFIX}SITE everywhere or nowhere"
        )


def _link(
    links: Mapping[tuple[str, str], SiteLink], sites: Sequence[str], source: int, target: int, path: str | None
) -> SiteLink:
    """The link from rank `source` to rank `target`; InputError if there is none in `path`."""
    ends = sites[source], sites[target]
    if link := links.get(ends):
        return link
    names = {name for pair in links for name in pair}
    unknown = next((site for site in ends if site not in names), None)
    reason = f"there is no link from {ends[0]!r} to {ends[1]!r}"
    if unknown is not None:
        reason = f"no link has an end at {unknown!r}{nearest(unknown, names)}"
    raise InputError(f"{path}: ranks {source} and {target} of the group have no path: {reason}")
