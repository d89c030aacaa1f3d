"""The process that is the WAN: carries packets between the sites' TUNs, each link with its own delay and rate.

``python -m farpipe.engine.links.forwarder STATE_DIR REPORT [PARENT]``, started by `Wan.up`. It makes the namespaces
and says on the descriptor REPORT that it works, or why not. It takes commands on the socket STATE_DIR/control, one
JSON object each, and answers with one. PARENT is the reading end of a pipe: when that closes, it takes down the WAN and
ends; without PARENT, it stays. Its parent may die at any moment: nothing is left then.
"""

import contextlib
import gc
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.spec import SiteLink
from farpipe.core.strict import nearest, parse_json, validate
from farpipe.engine.links import namespace, tun
from farpipe.engine.links.pipe import Pipe, queue_limit_bytes
from farpipe.engine.links.state import (
    CONTROL_NAME,
    MAX_COMMAND_BYTES,
    READY,
    WanState,
    connected_sites,
    next_links,
    take_down,
)
from farpipe.engine.links.tun import Burst, parse_burst, without_packets
from farpipe.engine.processes import ignore_requests

PRIORITY: Final = 10
"""Priority under SCHED_FIFO: before everything that computes, however many processes do."""
_BURSTS_AT_ONCE: Final = 16
"""Read from one site before the others have their turn."""
_OPEN_ENDED_S: Final = 60.0


class Forwarder:
    """Packets in, packets out, and commands between them."""

    def __init__(self, state: WanState, tuns: Mapping[str, int]) -> None:
        self._tuns = dict(tuns)
        self._pipes = {link.name: Pipe(link) for link in state.links}
        self._site_of = {IPv4Address(inside.address).packed: site for site, inside in state.namespaces().items()}
        routes = next_links(state.sites, state.links)
        self._routes = {pair: self._pipes[link.name] for pair, link in routes.items()}

    def carry_in(self, site: str) -> None:
        """Put what `site` sends on its way."""
        for _ in range(_BURSTS_AT_ONCE):
            burst = tun.read_burst(self._tuns[site])
            if burst is None:
                return
            self._offer(site, burst)

    def _offer(self, site: str, burst: Burst) -> None:
        pipe = self._routes.get((site, self._site_of.get(burst.target, "")))
        if pipe is not None:
            now_ns = time.monotonic_ns()
            for left in without_packets(burst, pipe.lose(burst.num_packets)):
                pipe.offer(left.data, left.num_bytes, left.num_packets, now_ns)

    def carry_out(self) -> float:
        """Hand over what has arrived; seconds until something arrives next."""
        now_ns = time.monotonic_ns()
        for pipe in self._pipes.values():
            arrives_ns = pipe.next_arrival_ns
            if arrives_ns is not None and arrives_ns <= now_ns:
                for data in pipe.take_arrived(now_ns):
                    self._arrive(pipe.link.target, data)
        waiting = [ns for pipe in self._pipes.values() if (ns := pipe.next_arrival_ns) is not None]
        return max(0.0, (min(waiting) - time.monotonic_ns()) / 1e9) if waiting else _OPEN_ENDED_S

    def _arrive(self, site: str, data: bytes) -> None:
        burst = parse_burst(data)
        assert burst is not None
        if self._site_of[burst.target] != site:  # this site only passes it on
            self._offer(site, burst)
            return
        with contextlib.suppress(OSError):  # an interface that somebody has shut, or no memory: lost, as on a real link
            os.write(self._tuns[site], data)

    def execute(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one command and answer it; InputError when it makes no sense."""
        known: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "status": self._status,
            "set": self._set,
            "cut": self._cut,
            "mend": self._mend,
        }
        kind = str(command.get("command"))
        if kind not in known:
            raise InputError(f"the WAN knows no command {kind!r}{nearest(kind, known)}")
        return known[kind](command)

    def _status(self, _: Mapping[str, Any]) -> dict[str, Any]:
        links = {name: _shown(pipe) for name, pipe in self._pipes.items()}
        realtime = os.sched_getscheduler(0) == os.SCHED_FIFO
        return {"links": links, "cpu_s": time.process_time(), "realtime": realtime}

    def _set(self, command: Mapping[str, Any]) -> dict[str, Any]:
        pipe = self._pipe(command)
        figures = {name: value for name, value in command.items() if name not in ("command", "link")}
        link = validate(SiteLink, pipe.link.model_dump() | figures, f"link {pipe.link.name}")
        if link.name != pipe.link.name:
            raise InputError(f"link {pipe.link.name}: its ends can't be changed")
        pipe.change(link, time.monotonic_ns())
        return _shown(pipe)

    def _cut(self, command: Mapping[str, Any]) -> dict[str, Any]:
        pipe = self._pipe(command)
        pipe.cut()
        return _shown(pipe)

    def _mend(self, command: Mapping[str, Any]) -> dict[str, Any]:
        pipe = self._pipe(command)
        pipe.mend()
        return _shown(pipe)

    def _pipe(self, command: Mapping[str, Any]) -> Pipe:
        name = str(command.get("link"))
        if name not in self._pipes:
            raise InputError(f"the WAN has no link {name!r}{nearest(name, self._pipes)}")
        return self._pipes[name]


def _shown(pipe: Pipe) -> dict[str, Any]:
    """A link as `farpipe wan status` shows it."""
    pipe.transmit(time.monotonic_ns())
    queue = {"queued_bytes": pipe.queued_bytes, "queue_limit_bytes": queue_limit_bytes(pipe.link)}
    return pipe.link.model_dump() | asdict(pipe.counters) | queue | {"cut": pipe.is_cut}


class _CommandSocket:
    """The control socket: any number of clients, none of which can make the packets wait."""

    def __init__(self, path: Path, execute: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
        self._execute = execute
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._door.bind(str(path))
        self._door.listen()
        self._clients: dict[int, socket.socket] = {}

    def descriptors(self) -> list[int]:
        """File descriptors to wait for."""
        return [self._door.fileno(), *self._clients]

    def serve(self, descriptor: int) -> None:
        """Take what has come on `descriptor`: a client, or a command of one."""
        if descriptor == self._door.fileno():
            with contextlib.suppress(OSError):
                client = self._door.accept()[0]
                client.setblocking(False)
                self._clients[client.fileno()] = client
            return
        client = self._clients[descriptor]
        try:
            text = client.recv(MAX_COMMAND_BYTES)
            if text:
                client.send(json.dumps(self._answer(text)).encode())
                return
        except OSError:
            pass
        del self._clients[descriptor]
        client.close()

    def _answer(self, text: bytes) -> dict[str, Any]:
        try:
            command = parse_json(text.decode(errors="replace"), "command")
            if not isinstance(command, dict):
                raise InputError("a command to the WAN is an object")
            return {"answer": self._execute(command)}
        except FarpipeError as error:
            return {"error": str(error)}


def _take_real_time_priority() -> None:
    """Come before everything that computes, where that is allowed."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    gc.freeze()
    gc.disable()  # nothing here makes cycles


def _make_sites(state: WanState) -> dict[str, int]:
    """Make the namespaces, each with its TUN, whose descriptors are returned by site."""
    own, talking = state.namespaces(), connected_sites(state.sites, state.links)
    namespace.create(own)
    tuns = {site: tun.open_tun(inside.name) for site, inside in own.items()}
    for site, inside in own.items():
        namespace.connect(inside, [own[other] for other in talking[site]])
    return tuns


def main() -> None:
    """Run until the pipe to its parent closes; without one, until a signal comes."""
    folder, report = Path(sys.argv[1]), int(sys.argv[2])
    parent_pipe = [int(descriptor) for descriptor in sys.argv[3:]]
    if parent_pipe:
        ignore_requests()  # the parent's ranks still need the links to write their checkpoint
    state = WanState.load(folder)
    try:
        tuns = _make_sites(state)
        forwarder = Forwarder(state, tuns)
        commands = _CommandSocket(folder / CONTROL_NAME, forwarder.execute)
        _take_real_time_priority()
        os.write(report, READY.encode())
    except (OSError, FarpipeError) as error:  # a broken pipe: its reader is gone
        take_down(state.name)
        with contextlib.suppress(OSError):
            os.write(report, str(error).encode())
        return
    os.close(report)
    _carry(state.name, forwarder, commands, {descriptor: site for site, descriptor in tuns.items()}, parent_pipe)


def _carry(
    name: str, forwarder: Forwarder, commands: _CommandSocket, sites: Mapping[int, str], parent_pipe: Sequence[int]
) -> None:
    """Carry packets and commands until the pipe to its parent closes."""
    while True:
        wait_s = forwarder.carry_out()
        readable = select.select([*sites, *commands.descriptors(), *parent_pipe], [], [], wait_s)[0]
        for descriptor in readable:
            if descriptor in sites:
                forwarder.carry_in(sites[descriptor])
            elif descriptor in parent_pipe:
                take_down(name)
                return
            else:
                commands.serve(descriptor)


if __name__ == "__main__":
    main()
