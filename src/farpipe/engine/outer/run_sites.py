"""All sites of an elastic run on this machine, each with its agent and ranks; see `run`. Needs no torch."""

import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Final

from farpipe.core.errors import DivergedError, FarpipeError, RunError, RunInterruptedError, RunStoppedError
from farpipe.engine.launch.directory import next_log_dir
from farpipe.engine.launch.launcher import TICK_S, RankProcesses
from farpipe.engine.links import LinkShape, Namespace
from farpipe.engine.outer.environment import (
    AGENTS_VARIABLE,
    LINKS_VARIABLE,
    LISTENER_VARIABLE,
    SITES_TOKEN_VARIABLE,
    agents_text,
)
from farpipe.engine.outer.sites import sites_of
from farpipe.engine.outer.world import link_shapes
from farpipe.engine.processes import LeaveRequest
from farpipe.engine.run_spec import RunSpec

AGENT_PROGRAM: Final = ("-m", "farpipe.engine.outer.agent")
END_S: Final = 30.0
"""Time for the other sites to end, when one has done all steps; a site that was away is ended then."""
RETURN_S: Final = 1.0
"""Seconds before the agent of a site that was lost is started again."""


class _Site:
    """One site: its agent as a process, which is started again when it is lost."""

    def __init__(
        self,
        name: str,
        command: list[str],
        env: Mapping[str, str],
        listener: socket.socket,
        namespace: Namespace | None,
    ) -> None:
        self.name, self._command, self._env = name, command, env
        self._listener, self._namespaces = listener, None if namespace is None else [namespace]
        self._processes: RankProcesses | None = None
        self._again_s = 0.0
        self.is_done = False
        self.error: FarpipeError | None = None
        """What ended the site for good."""

    @property
    def has_ended(self) -> bool:
        """True if nothing of it will run any more."""
        return self.is_done or self.error is not None

    def start(self, log_dir: Path) -> None:
        """Start the agent."""
        self._processes = RankProcesses(
            lambda rank: self._command,
            1,
            {
                "log_dir": log_dir,
                "env": {**self._env, LISTENER_VARIABLE: str(self._listener.fileno())},
                "namespaces": self._namespaces,
                "fds_of_rank_0": [self._listener.fileno()],
            },
        )
        self._processes.start()

    def poll(self, log_dir: Callable[[], Path], say: Callable[[str], None]) -> None:
        """Take note of its end, and start it again when it was killed."""
        if self.has_ended:
            return
        if self._processes is None:
            if time.monotonic() > self._again_s:
                self.start(log_dir())
            return
        try:
            self.is_done = self._processes.poll()
        except (DivergedError, RunStoppedError, RunInterruptedError) as error:
            self.error = error
        except RunError as error:
            if "killed by SIGKILL" in str(error):
                say(f"site {self.name} is lost, and is started again")
                self._again_s = time.monotonic() + RETURN_S
                self.stop()
                return
            self.error = error
        except FarpipeError as error:
            self.error = error
        if self.has_ended:
            self.stop()

    def ask_to_leave(self) -> None:
        """Pass a request to leave on to it."""
        if self._processes is not None:
            self._processes.ask_to_leave()

    def stop(self) -> None:
        """End what runs of it."""
        if self._processes is not None:
            self._processes.stop()
            self._processes = None


def run_sites(
    run: RunSpec,
    run_dir: Path,
    *,
    on_tick: Callable[[], None],
    on_notice: Callable[[str], None],
    request: LeaveRequest,
    leave_s: float,
    namespaces: Mapping[str, Namespace] | None = None,
    options: Sequence[str],
    rank_program: Sequence[str],
) -> None:
    """Run every site of `run` until all have done their steps; a site that is killed is started again.

    `options`: those of the ranks on TLS; `rank_program`: what the ranks run. Raises what ends the whole run; a
    site that can't go on does not end the others, and is reported by `on_notice` when these have ended.
    """
    with ExitStack() as stack:
        links = stack.enter_context(closing(LinkShape.create(link_shapes(run)))) if run.emulate_links else None
        listeners = {name: stack.enter_context(_listener(name, namespaces)) for name in sites_of(run)}
        env = _environment(run, {name: sock.getsockname()[:2] for name, sock in listeners.items()})
        env |= {LINKS_VARIABLE: links.path} if links else {}
        command = partial(_command, run_dir, namespaces=namespaces, options=options, rank_program=rank_program)
        sites = [
            _Site(name, command(name), env, sock, (namespaces or {}).get(name)) for name, sock in listeners.items()
        ]
        try:
            for site in sites:
                site.start(_logs(run_dir, site.name))
            end_s = math.inf
            while not all(site.has_ended for site in sites) and time.monotonic() < end_s:
                _leave_on(request, sites, leave_s)
                if any(site.is_done for site in sites):
                    end_s = min(end_s, time.monotonic() + END_S)
                for site in sites:
                    site.poll(partial(_logs, run_dir, site.name), on_notice)
                on_tick()
                time.sleep(TICK_S / 2)
        finally:
            for site in sites:
                site.stop()
        _raise_or_tell(sites, on_notice)


def _raise_or_tell(sites: Sequence[_Site], on_notice: Callable[[str], None]) -> None:
    errors = [(site.name, site.error) for site in sites if site.error is not None]
    if len(errors) == len(sites) or any(isinstance(error, DivergedError | RunStoppedError) for _, error in errors):
        raise next((error for _, error in errors if not isinstance(error, RunError)), errors[0][1])
    for name, error in errors:
        on_notice(f"site {name} did not return: {error}")


def _leave_on(request: LeaveRequest, sites: Sequence[_Site], leave_s: float) -> None:
    if request.time_s is None:
        return
    for site in sites:
        site.ask_to_leave()
    if time.monotonic() > request.time_s + leave_s:
        raise RunError(f"the sites did not leave within {leave_s:g} s of SIGTERM")


def _listener(site: str, namespaces: Mapping[str, Namespace] | None) -> socket.socket:
    return namespaces[site].listen(0) if namespaces else socket.create_server(("127.0.0.1", 0), backlog=128)


def _environment(run: RunSpec, addresses: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // run.num_processes)))
    return {
        AGENTS_VARIABLE: agents_text(addresses),
        SITES_TOKEN_VARIABLE: secrets.token_hex(32),
        "OMP_NUM_THREADS": threads,
    }


def _command(
    run_dir: Path,
    site: str,
    *,
    namespaces: Mapping[str, Namespace] | None,
    options: Sequence[str],
    rank_program: Sequence[str],
) -> list[str]:
    host = namespaces[site].address if namespaces else "127.0.0.1"
    return [sys.executable, *AGENT_PROGRAM, str(run_dir), site, "--host", host, *options, "--", *rank_program]


def _logs(run_dir: Path, site: str) -> Path:
    """Folder for the log of a site's agent; those of its ranks are with what the site writes."""
    with suppress(OSError):
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    return next_log_dir(run_dir / "logs" / site)
