"""How the processes of an elastic run find the agents of its sites. Needs no torch."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Self

from farpipe.core.errors import InputError
from farpipe.engine.outer.calls import Caller
from farpipe.engine.transport.config import TransportConfig, resolve
from farpipe.engine.transport.rendezvous import TOKEN_VARIABLE
from farpipe.engine.transport.security.tls import Credentials, TlsFiles
from farpipe.engine.transport.tcp import listen

AGENTS_VARIABLE: Final = "FARPIPE_AGENTS"
"""Environment variable with ``NAME=HOST:PORT`` of every site's agent, separated by commas, in the sites' order."""
SITE_VARIABLE: Final = "FARPIPE_SITE"
"""Environment variable with the site of a rank of an elastic run."""
SITES_TOKEN_VARIABLE: Final = "FARPIPE_SITES_TOKEN"
"""Environment variable with the secret by which the sites of a run know each other; else that of FARPIPE_RUN_TOKEN."""
LISTENER_VARIABLE: Final = "FARPIPE_AGENT_LISTEN_FD"
LINKS_VARIABLE: Final = "FARPIPE_LINKS"
"""Environment variable with the path of the emulated links, which outlive every site."""


@dataclass(frozen=True)
class Agents:
    """The agents of all sites, as one process sees them."""

    sites: tuple[str, ...]
    addresses: tuple[tuple[str, int], ...]
    own: int
    """Number of this process's site."""
    token: bytes
    host: str
    """Address on which this process listens."""
    tls: TlsFiles | None
    allow_plaintext: bool
    links_path: str = ""

    @classmethod
    def from_env(
        cls,
        site: str,
        host: str,
        certs: Path | None,
        *,
        allow_plaintext: bool,
        env: Mapping[str, str] = os.environ,
    ) -> Self:
        """What the environment says; InputError for what is missing or makes no sense."""
        pairs = [pair.rpartition("=") for pair in env.get(AGENTS_VARIABLE, "").split(",") if pair]
        sites = tuple(name for name, _, _ in pairs)
        if site not in sites:
            raise InputError(
                f"{AGENTS_VARIABLE}: expected NAME=HOST:PORT of every site's agent, separated by commas, {site} among "
                f"them; found {env.get(AGENTS_VARIABLE, 'nothing')}"
            )
        token = env.get(SITES_TOKEN_VARIABLE) or env.get(TOKEN_VARIABLE)
        if not token:
            raise InputError(f"{SITES_TOKEN_VARIABLE} is not in the environment; set the same secret at all sites")
        return cls(
            sites,
            tuple(_address(name, address) for name, _, address in pairs),
            sites.index(site),
            token.encode(),
            host,
            None if certs is None else TlsFiles.find(certs, site),
            allow_plaintext,
            env.get(LINKS_VARIABLE, ""),
        )

    @cached_property
    def credentials(self) -> Credentials:
        """This site's certificates; of none, nothing is encrypted."""
        return Credentials(self.tls)

    @property
    def others(self) -> tuple[int, ...]:
        """Numbers of the other sites."""
        return tuple(site for site in range(len(self.sites)) if site != self.own)

    def caller(self, site: int) -> Caller:
        """A new connection to the agent of `site`, which may be this process's own."""
        return Caller(self.addresses[site], self.own, site, self.sites, self.token, self.credentials)

    def environment(self) -> dict[str, str]:
        """The variables that the ranks of this site need beside the agent's own."""
        return {SITE_VARIABLE: self.sites[self.own], SITES_TOKEN_VARIABLE: self.token.decode()}

    def config(self, port: int = 0) -> TransportConfig:
        """How this process listens."""
        return TransportConfig(host=self.host, port=port, tls=self.tls, allow_plaintext=self.allow_plaintext)


def agents_text(addresses: Mapping[str, tuple[str, int]]) -> str:
    """The value of FARPIPE_AGENTS."""
    return ",".join(f"{name}={host}:{port}" for name, (host, port) in addresses.items())


def _address(site: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"{AGENTS_VARIABLE}: {site}: expected HOST:PORT, found {text!r}")
    return resolve(host.strip("[]"), int(port))[1]


def listener_from_env(agents: Agents, env: Mapping[str, str] = os.environ) -> socket.socket:
    """The socket of this site's agent: inherited, or made. InputError when its port is taken."""
    if LISTENER_VARIABLE in env:
        return socket.socket(fileno=os.dup(int(env[LISTENER_VARIABLE])))
    return listen(agents.config(agents.addresses[agents.own][1]))
