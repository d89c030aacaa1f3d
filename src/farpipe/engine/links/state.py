"""State of the WANs that are up on this machine: a directory each, their routes, and how to remove what is left."""

import contextlib
import math
import os
import re
import select
import shutil
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field

from farpipe.core.errors import RunError
from farpipe.core.spec import SiteLink
from farpipe.core.spec.part import Part, SiteName
from farpipe.core.strict import expect_format, parse_json, read_text, validate, write_text
from farpipe.engine.links import namespace
from farpipe.engine.links.namespace import Namespace

FORMAT: Final = "farpipe/wan/1"
FOLDER: Final = Path("/run/farpipe")
STATE_NAME: Final = "wan.json"
CONTROL_NAME: Final = "control"
LOG_NAME: Final = "forwarder.log"
MAX_COMMAND_BYTES: Final = 1 << 20
READY: Final = "ready"
_END_LIMIT_S: Final = 5.0


def check_name(name: str) -> str:
    """`name` if it can be a WAN's: no dash, which ends it in the names of its namespaces."""
    if not re.fullmatch(r"[A-Za-z0-9_]{1,30}", name):
        raise ValueError(f"a WAN's name is up to 30 letters, digits and '_', found {name!r}")
    return name


class WanState(Part):
    """A WAN as it was asked for."""

    name: Annotated[str, AfterValidator(check_name)]
    sites: Annotated[tuple[SiteName, ...], Field(min_length=1, max_length=1000)]
    links: tuple[SiteLink, ...]

    def namespaces(self) -> dict[str, Namespace]:
        """Every site's namespace."""
        return namespace.namespaces_of(self.name, self.sites)

    def save(self, folder: Path) -> None:
        """Write it to the WAN's directory."""
        write_text(folder / STATE_NAME, f'{{"format": "{FORMAT}", {self.model_dump_json()[1:]}\n')

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read it from the WAN's directory."""
        path = folder / STATE_NAME
        return validate(cls, expect_format(parse_json(read_text(path), str(path)), FORMAT, str(path)), str(path))


def folder_of(name: str) -> Path:
    """The directory of the WAN called `name`."""
    return FOLDER / name


def names() -> list[str]:
    """The WANs of which there is anything, also where only namespaces are left."""
    folders = {path.name for path in FOLDER.glob("*") if path.is_dir()}
    left = {name.removeprefix(namespace.PREFIX).partition("-")[0] for name in namespace.existing("*")}
    return sorted(folders | left)


def forwarder_arguments(name: str) -> list[str]:
    """Arguments behind the interpreter in the command line of the forwarder of the WAN called `name`."""
    return ["-m", "farpipe.engine.links.forwarder", str(folder_of(name))]


def forwarder_pid(name: str) -> int | None:
    """The process that carries the packets of the WAN called `name`; None when there is none any more."""
    own = [word.encode() for word in forwarder_arguments(name)]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[1 : 1 + len(own)] == own:  # behind the interpreter; anywhere else they are what others speak of
                return int(process.name)
    return None


def take_down(name: str) -> list[int]:
    """Remove all that is left of a WAN; nothing to remove is fine.

    The processes in its namespaces are left alone, without a network: their numbers are returned.
    """
    _end(forwarder_pid(name))
    own = namespace.existing(name)
    stranded = [pid for own_name in own for pid in namespace.processes(own_name)]
    for own_name in own:
        namespace.remove(own_name)
    shutil.rmtree(folder_of(name), ignore_errors=True)
    return stranded


def _end(pid: int | None) -> None:
    """End the forwarder, unless it is the one who asks."""
    if pid is None or pid == os.getpid():
        return
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # it has nothing to tidy up that is not tidied up here
        if not select.select([pidfd], [], [], _END_LIMIT_S)[0]:
            raise RunError(f"the WAN's forwarder (process {pid}) did not end within {_END_LIMIT_S:g} s of SIGKILL")
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def connected_sites(sites: Sequence[str], links: Iterable[SiteLink]) -> dict[str, list[str]]:
    """The sites that each site can talk with: there is a route there, and one back for TCP's acknowledgements."""
    routes = next_links(sites, links)
    return {a: [b for b in sites if a != b and {(a, b), (b, a)} <= routes.keys()] for a in sites}


def next_links(sites: Sequence[str], links: Iterable[SiteLink]) -> dict[tuple[str, str], SiteLink]:
    """(where a packet is, where it goes) -> the link that it takes next; pairs without a route are missing.

    Packets of two sites without a link of their own go over as few others as possible; of several such routes it is
    the one with the least latency.
    """
    distances = {(a, b): (0.0, 0.0) if a == b else (math.inf, math.inf) for a in sites for b in sites}  # links, seconds
    first: dict[tuple[str, str], SiteLink] = {}
    for link in links:
        distances[link.source, link.target], first[link.source, link.target] = (1.0, link.latency_s), link
    for middle in sites:  # Floyd and Warshall
        for source in sites:
            for target in sites:
                (links_there, there_s), (links_on, on_s) = distances[source, middle], distances[middle, target]
                if (links_there + links_on, there_s + on_s) < distances[source, target]:
                    distances[source, target] = (links_there + links_on, there_s + on_s)
                    first[source, target] = first[source, middle]
    return first
