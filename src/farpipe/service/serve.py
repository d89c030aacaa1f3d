"""Serving a fleet: FLEET.toml, a database and a folder become an instance, which answers on a port."""

import logging
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn

from farpipe.core.errors import UsageError
from farpipe.core.hosts import is_loopback
from farpipe.core.units import printable
from farpipe.engine.transport.security.tls import TlsFiles
from farpipe.fleet.events import PriceChanged
from farpipe.fleet.job import Kind
from farpipe.fleet.play import configured, quotes_of
from farpipe.fleet.policies import policy_of
from farpipe.fleet.replacing import replace
from farpipe.fleet.scenario import Scenario, load_scenario
from farpipe.fleet.state import first_state
from farpipe.service.app import application
from farpipe.service.auth import make_first_token
from farpipe.service.instance import Instance
from farpipe.service.launchers import launcher_of
from farpipe.service.store import Store

RUNS_NAME: Final = "runs"
DATABASE_NAME: Final = "fleet.sqlite"


@dataclass(frozen=True)
class Address:
    """Where an instance listens; `certs`: the folder with its certificate, or None on loopback."""

    host: str
    port: int
    certs: Path | None = None

    def __post_init__(self) -> None:
        if self.certs is None and not is_loopback(self.host):
            raise UsageError(
                f"--host {self.host} can be reached from other machines, and tokens would cross the network in the "
                "clear: give --certs (farpipe certs issue), or listen on 127.0.0.1"
            )

    @property
    def url(self) -> str:
        """Its URL, by which followers name it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.certs else ''}://{host}:{self.port}"


def serve(
    fleet: Path, root: Path, database: str | None, address: Address, policy: str, report: Callable[[Path], str]
) -> None:
    """Serve the fleet of a FLEET.toml until SIGTERM or SIGINT; what runs goes on.

    `root` gets the directories of all attempts, the first token, and the database unless `database` names another;
    `report` makes the page about the run in a directory.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    store = Store(checked_url(database) if database else f"sqlite:///{root.resolve() / DATABASE_NAME}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
    scenario = load_scenario(fleet)
    compile_quotes(scenario)
    app = application(instance(scenario, policy, store, root, f"{address.url} {secrets.token_hex(3)}"), report)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn ends orderly, and then sends itself what it was sent
        signal.signal(number, lambda *_: sys.exit(0))
    files = TlsFiles.find(address.certs, "") if address.certs else None
    try:
        uvicorn.run(
            app,
            host=address.host,
            port=address.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,  # streams of the page are open for long
            ssl_certfile=files.certificate if files else None,
            ssl_keyfile=files.key if files else None,
        )
    finally:
        store.close()


def instance(scenario: Scenario, policy: str, store: Store, root: Path, owner: str) -> Instance:
    """An instance of the fleet's service, with the launcher that FLEET.toml names.

    Outages, failures and changes of links in FLEET.toml are for simulations: here they happen by themselves.
    """
    first = first_state(scenario.cluster, configured(policy_of(policy), scenario), quotes_of(scenario), scenario.stops)
    runs = (root / RUNS_NAME).resolve()
    runs.mkdir(parents=True, exist_ok=True, mode=0o700)
    launcher = launcher_of(scenario.launcher, runs, scenario.launching)
    given = (store, first, scenario.cluster, launcher, runs, owner, prices_of(scenario))
    return Instance(*given, lambda store: make_first_token(store, root))


def compile_quotes(scenario: Scenario) -> None:
    """Quote a small job, so that no request waits for the planner's kernels, which take a minute to compile once."""
    devices = {site.name: min(site.num_devices, 8) for site in scenario.cluster.sites[:2]}
    links = [link for link in scenario.cluster.links if {link.source, link.target} <= devices.keys()]
    rates = {link.name: link.bandwidth_bytes_per_s for link in links}
    quotes_of(scenario).placement(Kind("llama-3.2-1b", 4096, 64), tuple(devices.items()), rates)


def prices_of(scenario: Scenario) -> Sequence[PriceChanged]:
    """Changes of prices by Unix time."""
    start_s = scenario.start.timestamp()
    changes = [event for event in scenario.events if isinstance(event, PriceChanged)]
    return [replace(event, time_s=start_s + event.time_s) for event in changes]


def checked_url(database: str) -> str:
    """The URL of a database; UsageError for a password, which all users of the machine would see."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(database)
    except ArgumentError:
        raise UsageError("--database: expected sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME") from None
    if url.password is not None or "password" in url.query:
        raise UsageError(
            "--database: a password on a command line is seen by all users of the machine; put it into a file and add "
            "?passfile=FILE (PostgreSQL's .pgpass)"
        )
    return database


class OneLine(logging.Formatter):
    """Lines of a log in which nothing that somebody sent begins a line or steers a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        first, *others = super().format(record).split("\n")
        return "\n    ".join(printable(line) for line in (first, *others))
