"""A WAN of network namespaces on this machine: bring it up, change it while it runs, take it down.

For example:

    with Wan.up(["west", "east"], links) as wan:
        subprocess.run(wan.namespaces["west"].command(["ping", "-c1", "east"]))
        wan.set("west>east", latency_s=0.060)
        wan.cut("west>east")
"""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from farpipe.core.errors import InputError, RunError
from farpipe.core.spec import Cluster, SiteLink
from farpipe.core.step import Problem
from farpipe.core.strict import validate
from farpipe.engine.links import namespace, state
from farpipe.engine.links.namespace import Namespace
from farpipe.engine.links.state import (
    CONTROL_NAME,
    LOG_NAME,
    MAX_COMMAND_BYTES,
    READY,
    WanState,
    connected_sites,
    folder_of,
)

USUAL_NAME: Final = "default"
START_LIMIT_S: Final = 20.0
ANSWER_LIMIT_S: Final = 5.0
BOTH_WAYS: Final = "<>"


class Wan:
    """A WAN that is up. As a context it is taken down at the end, however that comes."""

    def __init__(self, known: WanState, forwarder: "_Forwarder | None" = None) -> None:
        self.name: Final = known.name
        self.sites: Final = known.sites
        self.namespaces: Final[Mapping[str, Namespace]] = known.namespaces()
        """Every site's namespace."""
        self.folder: Final = folder_of(self.name)
        """Folder that goes with the WAN, however that comes to its end; only root may look into it."""
        self._forwarder = forwarder

    @classmethod
    def up(cls, sites: Sequence[str], links: Sequence[SiteLink], *, name: str = USUAL_NAME, keep: bool = False) -> Self:
        """Make a WAN of `sites` and directed `links` under `name`, which no other WAN has.

        Unless `keep`, it is taken down when this process ends, even by kill -9. UsageError where this machine or user
        can't have one, InputError for links that TCP can't use, RunError when something of the system fails.
        """
        namespace.check_possible()
        known = validate(WanState, {"name": name, "sites": tuple(sites), "links": tuple(links)}, "WAN")
        _check_links_back(known)
        _take_name(name)
        try:
            known.save(folder_of(name))
            return cls(known, _start_forwarder(name, keep))
        except BaseException:
            state.take_down(name)
            raise

    @classmethod
    def find(cls, name: str = USUAL_NAME) -> Self | None:
        """The WAN called `name` if it is up; RunError when its forwarder has ended."""
        if name not in state.names():
            return None
        if state.forwarder_pid(name) is None:
            raise RunError(
                f"the WAN {name!r} carries nothing any more: its forwarder has ended; remove what is left of it with "
                f"`farpipe wan{_name_option(name)} down`"
            )
        return cls(WanState.load(folder_of(name)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def down(self) -> list[int]:
        """Remove everything; the processes that were still in it, which go on without a network."""
        stranded = state.take_down(self.name)
        if self._forwarder is not None:
            self._forwarder.release()
            self._forwarder = None
        return stranded

    def status(self) -> dict[str, Any]:
        """Figures of all ``links`` by name (as set, counters since the start, queue), the forwarder's ``cpu_s`` and
        whether it has ``realtime`` priority."""
        return self._ask({"command": "status"})

    def set(self, link: str, **figures: float | None) -> None:
        """Change fields of `SiteLink` for ``a>b``, or ``a<>b`` for both directions; from now on, see `Pipe.change`.

        A queue that was not given goes with latency and bandwidth.
        """
        self._command(link, {"command": "set", **figures})

    def cut(self, link: str) -> None:
        """Drop everything on ``a>b``, or ``a<>b``, until `mend`."""
        self._command(link, {"command": "cut"})

    def mend(self, link: str) -> None:
        """Carry packets on ``a>b``, or ``a<>b``, again. TCP tries again after a while, as after any outage."""
        self._command(link, {"command": "mend"})

    def _command(self, link: str, command: Mapping[str, Any]) -> None:
        for name in _directions(link):
            self._ask({"link": name, **command})

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        path = self.folder / CONTROL_NAME
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
                control.settimeout(ANSWER_LIMIT_S)
                control.connect(str(path))
                control.send(json.dumps(command).encode())
                reply = json.loads(control.recv(MAX_COMMAND_BYTES))
        except (OSError, ValueError) as error:
            raise RunError(f"the WAN {self.name!r} does not answer ({path}: {error}); is it up?") from None
        if "error" in reply:
            raise InputError(str(reply["error"]))
        answer: dict[str, Any] = reply["answer"]
        return answer


def wan_of_cluster(cluster: Cluster, *, name: str = USUAL_NAME, keep: bool = False) -> Wan:
    """Bring up a WAN like `cluster`."""
    return Wan.up([site.name for site in cluster.sites], cluster.links, name=name, keep=keep)


def links_of_problem(problem: Problem) -> tuple[SiteLink, ...]:
    """The links between sites of a Problem, which is all that a rehearsal has."""
    found = []
    for name, link in problem.links.items():
        if problem.between_sites[name]:
            source, target = link.ends(name)
            speed: dict[str, Any] = {"latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}
            found.append(SiteLink(source=source, target=target, **speed))
    return tuple(found)


def _directions(link: str) -> list[str]:
    ends = link.split(BOTH_WAYS)
    return [f"{ends[0]}>{ends[1]}", f"{ends[1]}>{ends[0]}"] if len(ends) == 2 else [link]


def _name_option(name: str) -> str:
    return "" if name == USUAL_NAME else f" --name {name}"


def _check_links_back(known: WanState) -> None:
    """InputError for a link without a reverse link, over which TCP can't work."""
    talking = connected_sites(known.sites, known.links)
    for link in known.links:
        if link.target not in talking[link.source]:
            raise InputError(
                f"link {link.name} has no reverse link, and TCP needs one for its acknowledgements: add a link from "
                f"{link.target!r} to {link.source!r}"
            )


def _take_name(name: str) -> None:
    """Make the WAN's directory, which only one process can make."""
    if name not in state.names():
        try:
            folder_of(name).mkdir(parents=True, mode=0o700)
            return
        except FileExistsError:
            pass
    raise InputError(
        f"there is a WAN called {name!r} already; take it down with `farpipe wan{_name_option(name)} down`, or choose "
        "another --name"
    )


@dataclass(frozen=True)
class _Forwarder:
    """The process that carries the packets, as its parent sees it; with our end of its pipe it ends with us."""

    process: subprocess.Popen[bytes]
    parent_pipe: int | None

    def release(self) -> None:
        """Let go of it after its end."""
        if self.parent_pipe is not None:
            os.close(self.parent_pipe)
        self.process.wait(START_LIMIT_S)


def _start_forwarder(name: str, keep: bool) -> _Forwarder | None:
    """Start the process that makes the WAN and carries its packets, and wait until it does; None if it outlives us."""
    folder = folder_of(name)
    ready, report = os.pipe()
    parent_pipe, our_end = (None, None) if keep else os.pipe()
    theirs = [report] if parent_pipe is None else [report, parent_pipe]
    try:
        with (folder / LOG_NAME).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *state.forwarder_arguments(name), *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=theirs,
                start_new_session=True,
                cwd="/",
            )
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    forwarder, reported = _Forwarder(process, our_end), _report(ready)
    if reported != READY:
        why = reported or (folder / LOG_NAME).read_text(errors="replace").rstrip().rpartition("\n")[2]
        process.kill()
        forwarder.release()
        raise RunError(f"the WAN {name!r} can't be made: {why}")
    if keep:
        process.returncode = 0  # so that Popen does not complain that it is still there
        return None
    return forwarder


def _report(ready: int) -> str:
    """Return the words of a forwarder over the pipe `ready` at its start: READY, or why it can't carry packets."""
    in_time = bool(select.select([ready], [], [], START_LIMIT_S)[0])
    reported = os.read(ready, MAX_COMMAND_BYTES).decode() if in_time else f"its forwarder took over {START_LIMIT_S:g} s"
    os.close(ready)
    return reported
